"""The operators on integer codes against int64 sums and the float32 steps of `live.engines.exact`, one at a time.

On a GPU the kernels run compiled. Elsewhere this file runs itself once more in a process with Triton's interpreter;
without it, the same tests see the operators' reference and the CPU's integer product.
"""

import importlib.util
import math
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from bitdial.kernels import integer_ops as integer
from bitdial.kernels.integer_ops import integer_conv2d, integer_finish
from bitdial.kernels.reference import integer_sums
from bitdial.kernels.reference.integer_sums import PAD_CODES
from bitdial.kernels.reference.integer_sums import qconv_is_exact as real_qconv_is_exact

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

GEOMETRIES = {  # images, channels, height, width, output channels, filter, stride, padding, dilation, groups
    "3x3": (2, 16, 7, 6, 20, (3, 3), (1, 1), (1, 1), (1, 1), 1),
    "one tile and a bit": (1, 64, 9, 9, 130, (1, 1), (1, 1), (0, 0), (1, 1), 1),
    "outputs that fill no tile": (1, 40, 4, 4, 61, (1, 1), (1, 1), (0, 0), (1, 1), 1),
    "3 channels": (1, 3, 9, 8, 5, (7, 7), (2, 2), (3, 3), (1, 1), 1),
    "odd everything": (1, 37, 5, 6, 33, (3, 2), (2, 1), (1, 2), (1, 2), 1),
    "1x1 with stride": (3, 32, 5, 5, 16, (1, 1), (2, 2), (0, 0), (1, 1), 1),
    "1x1 with padding": (1, 32, 3, 3, 16, (1, 1), (1, 1), (1, 1), (1, 1), 1),
    "groups": (2, 12, 6, 5, 18, (3, 3), (1, 1), (1, 1), (1, 1), 3),
    "depth-wise": (2, 24, 6, 7, 24, (3, 3), (2, 2), (1, 1), (1, 1), 24),
    "depth-wise, dilated": (1, 5, 8, 7, 5, (3, 3), (1, 1), (2, 2), (2, 2), 5),
    "depth-wise, two each": (1, 6, 6, 6, 12, (3, 3), (1, 1), (1, 1), (1, 1), 6),
    "one channel": (1, 1, 5, 5, 4, (3, 3), (1, 1), (1, 1), (1, 1), 1),
    "linear": (9, 100, 1, 1, 10, (1, 1), (1, 1), (0, 0), (1, 1), 1),
}
FINISHES: dict[str, dict[str, Any]] = {
    "value": {},
    "bias, codes": {"bias": True, "first": "unsigned", "keep": False},
    "norm, relu, two codes": {"norm": True, "cap": math.inf, "first": "signed", "second": "asymmetric"},
    "all": {"bias": True, "norm": True, "other": True, "cap": 6.0, "first": "unsigned"},
}


@pytest.mark.skipif(INTERPRETED or DEVICE == "cuda", reason="already runs here")
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_all_of_this_under_the_interpreter(run_under_the_interpreter: Callable[[str], None]) -> None:
    run_under_the_interpreter(__file__)


def test_the_kernels_serve_where_they_should() -> None:
    assert (integer.missing_on(torch.device(DEVICE)) is None) == (INTERPRETED or DEVICE == "cuda")


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def randn(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=seeded(seed))


def quantizer(kind: str, bits: int, scale: float = 0.37) -> Tensor:
    """Scale, zero-point, range and shift of a kind of activations."""
    if kind == "signed":
        return torch.tensor([scale, 0, -(2 ** (bits - 1)), 2 ** (bits - 1) - 1, 0], dtype=torch.float32)
    zero = 2**bits // 3 if kind == "asymmetric" else 0
    return torch.tensor([scale, zero, 0, 2**bits - 1, 128], dtype=torch.float32)


def numpy_codes(y: np.ndarray, numbers: Tensor) -> np.ndarray:
    scale, zero, least, most, shift = numbers.numpy()
    with np.errstate(over="ignore"):  # a ratio may be infinite, and has the outermost code
        return (np.clip(np.rint(y / scale) + zero, least, most) - shift).astype(np.int64)


class Case(NamedTuple):
    """Arguments of `integer_conv2d`, and what it must give."""

    arguments: dict[str, Any]
    value: np.ndarray
    codes: list[np.ndarray | None]


def make_case(
    geometry: tuple[Any, ...],
    finish: dict[str, Any],
    *,
    kind: str,
    bits: int,
    halves: bool | None,
    extreme: bool = False,
) -> Case:
    n, c, h, w, k, (r, s), stride, padding, dilation, groups = geometry
    least, most = (0, 2**bits) if kind != "signed" else (-(2 ** (bits - 1)), 2 ** (bits - 1))
    a = torch.randint(least, most, (n, c, h, w), generator=seeded(1))
    weight = torch.randint(-(2 ** (bits - 1)), 2 ** (bits - 1), (k, r, s, c // groups), generator=seeded(2))
    if extreme:  # the largest sums that there can be
        a, weight = torch.full_like(a, most - 1), torch.full_like(weight, -(2 ** (bits - 1)))
    _, zero, _, _, shift = quantizer(kind, bits).tolist()
    integers = 2 * weight + 1 if halves else weight
    factor = torch.rand(k, generator=seeded(3)) * 0.01 + 0.001
    pad = int(zero - shift)
    sums = int64_convolution(a.numpy() - int(zero), integers.numpy(), stride, padding, dilation, groups)
    assert np.abs(sums).max() < 2**31
    y = sums.astype(np.float32) * factor.numpy()[:, None, None]
    options: dict[str, Any] = dict.fromkeys(("bias", "norm", "other", "first", "second", "cap"))
    if finish.get("bias"):
        options["bias"] = randn(k, seed=4)
        y = y + options["bias"].numpy()[:, None, None]
    if finish.get("norm"):
        options["norm"] = randn(2, k, seed=5)
        multiplier, offset = options["norm"].numpy()[:, :, None, None]
        y = y * multiplier + offset
    if finish.get("other"):
        options["other"] = randn(*y.shape, seed=6)
        y = y + options["other"].numpy()
    options["cap"] = finish.get("cap")
    if options["cap"] is not None:
        y = np.clip(y, np.float32(0), np.float32(options["cap"]))
    codes: list[np.ndarray | None] = []
    for i, name in enumerate(("first", "second")):
        if name in finish:
            options[name] = quantizer(finish[name], bits=4 + i, scale=0.11)
        codes.append(numpy_codes(y, options[name]) if name in finish else None)
    assert y.dtype == np.float32
    arguments = {
        "x": (a - int(shift)).to(torch.int8).contiguous(memory_format=torch.channels_last),
        "weight": weight.to(torch.int8),
        "pad": torch.full((PAD_CODES,), pad, dtype=torch.int8),
        "correction": (-pad * integers.flatten(1).sum(dim=1)).int(),
        "factor": factor,
        **options,
        **{"stride": list(stride), "padding": list(padding), "dilation": list(dilation), "groups": groups},
        "halves": None if halves is None else torch.tensor([int(halves)], dtype=torch.int32),
        "keep": finish.get("keep", True),
    }
    arguments = {name: v.to(DEVICE) if isinstance(v, Tensor) else v for name, v in arguments.items()}
    return Case(arguments, y, codes)


def int64_convolution(
    a: np.ndarray, w: np.ndarray, stride: Any, padding: Any, dilation: Any, groups: int
) -> np.ndarray:
    """Sums of a (N, C, H, W) with w (K, R, S, C / groups), tap by tap."""
    a = np.pad(a, ((0, 0), (0, 0), (padding[0],) * 2, (padding[1],) * 2)).astype(np.int64)
    (n, _, h, width), (k, r, s, cg) = a.shape, w.shape
    oh, ow = (
        (size - d * (t - 1) - 1) // st + 1 for size, t, d, st in zip((h, width), (r, s), dilation, stride, strict=True)
    )
    out = np.zeros((n, k, oh, ow), np.int64)
    for i in range(r):
        for j in range(s):
            top, left = i * dilation[0], j * dilation[1]
            part = a[
                :,
                :,
                top : top + stride[0] * (oh - 1) + 1 : stride[0],
                left : left + stride[1] * (ow - 1) + 1 : stride[1],
            ]
            part = part.reshape(n, groups, cg, oh, ow)
            filters = w[:, i, j].astype(np.int64).reshape(groups, k // groups, cg)
            out += np.einsum("ngchw,gkc->ngkhw", part, filters).reshape(n, k, oh, ow)
    return out


def check(case: Case) -> None:
    value, *found = integer_conv2d(**case.arguments)
    if case.arguments["keep"]:
        assert np.array_equal(value.cpu().numpy(), case.value)
    else:
        assert value.numel() == 0
    for got, wanted in zip(found, case.codes, strict=True):
        if wanted is None:
            assert got.numel() == 0
        else:
            assert got.dtype == torch.int8
            assert got.is_contiguous(memory_format=torch.channels_last)
            assert np.array_equal(got.cpu().numpy(), wanted)


@pytest.mark.parametrize("finish", FINISHES)
@pytest.mark.parametrize("name", GEOMETRIES)
def test_every_geometry(name: str, finish: str) -> None:
    kind = "asymmetric" if finish in ("all", "value") else "unsigned"
    check(make_case(GEOMETRIES[name], FINISHES[finish], kind=kind, bits=8, halves=finish == "all" or None))


@pytest.mark.parametrize("halves", [False, True])
@pytest.mark.parametrize("kind", ["unsigned", "signed", "asymmetric"])
@pytest.mark.parametrize("bits", [8, 7, 6, 5, 4, 3, 2])
@pytest.mark.parametrize("name", ["3x3", "depth-wise"])
def test_every_width_and_kind(name: str, bits: int, kind: str, halves: bool) -> None:
    check(make_case(GEOMETRIES[name], FINISHES["norm, relu, two codes"], kind=kind, bits=bits, halves=halves))


@pytest.mark.parametrize("halves", [None, False, True])
@pytest.mark.parametrize("channels", [16, 32, 128])
def test_layers_of_one_step(channels: int, halves: bool | None) -> None:
    """Many pixels and one product for each: the assembler once forgot an operand of it, with 32 channels."""
    images = 256 if DEVICE == "cuda" else 2  # the interpreter is slow
    geometry = (images, channels, 16, 16, 64, (1, 1), (2, 2), (0, 0), (1, 1), 1)
    check(make_case(geometry, FINISHES["bias, codes"], kind="unsigned", bits=8, halves=halves))


@pytest.mark.skipif(DEVICE == "cpu" and not INTERPRETED, reason="about the kernel")
@pytest.mark.parametrize("outputs, processors", [(64, 1), (200, 3)])
def test_layers_of_one_wide_step(outputs: int, processors: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from bitdial.kernels.triton.inference import tiles as integer_tiles

    monkeypatch.setattr(integer_tiles, "PROCESSORS", processors)
    geometry = (3, 256, 16, 16, outputs, (1, 1), (2, 2), (0, 0), (1, 1), 1)  # 3 tiles of pixels
    check(make_case(geometry, FINISHES["bias, codes"], kind="unsigned", bits=8, halves=None))


@pytest.mark.skipif(DEVICE == "cpu" and not INTERPRETED, reason="about the kernel")
@pytest.mark.parametrize("programs", [1, 3, 7])
@pytest.mark.parametrize("finish", ["bias, codes", "all"])
def test_a_program_takes_tile_after_tile(finish: str, programs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from bitdial.kernels.triton.inference import integer as triton_integer

    monkeypatch.setattr(triton_integer, "most_programs", lambda tiles: programs)
    geometry = (3, 40, 12, 11, 70, (1, 1), (1, 1), (0, 0), (1, 1), 1)  # 7 tiles of pixels, 2 of outputs
    check(make_case(geometry, FINISHES[finish], kind="unsigned", bits=8, halves=finish == "all"))


@pytest.mark.parametrize("halves", [None, False, True])
def test_the_largest_sums_are_exact(halves: bool | None) -> None:
    geometry = (1, integer.MOST_TERMS, 1, 1, 3, (1, 1), (1, 1), (0, 0), (1, 1), 1)
    check(make_case(geometry, {}, kind="unsigned", bits=8, halves=halves, extreme=True))


def test_more_terms_than_int32_holds_fall_back() -> None:
    geometry = (1, 2 * integer.MOST_TERMS, 1, 1, 2, (1, 1), (1, 1), (0, 0), (1, 1), 1)
    n, c, *_ = geometry
    x = torch.full((n, c, 1, 1), 127, dtype=torch.int8, device=DEVICE)
    weight = torch.full((2, 1, 1, c), -128, dtype=torch.int8, device=DEVICE)
    pad = torch.full((PAD_CODES,), -128, dtype=torch.int8, device=DEVICE)
    unused, factor = torch.zeros(2, dtype=torch.int32, device=DEVICE), torch.ones(2, device=DEVICE)
    moves = ([1, 1], [0, 0], [1, 1])
    value, _, _ = integer_conv2d(
        x, weight, pad, unused, factor, None, None, None, None, None, None, *moves, 1, None, True
    )
    assert value.flatten().tolist() == [float(np.float32(-128 * 255 * c))] * 2


@pytest.mark.parametrize(
    "arrange", [lambda t: t.contiguous(), lambda t: t.transpose(2, 3).contiguous().transpose(2, 3)]
)
def test_any_memory_layout(arrange: Callable[[Tensor], Tensor]) -> None:
    case = make_case(GEOMETRIES["odd everything"], FINISHES["all"], kind="unsigned", bits=8, halves=None)
    for name in ("x", "other"):
        case.arguments[name] = arrange(case.arguments[name])
    check(case)
    wide = torch.zeros(*case.arguments["x"].shape[:3], 12, dtype=torch.int8, device=DEVICE)
    wide[..., ::2] = case.arguments["x"]
    case.arguments["x"] = wide[..., ::2]
    check(case)


@pytest.mark.parametrize("name", ["3x3", "depth-wise", "3 channels"])
def test_one_call_follows_the_number_that_says_what_weights_stand_for(name: str) -> None:
    """As a recorded graph does: the arguments stay, what they hold changes."""
    cases = {flag: make_case(GEOMETRIES[name], {}, kind="unsigned", bits=8, halves=bool(flag)) for flag in (1, 0)}
    arguments = cases[1].arguments
    for flag, case in cases.items():
        arguments["halves"].fill_(flag)
        arguments["correction"].copy_(case.arguments["correction"])
        assert np.array_equal(integer_conv2d(**arguments)[0].cpu().numpy(), case.value)


def test_no_images() -> None:
    case = make_case(GEOMETRIES["3x3"], FINISHES["norm, relu, two codes"], kind="unsigned", bits=8, halves=None)
    case.arguments["x"] = case.arguments["x"][:0]
    value, codes, more = integer_conv2d(**case.arguments)
    assert value.shape == codes.shape == more.shape == (0, *case.value.shape[1:])


# --- what follows -----------------------------------------------------------------------------------


def awkward(count: int, scale: float) -> Tensor:
    """Random values, exact ties between codes and their neighbours, and values far outside the range."""
    ties = (torch.randint(-300, 300, (count,), generator=seeded(7)) + 0.5) * scale
    above, below = (torch.nextafter(ties, torch.full_like(ties, end)) for end in (math.inf, -math.inf))
    far = torch.tensor([1e30, -1e30, 1e36, 0.0, -0.0, 1e-40, 5e6, 9e6])
    return torch.cat([ties, above, below, randn(count, seed=8) * 60 * scale, far])


@pytest.mark.parametrize("kind", ["unsigned", "signed", "asymmetric"])
@pytest.mark.parametrize("bits", [8, 7, 6, 5, 4, 3, 2])
def test_codes_of_awkward_values(kind: str, bits: int) -> None:
    for scale, cap in ((0.0371, None), (0.0371, 6.0), (1.7e-4, math.inf), (3.3, None), (2.0**-7, math.inf)):
        numbers, x = quantizer(kind, bits, scale=scale), awkward(500, scale)
        _, codes, _ = integer_finish(x.to(DEVICE), None, None, numbers.to(DEVICE), None, cap, False)
        y = x.numpy() if cap is None else np.clip(x.numpy(), np.float32(0), np.float32(cap))
        assert np.array_equal(codes.cpu().numpy(), numpy_codes(y, numbers)), (scale, cap)


@pytest.mark.parametrize("shape", [(2, 5, 3, 4), (7, 5), (2, 3, 5)])
@pytest.mark.parametrize("cap", [None, math.inf, 6.0])
def test_finish(shape: tuple[int, ...], cap: float | None) -> None:
    x, other, norm = randn(*shape, seed=9) * 4, randn(*shape, seed=10), randn(2, 5, seed=11)
    multiplier, offset = (line.reshape(5, 1, 1) if len(shape) == 4 else line for line in norm.numpy())
    y = x.numpy() * multiplier + offset + other.numpy()
    y = y if cap is None else np.clip(y, np.float32(0), np.float32(cap))
    first, second = quantizer("unsigned", 8), quantizer("signed", 3)
    tensors = (t.to(DEVICE) for t in (x, norm, other, first, second))
    value, codes, more = integer_finish(*tensors, cap, True)
    assert np.array_equal(value.cpu().numpy(), y)
    assert np.array_equal(codes.cpu().numpy(), numpy_codes(y, first))
    assert np.array_equal(more.cpu().numpy(), numpy_codes(y, second))


# --- as operators -----------------------------------------------------------------------------------


@pytest.mark.skipif(INTERPRETED, reason="the interpreter does not know fake tensors")
@pytest.mark.parametrize("name", ["3x3", "depth-wise", "linear"])
def test_opcheck(name: str) -> None:
    case = make_case(GEOMETRIES[name], FINISHES["all"], kind="unsigned", bits=8, halves=True)
    torch.library.opcheck(integer_conv2d, kwargs=case.arguments, args=())
    x, first = torch.randn(2, 5, 3, 4, device=DEVICE), quantizer("unsigned", 8).to(DEVICE)
    torch.library.opcheck(integer_finish, (x, torch.ones(2, 5, device=DEVICE), None, first, None, 6.0, True))
    torch.library.opcheck(integer_finish, (x, None, None, None, None, None, True))


# --- the CPU's sums ---------------------------------------------------------------------------------

on_the_cpu = pytest.mark.skipif(INTERPRETED or DEVICE == "cuda", reason="about the CPU's own path")


@on_the_cpu
@pytest.mark.parametrize("trusted", ["neither", "int_mm", "qconv"])
@pytest.mark.parametrize("name", GEOMETRIES)
def test_every_way_to_sum(name: str, trusted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for way in ("int_mm", "qconv"):
        monkeypatch.setattr(integer_sums, f"{way}_is_exact", lambda way=way: way == trusted)
    if trusted == "qconv" and not real_qconv_is_exact():
        pytest.skip("this processor's convolution is not exact")
    for halves in (None, True):
        check(make_case(GEOMETRIES[name], FINISHES["all"], kind="asymmetric", bits=8, halves=halves))


@on_the_cpu
def test_a_weight_that_changes_in_place_is_arranged_anew() -> None:
    case = make_case(GEOMETRIES["3x3"], FINISHES["value"], kind="unsigned", bits=8, halves=None)
    other = {**case.arguments, "weight": case.arguments["weight"].flip(0)}
    expected = integer_conv2d(**other)[0]
    weight = case.arguments["weight"]
    for _ in range(2):
        check(case)  # arranged, and found again
    weight.copy_(other["weight"].clone())
    assert torch.equal(integer_conv2d(**case.arguments)[0], expected)
    base = torch.zeros(2 * weight.numel(), dtype=torch.int8)
    view = base[weight.numel() :].view(weight.shape)
    assert not integer_conv2d(**{**other, "weight": view})[0].any()
    base[weight.numel() :] = other["weight"].flatten()  # as a switch does, through the buffer behind the view
    assert torch.equal(integer_conv2d(**{**other, "weight": view})[0], expected)


@on_the_cpu
def test_weights_without_a_version_are_not_kept() -> None:
    case = make_case(GEOMETRIES["3x3"], FINISHES["value"], kind="unsigned", bits=8, halves=None)
    with torch.inference_mode():
        weight = case.arguments["weight"].clone()
        assert np.array_equal(integer_conv2d(**{**case.arguments, "weight": weight})[0].numpy(), case.value)
        weight.zero_()
        assert not integer_conv2d(**{**case.arguments, "weight": weight})[0].any()


@on_the_cpu
@pytest.mark.parametrize("name", ["3x3", "depth-wise", "linear"])
def test_the_sums_as_an_operator(name: str) -> None:
    arguments = make_case(GEOMETRIES[name], FINISHES["value"], kind="signed", bits=4, halves=False).arguments
    names = ("x", "weight", "pad", "correction", "halves", "stride", "padding", "dilation", "groups")
    arguments["x"] = integer_sums.raised(arguments["x"])
    torch.library.opcheck(integer.integer_sums, tuple(arguments[name] for name in names))


def test_the_processors_convolution_is_tried_before_it_is_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(integer_sums, "qconv_sums", lambda x, *rest: torch.zeros(1))
    assert not real_qconv_is_exact.__wrapped__()

    def missing(x: Tensor, *rest: object) -> Tensor:
        raise AttributeError("qconv2d_pointwise")

    monkeypatch.setattr(integer_sums, "qconv_sums", missing)
    assert not real_qconv_is_exact.__wrapped__()


def test_the_processors_product_is_tried_before_it_is_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    def saturating(a: Tensor, b: Tensor) -> Tensor:
        pairs = a.short()[:, :, None] * b.short()[None]
        pairs = (pairs[:, ::2].int() + pairs[:, 1::2].int()).clamp(-(2**15), 2**15 - 1)
        return pairs.sum(dim=1, dtype=torch.int32)

    monkeypatch.setattr(torch, "_int_mm", saturating)
    assert not integer_sums.int_mm_is_exact.__wrapped__()
