"""Code-exact layers against integers: int64 sums and float32 steps by numpy, in the order that the module documents."""

import math
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from bitdial import (
    BitPlan,
    JointStep,
    QuantConfig,
    TrainConfig,
    build_model,
    code_exact,
    get_bits,
    load,
    prepare,
    save,
    set_bits,
)
from bitdial.errors import BitdialError, PlanError, QuantizationError
from bitdial.functional.fixed_point import fixed_point, power_of_two
from bitdial.live.codes import CodeFacts, Codes, CodeScales, StoredCodes
from bitdial.live.layers import LiveLayer
from bitdial.nn.layer_kinds import KIND_OF

BITS = (8, 5, 3, 2)
SCHEMES = ("double_rounding", "nested", "nested+8", "centred", "truncate", "adabits", "lsq", "dorefa")
KINDS = ("unsigned", "signed", "asymmetric")
CONVS: dict[str, dict[str, Any]] = {
    "plain": {},
    "no bias": {"bias": False},
    "stride": {"stride": (2, 1)},
    "padding": {"padding": (1, 2)},
    "stride, padding, dilation": {"stride": 2, "padding": 3, "dilation": (1, 2)},
    "groups": {"groups": 2, "padding": 1},
    "depth-wise": {"groups": 4, "padding": 1},
    "depth-wise, two each": {"groups": 4, "out_channels": 8, "stride": 2},
    "1x1": {"kernel_size": 1},
    "reflect": {"padding": (2, 1), "padding_mode": "reflect"},
    "replicate": {"padding": (2, 1), "padding_mode": "replicate", "stride": 2},
    "circular": {"padding": (2, 1), "padding_mode": "circular", "groups": 2},
    "same": {"padding": "same", "kernel_size": (2, 3), "dilation": 2},
    "same, reflect": {"padding": "same", "kernel_size": (4, 3), "padding_mode": "reflect"},
}


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=seeded(seed))


def conv(seed: int = 0, **arguments: Any) -> nn.Conv2d:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Conv2d(**{"in_channels": 4, "out_channels": 4, "kernel_size": 3, **arguments})


def linear(features: int, out: int, seed: int = 0, *, bias: bool = True) -> nn.Linear:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Linear(features, out, bias)


def packed(
    layer: nn.Conv2d | nn.Linear, *, scheme: str, kind: str, ties: str = "even", per_channel: bool = True, **fixed: Any
) -> LiveLayer:
    """`layer` with random codes (or weights) and random scales; `fixed` replaces parts."""
    generator, shape = seeded(1), layer.weight.shape
    channels = shape[0] if per_channel else 1
    narrows = scheme not in ("lsq", "dorefa")
    phase = int(scheme.partition("+")[2] or 0)
    codes = torch.randint(-128 + phase, 128, shape, generator=generator, dtype=torch.int8)
    zero = torch.tensor([min(2**b - 1, z) for b, z in zip(BITS, (131, 9, 5, 1), strict=True)], dtype=torch.uint8)
    parts = {
        "weight": torch.rand(1 if narrows else len(BITS), channels, generator=generator) * 0.1 + 0.01,
        "multipliers": None,
        "act": None if kind == "float" else torch.rand(len(BITS), generator=generator) * 0.2 + 0.03,
        "act_zero_point": zero if kind == "asymmetric" else None,
    }
    source = StoredCodes(codes if narrows else randn(*shape, seed=2), BITS[0])
    made = Codes(CodeFacts(scheme, ties, BITS, kind), source, CodeScales(**parts | fixed))
    return LiveLayer(KIND_OF[type(layer)], layer, made, name="layer").eval().requires_grad_(False)


def run_exact(layer: nn.Module, x: Tensor, bits: tuple[int, int] | None = None) -> np.ndarray:
    model = code_exact(nn.Sequential(layer))
    if bits is not None:
        set_bits(model, bits)
    with torch.no_grad():
        return model(x).numpy()


# --- the reference: Python integers, numpy int64, numpy float32 --------------------------------------------


def narrowed(codes: np.ndarray, bits: int, scheme: str, ties: str) -> np.ndarray:
    shift = BITS[0] - bits
    if scheme != "double_rounding" or shift == 0:
        return codes >> shift
    exact = [Fraction(int(c), 1 << shift) for c in codes.reshape(-1)]
    whole = [round(c) if ties == "even" else math.floor(c + Fraction(1, 2)) for c in exact]
    return np.clip(np.array(whole, np.int64).reshape(codes.shape), -(1 << bits - 1), (1 << bits - 1) - 1)


def weight_integers(layer: LiveLayer, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """int64 weight integers and the float32 step between them, per channel."""
    scheme, stored, scales = layer.codes.scheme, layer.codes.stored.numpy(), layer.codes.scale.numpy()
    if scheme in ("lsq", "dorefa"):
        step = scales[BITS.index(bits)]
        source = np.tanh(stored.astype(np.float64)).astype(np.float32) if scheme == "dorefa" else stored
        ratio = source / step.reshape(-1, *(1,) * (stored.ndim - 1))
        assert ratio.dtype == np.float32
        codes = np.rint(ratio - np.float32(0.5)) if scheme == "dorefa" else np.rint(ratio)
        codes = np.clip(codes, -(1 << bits - 1), (1 << bits - 1) - 1).astype(np.int64)
    else:
        codes = narrowed(stored.astype(np.int64), bits, scheme, layer.codes.ties)
        step = scales[0] * np.float32(1 << BITS[0] - bits)
    if scheme in ("centred", "dorefa"):
        return 2 * codes + 1, step * np.float32(0.5)
    if scheme.startswith("nested"):  # whole steps of the stored codes, the middle of a cell below them, less the phase
        cell = 1 << BITS[0] - bits
        return codes * cell + cell // 2 - int(scheme.partition("+")[2] or 0), scales[0]
    return codes, step


def act_integers(layer: LiveLayer, x: Tensor, bits: int) -> tuple[np.ndarray, np.float32]:
    """int64 activation codes less their zero-point, and the float32 scale."""
    codes = layer.codes
    scale = codes.act_scale.numpy()[BITS.index(bits)]
    zero = 0 if codes.act_zero_point is None else int(codes.act_zero_point[BITS.index(bits)])
    least, most = (-(1 << bits - 1), (1 << bits - 1) - 1) if codes.act_kind == "signed" else (0, (1 << bits) - 1)
    ratio = x.numpy() / scale
    assert ratio.dtype == np.float32
    return np.clip(np.rint(ratio).astype(np.int64) + zero, least, most) - zero, scale


def sums(layer: Any, a: np.ndarray, w: np.ndarray) -> np.ndarray:
    """The sums of products, in the dtype of `a` and `w` (int64)."""
    if w.ndim == 2:
        return a @ w.T
    kernel, dilation, stride = w.shape[2:], layer.dilation, layer.stride
    if layer.padding == "same":
        total = [d * (k - 1) for k, d in zip(kernel, dilation, strict=True)]
        pads = [(t // 2, t - t // 2) for t in total]
    else:
        pads = [(p, p) for p in layer.padding]
    mode = {"zeros": "constant", "reflect": "reflect", "replicate": "edge", "circular": "wrap"}[layer.padding_mode]
    a = np.pad(a, [(0, 0), (0, 0), *pads], mode=mode)
    size = [(n - d * (k - 1) - 1) // s + 1 for n, k, d, s in zip(a.shape[2:], kernel, dilation, stride, strict=True)]
    groups, inner = layer.groups, w.shape[1]
    out = np.zeros((a.shape[0], w.shape[0], *size), a.dtype)
    for o in range(w.shape[0]):
        first = o // (w.shape[0] // groups) * inner
        for i in range(inner):
            for u in range(kernel[0]):
                for v in range(kernel[1]):
                    rows = slice(u * dilation[0], u * dilation[0] + (size[0] - 1) * stride[0] + 1, stride[0])
                    columns = slice(v * dilation[1], v * dilation[1] + (size[1] - 1) * stride[1] + 1, stride[1])
                    out[:, o] += a[:, first + i, rows, columns] * w[o, i, u, v]
    return out


def per_channel(values: np.ndarray, layer: nn.Module) -> np.ndarray:
    return values.reshape(-1, 1, 1) if hasattr(layer, "kernel_size") else values


def expected(layer: LiveLayer, x: Tensor, weight_bits: int, act_bits: int) -> tuple[np.ndarray, np.ndarray]:
    """The sums, and the output: float32(sum) * float32(act_scale * weight_step), then + bias."""
    w, step = weight_integers(layer, weight_bits)
    a, scale = act_integers(layer, x, act_bits)
    total = sums(layer, a, w)
    assert total.dtype == np.int64
    y = total.astype(np.float32) * per_channel(scale * step, layer)
    if layer.bias is not None:
        y = y + per_channel(layer.bias.numpy(), layer)
    assert y.dtype == np.float32
    return total, y


def same_bits(left: np.ndarray, right: np.ndarray) -> bool:
    return left.dtype == right.dtype == np.float32 and np.array_equal(left.view(np.int32), right.view(np.int32))


# --- quantised layers ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CONVS)
@pytest.mark.parametrize("scheme", ["double_rounding", "nested+8", "centred"])
@pytest.mark.parametrize("kind", ["unsigned", "asymmetric"])
def test_convolutions(name: str, scheme: str, kind: str) -> None:
    layer, x = packed(conv(**CONVS[name]), scheme=scheme, kind=kind), randn(3, 4, 9, 8) * 3
    for bits in ((8, 8), (5, 3), (2, 8), (2, 2)):
        _, y = expected(layer, x, *bits)
        assert same_bits(run_exact(layer, x, bits), y), bits


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("per_channel_scale", [True, False])
def test_schemes_and_kinds(scheme: str, kind: str, per_channel_scale: bool) -> None:
    x = randn(3, 4, 9, 8) * 3
    layers: list[tuple[Any, Tensor]] = [
        (conv(padding=2, stride=2, out_channels=6, groups=2), x),
        (linear(8, 5), x),
        (linear(8, 5, bias=False), x[0, 0, 0]),
    ]
    for float_layer, inputs in layers:
        layer = packed(float_layer, scheme=scheme, kind=kind, per_channel=per_channel_scale)
        for bits in ((w, a) for w in BITS for a in BITS):
            _, y = expected(layer, inputs, *bits)
            assert same_bits(run_exact(layer, inputs, bits), y), bits


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ties", ["even", "up"])
def test_the_accumulators(scheme: str, kind: str, ties: str) -> None:
    """With scales of one (or one half) the output is the sum itself."""
    narrows = scheme not in ("lsq", "dorefa")
    one = {"weight": torch.ones(1 if narrows else len(BITS), 4), "act": torch.ones(len(BITS))}
    layer = packed(conv(padding=1, bias=False), scheme=scheme, kind=kind, ties=ties, **one)
    x = randn(2, 4, 7, 7) * 100
    for bits in ((8, 8), (5, 8), (3, 3), (2, 2)):
        total, _ = expected(layer, x, *bits)
        assert 0 < np.abs(total).max() < 2**24
        step = 2.0 ** (8 - bits[0]) if narrows else 1.0
        unit = step / 2 if scheme in ("centred", "dorefa") else 1.0 if scheme.startswith("nested") else step
        assert np.array_equal(run_exact(layer, x, bits).astype(np.float64) / unit, total.astype(np.float64)), bits


def test_sums_beyond_float32s_integers() -> None:
    """The largest sums are rounded once, from the exact integer."""
    count = 70_001
    layer = packed(linear(count, 3), scheme="centred", kind="unsigned")
    layer.codes.stored.copy_(torch.where(torch.rand(3, count, generator=seeded(3)) < 0.9, 127, -128))
    x = torch.full((2, count), 1e4)
    x[1, ::7] = 0.0
    total, y = expected(layer, x, 8, 8)
    assert total.min() > 2**31
    assert not np.array_equal(total, total.astype(np.float32).astype(np.int64))
    assert same_bits(run_exact(layer, x), y)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_inputs_that_are_not_finite(bad: float) -> None:
    for kind in ("unsigned", "float"):
        x = randn(2, 4, 6, 6)
        x[1, 1, 1, 1] = bad
        with pytest.raises(QuantizationError, match="layer 'layer'"):
            run_exact(packed(conv(), scheme="nested", kind=kind), x)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_weight_only_layers_on_whole_numbers_are_exact(scheme: str) -> None:
    """Small integers are their own fixed point, so the result is float32(sum) * step + bias."""
    x = torch.randint(-500, 500, (3, 4, 9, 8), generator=seeded(4)).float()
    for float_layer in (conv(padding=1, stride=2), linear(8, 5)):
        layer = packed(float_layer, scheme=scheme, kind="float")
        for bits in BITS:
            w, step = weight_integers(layer, bits)
            total = sums(layer, x.numpy().astype(np.int64), w)
            y = total.astype(np.float32) * per_channel(step, layer) + per_channel(layer.bias.numpy(), layer)
            assert same_bits(run_exact(layer, x, (bits, 8)), y), bits


# --- fixed point ------------------------------------------------------------------------------------------------


def test_powers_of_two() -> None:
    exponents = torch.arange(-1022, 1024)
    assert power_of_two(exponents).tolist() == [2.0**e for e in range(-1022, 1024)]


@pytest.mark.parametrize("bits", [1, 8, 19, 24, 52])
@pytest.mark.parametrize(
    "largest",
    [0.0, 2.0**-149, 3e-45, 1e-40, 2.0**-126, 0.1, 0.99999994, 1.0, 1.0000001, 2.0, 255.0, 1e30, 3.4028235e38],
)
def test_fixed_point_numbers(bits: int, largest: float) -> None:
    values = [largest, -largest, largest / 3, 0.0, -largest / 1000, largest]
    x = torch.tensor([values, [0.0] * 6, [v / 16 for v in values]])
    for by_sample in (True, False):
        integers, power = fixed_point(x, bits, by_sample=by_sample)
        assert integers.dtype == power.dtype == torch.float64
        assert power.shape == ((3, 1) if by_sample else (1, 1))
        whole = integers.numpy()
        assert np.array_equal(whole, np.rint(whole))
        assert np.abs(whole).max() <= 2**bits
        for row, (row_integers, row_power) in enumerate(zip(whole, power.expand(3, 1).tolist(), strict=True)):
            mantissa, exponent = math.frexp(row_power[0])
            assert mantissa == 0.5
            top = float(x[row].abs().max() if by_sample else x.abs().max())
            if top > 0:  # the smallest power that fits: the largest value is below 2^bits of it, not below half of that
                assert 2.0 ** (bits - 1) <= Fraction(top) / Fraction(row_power[0]) < 2**bits
                assert exponent - 1 == math.frexp(top)[1] - bits
            for value, integer in zip(x[row].tolist(), row_integers, strict=True):
                assert int(integer) == round(Fraction(value) / Fraction(row_power[0]))  # half to even


def test_every_float32_survives_24_bits() -> None:
    x = torch.tensor([[2.0**-149], [2.0**-126 * 1.5], [0.1], [-1 / 3], [16777215.0], [-3.4028235e38], [0.0]])
    integers, power = fixed_point(x, 24, by_sample=True)
    assert (integers * power).float().tolist() == x.tolist()


FLOAT_LAYERS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "stem": (lambda: conv(in_channels=3, out_channels=16, padding=1, bias=False), (3, 3, 9, 9)),
    "grouped": (lambda: conv(groups=2, padding=1, stride=2), (3, 4, 9, 9)),
    "wide": (lambda: conv(in_channels=64, out_channels=3, padding=1), (2, 64, 5, 5)),
    "reflect": (lambda: conv(padding=2, padding_mode="reflect"), (2, 4, 6, 6)),
    "head": (lambda: linear(64, 10), (5, 64)),
    "tokens": (lambda: linear(16, 6), (3, 7, 16)),
    "long": (lambda: linear(5000, 4), (3, 5000)),
    "one term": (lambda: linear(1, 4), (3, 1)),
}


def fixed_bits(terms: int) -> int:
    """As many bits for either factor as keep `terms` products below 2^53, and not above float32's own 24."""
    return min((52 - math.ceil(math.log2(terms))) // 2, 24)


@pytest.mark.parametrize("name", FLOAT_LAYERS)
@pytest.mark.parametrize("size", [1.0, 1e-30, 1e30, 2.0**-140])
def test_float_layers_are_close_to_float64(name: str, size: float) -> None:
    make, shape = FLOAT_LAYERS[name]
    layer, x = make(), randn(*shape) * size
    x[1] /= 512  # samples of their own sizes
    weight, terms = layer.weight.detach().double(), layer.weight[0].numel()
    bits = fixed_bits(terms)
    y = torch.from_numpy(run_with_quantised(layer, x)).double()
    double = type(layer).forward
    wide = layer.double()
    with torch.no_grad():
        exact = double(wide, x.double())
        reach = x.abs().double().amax(dim=tuple(range(1, x.dim())), keepdim=True)
        error_x = torch.where(reach > 0, 2.0 ** (torch.floor(torch.log2(reach)) + 1 - bits - 1), 0.0)
        error_w = 2.0 ** (math.frexp(float(weight.abs().max()))[1] - bits - 1)
        ones = x.double().abs()
        wide.weight.data = weight.abs() + error_w
        if wide.bias is not None:
            wide.bias.data.zero_()
        around_w = double(wide, error_x.expand_as(ones).contiguous())
        wide.weight.data = torch.full_like(weight, error_w)
        bound = around_w + double(wide, ones)
    rounding = 2.0**-23 * exact.abs() + 2.0**-149
    if layer.bias is not None:
        rounding = rounding + 2.0**-23 * make().bias.detach().double().abs().max()
    assert bool(((y - exact).abs() <= bound + rounding).all())
    assert bool((y != 0).any())


def run_with_quantised(layer: nn.Module, x: Tensor) -> np.ndarray:
    """A float layer inside a model that has a quantised layer too (elsewhere)."""

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer
            self.quantised = packed(linear(2, 2), scheme="nested", kind="unsigned")

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x)

    with torch.no_grad():
        return code_exact(Both())(x).numpy()


@pytest.mark.parametrize("name", FLOAT_LAYERS)
def test_float_layers_on_whole_numbers_are_exact(name: str) -> None:
    make, shape = FLOAT_LAYERS[name]
    layer = make()
    with torch.no_grad():
        layer.weight.copy_(torch.randint(-9, 10, layer.weight.shape, generator=seeded(1)))
    x = torch.randint(-99, 100, shape, generator=seeded(2)).float()
    w, a = layer.weight.detach().numpy().astype(np.int64), x.numpy().astype(np.int64)
    y = sums(layer, a, w).astype(np.float32)
    if layer.bias is not None:
        y = y + per_channel(layer.bias.detach().numpy(), layer)
    assert same_bits(run_with_quantised(layer, x), y)


def layers_for(kind: str) -> list[tuple[nn.Module, Tensor]]:
    """A convolution and a linear layer of a kind, with inputs of very different sizes from sample to sample."""
    sizes = torch.tensor([1.0, 1e-4, 300.0, 1e-20, 7.0, 0.0])
    images, rows = randn(6, 12, 7, 7) * sizes.view(-1, 1, 1, 1), randn(6, 40) * sizes.view(-1, 1)
    made: list[tuple[nn.Module, Tensor]] = []
    for layer, x in ((conv(in_channels=12, padding=1), images), (linear(40, 5), rows)):
        made.append((layer if kind == "kept in float" else packed(layer, scheme="nested", kind=kind), x))
    return made


@pytest.mark.parametrize("kind", ["kept in float", "float", *KINDS])
def test_a_sample_does_not_depend_on_its_batch(kind: str) -> None:
    for layer, x in layers_for(kind):
        together = run_with_quantised(layer, x)
        for i in range(len(x)):
            assert same_bits(run_with_quantised(layer, x[i : i + 1]), together[i : i + 1])
        order = torch.tensor([3, 1, 5, 0, 2, 4])
        assert same_bits(run_with_quantised(layer, x[order]), together[order.numpy()])


@pytest.mark.parametrize("kind", ["kept in float", "float", *KINDS])
def test_the_order_of_the_sum_does_not_matter(kind: str) -> None:
    for layer, x in layers_for(kind):
        before = run_with_quantised(layer, x)
        for seed in range(3):
            order = torch.randperm(x.shape[1], generator=seeded(seed))
            weight = layer.weight.data if kind == "kept in float" else layer.codes.stored
            kept = weight.clone()
            weight.copy_(weight[:, order])
            assert same_bits(run_with_quantised(layer, x[:, order].contiguous()), before)
            weight.copy_(kept)


@pytest.mark.parametrize(
    "make",
    [lambda n: linear(n, 2, bias=False), lambda n: conv(in_channels=n, out_channels=2, kernel_size=1, bias=False)],
)
def test_what_cancels_leaves_nothing_behind(make: Any) -> None:
    """Large products that cancel, in whatever order, and one small one: it alone remains, to the last bit."""
    count = 3000
    weight, values = (torch.rand(count, generator=seeded(seed)) / 2 + 0.5 for seed in (1, 2))
    w = torch.cat([weight, torch.tensor([2.0**-9]), weight])
    x = torch.cat([values, torch.tensor([2.0**-10]), -values])
    layer = make(2 * count + 1)
    with torch.no_grad():
        layer.weight.copy_(w.view(1, -1, *(1,) * (layer.weight.dim() - 2)).expand_as(layer.weight))
    y = run_with_quantised(layer, x.view(1, -1, *(1,) * (layer.weight.dim() - 2)))
    assert y.reshape(-1).tolist() == [2.0**-19] * 2


def test_float32_does_depend_on_that() -> None:
    """Else the two tests above would show nothing."""
    (_, _), (layer, x) = layers_for("kept in float")
    order = torch.randperm(40, generator=seeded(0))
    with torch.no_grad():
        assert not torch.equal(x @ layer.weight.T, x[:, order].contiguous() @ layer.weight[:, order].contiguous().T)


@pytest.mark.parametrize("kind", ["kept in float", "float", *KINDS])
def test_an_image_without_a_batch(kind: str) -> None:
    """nn.Conv2d takes (channels, height, width) too; a channel is not a sample."""
    x = randn(4, 7, 7) * torch.tensor([1.0, 0.01, 50.0, 3.0]).view(-1, 1, 1)
    for out_channels in (4, 3):
        layer: nn.Module = conv(out_channels=out_channels)
        if kind != "kept in float":
            layer = packed(conv(out_channels=out_channels), scheme="nested", kind=kind)
        assert same_bits(run_with_quantised(layer, x), run_with_quantised(layer, x[None])[0])


def test_a_row_without_a_batch() -> None:
    for kind in ("kept in float", "float", "signed"):
        layer = linear(9, 4) if kind == "kept in float" else packed(linear(9, 4), scheme="nested", kind=kind)
        x = randn(9)
        assert same_bits(run_with_quantised(layer, x), run_with_quantised(layer, x[None])[0])


def test_an_empty_batch() -> None:
    for kind in ("kept in float", "float", "signed"):
        for layer, x in layers_for(kind):
            assert run_with_quantised(layer, x[:0]).shape[0] == 0


# --- batch norm ------------------------------------------------------------------------------------------------------


def norm(kind: type[nn.Module] = nn.BatchNorm2d, features: int = 300, **arguments: Any) -> nn.Module:
    made = kind(features, **arguments).eval()
    generator = seeded(7)
    with torch.no_grad():
        for name, value in made.state_dict(keep_vars=True).items():
            if value.is_floating_point():
                value.copy_(torch.randn(features, generator=generator) * 2)
            if name == "running_var":
                value.copy_(torch.rand(features, generator=generator) * 4)
                value[:3] = torch.tensor([0.0, 1e-12, 1e6])
    return made


def multiplier_and_offset(layer: nn.Module) -> tuple[np.ndarray, np.ndarray]:
    """float32(weight / sqrt(var + eps)) and float32(bias - mean * weight / sqrt(var + eps)), from left to right."""
    mean, variance = (v.double().numpy() for v in (layer.running_mean, layer.running_var))
    weight = layer.weight.detach().double().numpy() if layer.affine else np.ones_like(mean)
    bias = layer.bias.detach().double().numpy() if layer.affine else np.zeros_like(mean)
    root = np.sqrt(variance + layer.eps)
    return (weight / root).astype(np.float32), (bias - mean * weight / root).astype(np.float32)


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize(
    "kind, shape",
    [
        (nn.BatchNorm2d, (3, 300, 4, 5)),
        (nn.BatchNorm1d, (9, 300)),
        (nn.BatchNorm1d, (3, 300, 4)),
        (nn.BatchNorm3d, (2, 300, 2, 1, 3)),
        (nn.SyncBatchNorm, (3, 300, 4, 5)),
    ],
)
def test_batch_norm(kind: type[nn.Module], shape: tuple[int, ...], affine: bool) -> None:
    layer, x = norm(kind, affine=affine, eps=1e-3), randn(*shape)
    multiplier, offset = (v.reshape(1, -1, *(1,) * (len(shape) - 2)) for v in multiplier_and_offset(layer))
    y = x.numpy() * multiplier
    assert same_bits(run_with_quantised(layer, x), y + offset)  # two roundings, not one
    with torch.no_grad():
        assert torch.allclose(torch.from_numpy(y + offset), layer(x), rtol=1e-3, atol=1e-3)


def test_batch_norm_whose_bias_undoes_its_mean() -> None:
    """The offset is then a tiny difference of large numbers, and shows in which order float64 took its steps."""
    layer = norm(features=4096)
    with torch.no_grad():
        mean, weight = layer.running_mean.double(), layer.weight.double()
        layer.bias.copy_(mean * weight / (layer.running_var.double() + layer.eps).sqrt())
    _, offset = multiplier_and_offset(layer)
    y = run_with_quantised(layer, torch.zeros(1, 4096, 1, 1)).reshape(-1)
    assert same_bits(y, offset)


def test_batch_norm_without_statistics_is_refused_in_words() -> None:
    """It takes them from the batch, so a sample would depend on its batch; an assertion is no answer to a user."""
    layer = nn.BatchNorm2d(4, track_running_stats=False).eval()
    with pytest.raises(BitdialError, match=r"norm '\w+' keeps no running statistics.*track_running_stats=True"):
        run_with_quantised(layer, randn(2, 4, 3, 3))


# --- pools -----------------------------------------------------------------------------------------------------------


POOLS: dict[str, Any] = {
    "global": nn.AdaptiveAvgPool2d(1),
    "adaptive": nn.AdaptiveAvgPool2d((2, 3)),
    "adaptive height": nn.AdaptiveAvgPool2d((3, None)),
    "3x3": nn.AvgPool2d(3, stride=2),
    "padded": nn.AvgPool2d((3, 2), stride=1, padding=1),
    "padding not counted": nn.AvgPool2d(3, stride=2, padding=1, count_include_pad=False),
    "ceil": nn.AvgPool2d(3, stride=2, ceil_mode=True),
    "divisor": nn.AvgPool2d(2, divisor_override=7),
}


def windows(pool: nn.Module, height: int, width: int) -> list[list[tuple[slice, slice, int]]]:
    """For each output, the rows, the columns and the divisor, from the definitions."""
    if isinstance(pool, nn.AdaptiveAvgPool2d):
        size = pool.output_size if isinstance(pool.output_size, tuple) else (pool.output_size,) * 2
        rows, columns = size[0] or height, size[1] or width

        def spans(n: int, parts: int) -> list[tuple[int, int]]:
            return [(i * n // parts, -(-(i + 1) * n // parts)) for i in range(parts)]

        return [
            [(slice(a, b), slice(c, d), (b - a) * (d - c)) for c, d in spans(width, columns)]
            for a, b in spans(height, rows)
        ]
    assert isinstance(pool, nn.AvgPool2d)
    kernel, stride, padding = (
        v if isinstance(v, tuple) else (v, v) for v in (pool.kernel_size, pool.stride, pool.padding)
    )

    def starts(n: int, k: int, s: int, p: int) -> list[int]:
        steps = (n + 2 * p - k) / s
        count = (math.ceil(steps) if pool.ceil_mode else math.floor(steps)) + 1
        if pool.ceil_mode and (count - 1) * s >= n + p:
            count -= 1
        return [i * s - p for i in range(count)]

    result = []
    for a in starts(height, kernel[0], stride[0], padding[0]):
        line = []
        for c in starts(width, kernel[1], stride[1], padding[1]):
            bottom, right = min(a + kernel[0], height + padding[0]), min(c + kernel[1], width + padding[1])
            inside = slice(max(a, 0), min(bottom, height)), slice(max(c, 0), min(right, width))
            counted = (bottom - a) * (right - c)
            if not pool.count_include_pad:
                counted = (inside[0].stop - inside[0].start) * (inside[1].stop - inside[1].start)
            line.append((*inside, pool.divisor_override or counted))
        result.append(line)
    return result


@pytest.mark.parametrize("name", POOLS)
def test_average_pools(name: str) -> None:
    """The exact mean, rounded to float64 and then to float32; float32 inputs of one size lose nothing before that."""
    pool, x = POOLS[name], randn(2, 3, 8, 9)
    y = run_with_quantised(pool, x)
    grid = windows(pool, 8, 9)
    assert y.shape == (2, 3, len(grid), len(grid[0]))
    for n in range(2):
        for c in range(3):
            for i, line in enumerate(grid):
                for j, (rows, columns, divisor) in enumerate(line):
                    total = sum((Fraction(v) for v in x[n, c, rows, columns].flatten().tolist()), Fraction())
                    assert y[n, c, i, j] == np.float32(float(total / divisor))


@pytest.mark.parametrize("name", POOLS)
def test_pools_by_sample(name: str) -> None:
    x = randn(4, 3, 8, 9) * torch.tensor([1.0, 1e-20, 1e20, 0.0]).view(-1, 1, 1, 1)
    together = run_with_quantised(POOLS[name], x)
    for i in range(4):
        assert same_bits(run_with_quantised(POOLS[name], x[i : i + 1]), together[i : i + 1])
        assert same_bits(run_with_quantised(POOLS[name], x[i]), together[i])


# --- whole models ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def digits() -> tuple[Tensor, Tensor]:
    """Blurred noise around ten patterns, and which pattern it was."""
    patterns = torch.randn(10, 1, 8, 8, generator=seeded(0))
    targets = torch.arange(600) % 10
    return patterns[targets] + 0.7 * torch.randn(600, 1, 8, 8, generator=seeded(1)), targets


@pytest.fixture(scope="module")
def live(digits: tuple[Tensor, Tensor], tmp_path_factory: pytest.TempPathFactory) -> nn.Module:
    """A small residual network, trained to tell the patterns apart at all widths."""
    inputs, targets = digits
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = build_model("cifar_resnet", blocks=1, width=8, in_channels=1)
    ready = prepare(model, QuantConfig(bit_choices=(8, 4, 2), scheme="nested"), inputs[:64])
    step = JointStep(ready, TrainConfig(epochs=1, lr=5e-3), steps_per_epoch=25)
    for i in range(25):
        rows = torch.arange(i * 24, i * 24 + 24) % 500
        step(inputs[rows], targets[rows])
    path = tmp_path_factory.mktemp("exact") / "model"
    save(ready, path)
    return load(path)


@pytest.mark.parametrize("bits", [8, 4, 2, BitPlan({"layer1.0.conv1": (2, 8), "layer3.0.conv2": 8}, default=4)])
def test_it_agrees_with_the_live_model(live: nn.Module, digits: tuple[Tensor, Tensor], bits: Any) -> None:
    inputs, targets = digits
    exact = code_exact(live)
    set_bits(live, bits)
    set_bits(exact, bits)
    with torch.no_grad():
        one, other = live(inputs), exact(inputs)
    assert float((one.argmax(1) == targets).float().mean()) > 0.5  # it has learned something to agree on
    assert float((one.argmax(1) == other.argmax(1)).float().mean()) >= 0.99
    assert float((one - other).abs().median()) < 1e-4


def test_a_copy_with_a_dial_of_its_own(live: nn.Module, digits: tuple[Tensor, Tensor]) -> None:
    inputs = digits[0][:20]
    set_bits(live, 4)
    before = {name: value.clone() for name, value in live.state_dict().items()}
    types = [type(m) for m in live.modules()]
    exact = code_exact(live.train())
    with torch.no_grad():
        assert get_bits(exact) == get_bits(live)
        assert not exact.training
        at_four = exact(inputs)
        set_bits(exact, 2)
        assert not torch.equal(exact(inputs), at_four)
        assert set(dict(get_bits(live)).values()) == {(4, 4)}
        set_bits(exact, 4)
        assert torch.equal(exact(inputs), at_four)
        assert torch.equal(code_exact(exact)(inputs), at_four)
    assert live.training
    live.eval()
    assert [type(m) for m in live.modules()] == types
    assert all(torch.equal(value, before[name]) for name, value in live.state_dict().items())


def test_one_thread_and_two(live: nn.Module) -> None:
    x = randn(64, 1, 32, 32)
    exact, threads = code_exact(live), torch.get_num_threads()
    try:
        outputs = []
        for count in (1, 2):
            torch.set_num_threads(count)
            assert torch.get_num_threads() == count
            with torch.no_grad():
                for bits in (8, 2):
                    set_bits(exact, bits)
                    outputs.append(exact(x))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(outputs[0], outputs[2])
    assert torch.equal(outputs[1], outputs[3])


def test_samples_of_a_whole_model_stand_alone(live: nn.Module, digits: tuple[Tensor, Tensor]) -> None:
    inputs = digits[0][:16]
    exact = code_exact(live)
    with torch.no_grad():
        for bits in (8, 4, 2):
            set_bits(exact, bits)
            together = exact(inputs)
            for i in range(16):
                assert torch.equal(exact(inputs[i : i + 1])[0], together[i])


def test_a_whole_model_layer_by_layer(tmp_path: Path) -> None:
    """Convolution, norm, ReLU, convolution: the float32 steps in the documented order, from end to end."""
    with torch.random.fork_rng():
        torch.manual_seed(5)
        model = nn.Sequential(
            nn.Conv2d(4, 6, 3, padding=1),
            nn.BatchNorm2d(6),
            nn.ReLU(),
            nn.Conv2d(6, 5, 3, bias=False),
            nn.BatchNorm2d(5),
        )
    x = randn(4, 4, 6, 6)
    for m in model:
        if isinstance(m, nn.BatchNorm2d):
            m.load_state_dict(norm(features=m.num_features).state_dict())
    config = QuantConfig(bit_choices=BITS, keep_first_last=False, activations="asymmetric", start="3std")
    save(prepare(model, config, x), tmp_path / "m")
    live = load(tmp_path / "m", model)
    exact = code_exact(live)
    for bits in BITS:
        set_bits(exact, bits)
        y = x.numpy()
        for layer in (live[0], live[3]):
            _, y = expected(layer, torch.from_numpy(y), bits, bits)
            which = live[1] if layer is live[0] else live[4]
            multiplier, offset = multiplier_and_offset(which.sets[str(bits)])
            y = y * multiplier.reshape(-1, 1, 1) + offset.reshape(-1, 1, 1)
            if layer is live[0]:
                y = np.maximum(y, np.float32(0))
        with torch.no_grad():
            assert same_bits(exact(x).numpy(), y), bits


def test_only_live_models(live: nn.Module) -> None:
    """A prepared model keeps its float sums, so a copy of it would not be what the name says."""
    x = randn(8, 1, 8, 8)
    model = build_model("cifar_resnet", blocks=1, width=4, in_channels=1)
    with pytest.raises(PlanError):
        code_exact(model)
    with pytest.raises(BitdialError):
        code_exact(prepare(model, QuantConfig(start="3std"), x))
