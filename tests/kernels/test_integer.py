"""The operators on integer codes against int64 sums and the float32 steps of `live.engines.exact`, one at a time.

On a GPU kernels run compiled, in `test_interpreter.py` under Triton's interpreter; elsewhere the same tests see
the operators' reference and the CPU's integer product.
"""

import math
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from bitdial.kernels import ops
from bitdial.kernels.conv_shape import conv_shape
from bitdial.kernels.dispatch import missing_on
from bitdial.kernels.epilogue import Epilogue
from bitdial.kernels.integer import run_conv2d, run_epilogue
from bitdial.kernels.operands import PAD_CODES, IntegerOperands
from bitdial.kernels.ops import integer_conv2d, integer_finish
from bitdial.kernels.reference import integer_sums
from bitdial.kernels.reference.integer import MOST_TERMS
from bitdial.kernels.reference.integer_sums import qconv_is_exact as real_qconv_is_exact

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = pytest.mark.interpreter

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
EPILOGUES: dict[str, dict[str, Any]] = {
    "value": {},
    "bias, codes": {"bias": True, "quantizer_a": "unsigned", "keep_value": False},
    "norm, relu, two codes": {
        "norm_affine": True,
        "relu_max": math.inf,
        "quantizer_a": "signed",
        "quantizer_b": "asymmetric",
    },
    "all": {"bias": True, "norm_affine": True, "residual": True, "relu_max": 6.0, "quantizer_a": "unsigned"},
}  # fmt: skip


def test_the_kernels_serve_where_they_should() -> None:
    assert (missing_on(torch.device(DEVICE)) is None) == (INTERPRETED or DEVICE == "cuda")


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
    epilogue: dict[str, Any],
    *,
    kind: str,
    bits: int,
    doubled: bool | None,
    extreme: bool = False,
) -> Case:
    n, c, h, w, k, (r, s), stride, padding, dilation, groups = geometry
    least, most = (0, 2**bits) if kind != "signed" else (-(2 ** (bits - 1)), 2 ** (bits - 1))
    a = torch.randint(least, most, (n, c, h, w), generator=seeded(1))
    weight = torch.randint(-(2 ** (bits - 1)), 2 ** (bits - 1), (k, r, s, c // groups), generator=seeded(2))
    if extreme:  # the largest sums that there can be
        a, weight = torch.full_like(a, most - 1), torch.full_like(weight, -(2 ** (bits - 1)))
    _, zero, _, _, shift = quantizer(kind, bits).tolist()
    integers = 2 * weight + 1 if doubled else weight
    factor = torch.rand(k, generator=seeded(3)) * 0.01 + 0.001
    pad = int(zero - shift)
    sums = int64_convolution(a.numpy() - int(zero), integers.numpy(), stride, padding, dilation, groups)
    assert np.abs(sums).max() < 2**31
    y = sums.astype(np.float32) * factor.numpy()[:, None, None]
    options: dict[str, Any] = dict.fromkeys(
        ("bias", "norm_affine", "residual", "quantizer_a", "quantizer_b", "relu_max")
    )
    if epilogue.get("bias"):
        options["bias"] = randn(k, seed=4)
        y = y + options["bias"].numpy()[:, None, None]
    if epilogue.get("norm_affine"):
        options["norm_affine"] = randn(2, k, seed=5)
        multiplier, offset = options["norm_affine"].numpy()[:, :, None, None]
        y = y * multiplier + offset
    if epilogue.get("residual"):
        options["residual"] = randn(*y.shape, seed=6)
        y = y + options["residual"].numpy()
    options["relu_max"] = epilogue.get("relu_max")
    if options["relu_max"] is not None:
        y = np.clip(y, np.float32(0), np.float32(options["relu_max"]))
    codes: list[np.ndarray | None] = []
    for i, name in enumerate(("quantizer_a", "quantizer_b")):
        if name in epilogue:
            options[name] = quantizer(epilogue[name], bits=4 + i, scale=0.11)
        codes.append(numpy_codes(y, options[name]) if name in epilogue else None)
    assert y.dtype == np.float32
    arguments = {
        "x": (a - int(shift)).to(torch.int8).contiguous(memory_format=torch.channels_last),
        "weight": weight.to(torch.int8),
        "pad": torch.full((PAD_CODES,), pad, dtype=torch.int8),
        "correction": (-pad * integers.flatten(1).sum(dim=1)).int(),
        "factor": factor,
        **options,
        **{"stride": list(stride), "padding": list(padding), "dilation": list(dilation), "groups": groups},
        "doubled": None if doubled is None else torch.tensor([int(doubled)], dtype=torch.int32),
        "keep_value": epilogue.get("keep_value", True),
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
    if case.arguments["keep_value"]:
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


@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize("name", GEOMETRIES)
def test_every_geometry(name: str, epilogue: str) -> None:
    kind = "asymmetric" if epilogue in ("all", "value") else "unsigned"
    check(make_case(GEOMETRIES[name], EPILOGUES[epilogue], kind=kind, bits=8, doubled=epilogue == "all" or None))


@pytest.mark.parametrize("doubled", [False, True])
@pytest.mark.parametrize("kind", ["unsigned", "signed", "asymmetric"])
@pytest.mark.parametrize("bits", [8, 7, 6, 5, 4, 3, 2])
@pytest.mark.parametrize("name", ["3x3", "depth-wise"])
def test_every_width_and_kind(name: str, bits: int, kind: str, doubled: bool) -> None:
    check(make_case(GEOMETRIES[name], EPILOGUES["norm, relu, two codes"], kind=kind, bits=bits, doubled=doubled))


@pytest.mark.parametrize("doubled", [None, False, True])
@pytest.mark.parametrize("channels", [16, 32, 128])
def test_layers_of_one_step(channels: int, doubled: bool | None) -> None:
    """Many pixels and one product for each: the assembler once forgot an operand of it, with 32 channels."""
    images = 256 if DEVICE == "cuda" else 2  # the interpreter is slow
    geometry = (images, channels, 16, 16, 64, (1, 1), (2, 2), (0, 0), (1, 1), 1)
    check(make_case(geometry, EPILOGUES["bias, codes"], kind="unsigned", bits=8, doubled=doubled))


@pytest.mark.interpreter(only=True)
@pytest.mark.parametrize("outputs, processors", [(64, 1), (200, 3)])
def test_layers_of_one_wide_step(outputs: int, processors: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from bitdial.kernels.triton.inference import tiles as integer_tiles

    monkeypatch.setattr(integer_tiles, "PROCESSORS", processors)
    geometry = (3, 256, 16, 16, outputs, (1, 1), (2, 2), (0, 0), (1, 1), 1)  # 3 tiles of pixels
    check(make_case(geometry, EPILOGUES["bias, codes"], kind="unsigned", bits=8, doubled=None))


@pytest.mark.interpreter(only=True)
@pytest.mark.parametrize("programs", [1, 3, 7])
@pytest.mark.parametrize("epilogue", ["bias, codes", "all"])
def test_a_program_takes_tile_after_tile(epilogue: str, programs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from bitdial.kernels.triton.inference import integer as triton_integer

    monkeypatch.setattr(triton_integer, "most_programs", lambda tiles: programs)
    geometry = (3, 40, 12, 11, 70, (1, 1), (1, 1), (0, 0), (1, 1), 1)  # 7 tiles of pixels, 2 of outputs
    check(make_case(geometry, EPILOGUES[epilogue], kind="unsigned", bits=8, doubled=epilogue == "all"))


@pytest.mark.parametrize("doubled", [None, False, True])
def test_the_largest_sums_are_exact(doubled: bool | None) -> None:
    geometry = (1, MOST_TERMS, 1, 1, 3, (1, 1), (1, 1), (0, 0), (1, 1), 1)
    check(make_case(geometry, {}, kind="unsigned", bits=8, doubled=doubled, extreme=True))


def test_more_terms_than_int32_holds_fall_back() -> None:
    geometry = (1, 2 * MOST_TERMS, 1, 1, 2, (1, 1), (1, 1), (0, 0), (1, 1), 1)
    n, c, *_ = geometry
    x = torch.full((n, c, 1, 1), 127, dtype=torch.int8, device=DEVICE)
    weight = torch.full((2, 1, 1, c), -128, dtype=torch.int8, device=DEVICE)
    pad = torch.full((PAD_CODES,), -128, dtype=torch.int8, device=DEVICE)
    unused, factor = torch.zeros(2, dtype=torch.int32, device=DEVICE), torch.ones(2, device=DEVICE)
    operands, shape = IntegerOperands(weight, pad, unused, factor, None, None), conv_shape(x, weight, (1, 1), (0, 0))
    value, _, _ = run_conv2d(x, operands, shape, Epilogue())
    assert value.flatten().tolist() == [float(np.float32(-128 * 255 * c))] * 2


@pytest.mark.parametrize(
    "arrange", [lambda t: t.contiguous(), lambda t: t.transpose(2, 3).contiguous().transpose(2, 3)]
)
def test_any_memory_layout(arrange: Callable[[Tensor], Tensor]) -> None:
    case = make_case(GEOMETRIES["odd everything"], EPILOGUES["all"], kind="unsigned", bits=8, doubled=None)
    for name in ("x", "residual"):
        case.arguments[name] = arrange(case.arguments[name])
    check(case)
    wide = torch.zeros(*case.arguments["x"].shape[:3], 12, dtype=torch.int8, device=DEVICE)
    wide[..., ::2] = case.arguments["x"]
    case.arguments["x"] = wide[..., ::2]
    check(case)


@pytest.mark.parametrize("name", ["3x3", "depth-wise", "3 channels"])
def test_one_call_follows_the_number_that_says_what_weights_stand_for(name: str) -> None:
    """As a recorded graph does: the arguments stay, what they hold changes."""
    cases = {flag: make_case(GEOMETRIES[name], {}, kind="unsigned", bits=8, doubled=bool(flag)) for flag in (1, 0)}
    arguments = cases[1].arguments
    for flag, case in cases.items():
        arguments["doubled"].fill_(flag)
        arguments["correction"].copy_(case.arguments["correction"])
        assert np.array_equal(integer_conv2d(**arguments)[0].cpu().numpy(), case.value)


def test_no_images() -> None:
    case = make_case(GEOMETRIES["3x3"], EPILOGUES["norm, relu, two codes"], kind="unsigned", bits=8, doubled=None)
    case.arguments["x"] = case.arguments["x"][:0]
    value, codes, more = integer_conv2d(**case.arguments)
    assert value.shape == codes.shape == more.shape == (0, *case.value.shape[1:])


# --- epilogues --------------------------------------------------------------------------------------


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
        _, codes, _ = run_epilogue(x.to(DEVICE), Epilogue(None, None, cap, numbers.to(DEVICE), None, False))
        y = x.numpy() if cap is None else np.clip(x.numpy(), np.float32(0), np.float32(cap))
        assert np.array_equal(codes.cpu().numpy(), numpy_codes(y, numbers)), (scale, cap)


@pytest.mark.parametrize("shape", [(2, 5, 3, 4), (7, 5), (2, 3, 5)])
@pytest.mark.parametrize("relu_max", [None, math.inf, 6.0])
def test_epilogues(shape: tuple[int, ...], relu_max: float | None) -> None:
    x, residual, norm = randn(*shape, seed=9) * 4, randn(*shape, seed=10), randn(2, 5, seed=11)
    multiplier, offset = (line.reshape(5, 1, 1) if len(shape) == 4 else line for line in norm.numpy())
    y = x.numpy() * multiplier + offset + residual.numpy()
    y = y if relu_max is None else np.clip(y, np.float32(0), np.float32(relu_max))
    a, b = quantizer("unsigned", 8), quantizer("signed", 3)
    epilogue = Epilogue(norm.to(DEVICE), residual.to(DEVICE), relu_max, a.to(DEVICE), b.to(DEVICE))
    value, codes_a, codes_b = run_epilogue(x.to(DEVICE), epilogue)
    assert np.array_equal(value.cpu().numpy(), y)
    assert np.array_equal(codes_a.cpu().numpy(), numpy_codes(y, a))
    assert np.array_equal(codes_b.cpu().numpy(), numpy_codes(y, b))


# --- as operators -----------------------------------------------------------------------------------


@pytest.mark.skipif(INTERPRETED, reason="the interpreter does not know fake tensors")
@pytest.mark.parametrize("name", ["3x3", "depth-wise", "linear"])
def test_opcheck(name: str) -> None:
    case = make_case(GEOMETRIES[name], EPILOGUES["all"], kind="unsigned", bits=8, doubled=True)
    torch.library.opcheck(integer_conv2d, kwargs=case.arguments, args=())
    x, numbers = torch.randn(2, 5, 3, 4, device=DEVICE), quantizer("unsigned", 8).to(DEVICE)
    epilogue = Epilogue(torch.ones(2, 5, device=DEVICE), relu_max=6.0, quantizer_a=numbers)
    torch.library.opcheck(integer_finish, (x, *epilogue))
    torch.library.opcheck(integer_finish, (x, *Epilogue()))


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
    for doubled in (None, True):
        check(make_case(GEOMETRIES[name], EPILOGUES["all"], kind="asymmetric", bits=8, doubled=doubled))


@on_the_cpu
def test_a_weight_that_changes_in_place_is_arranged_anew() -> None:
    case = make_case(GEOMETRIES["3x3"], EPILOGUES["value"], kind="unsigned", bits=8, doubled=None)
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
    case = make_case(GEOMETRIES["3x3"], EPILOGUES["value"], kind="unsigned", bits=8, doubled=None)
    with torch.inference_mode():
        weight = case.arguments["weight"].clone()
        assert np.array_equal(integer_conv2d(**{**case.arguments, "weight": weight})[0].numpy(), case.value)
        weight.zero_()
        assert not integer_conv2d(**{**case.arguments, "weight": weight})[0].any()


@on_the_cpu
@pytest.mark.parametrize("name", ["3x3", "depth-wise", "linear"])
def test_the_sums_as_an_operator(name: str) -> None:
    arguments = make_case(GEOMETRIES[name], EPILOGUES["value"], kind="signed", bits=4, doubled=False).arguments
    names = ("x", "weight", "pad", "correction", "doubled", "stride", "padding", "dilation", "groups")
    arguments["x"] = integer_sums.raised(arguments["x"])
    torch.library.opcheck(ops.integer_sums, tuple(arguments[name] for name in names))


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
