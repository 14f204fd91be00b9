"""The arithmetic against references written from the formulas: Fractions, loops, float64.

Nothing here calls one function of the source to check another, except where the claim is that
two of them agree bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from bitdial import functional as bf
from bitdial.errors import BitdialError, ConfigError, QuantizationError

BITS = (8, 6, 4, 3, 2)
ALL_PAIRS = [(high, low) for high in range(2, 9) for low in range(2, high + 1)]
PAIRS = [(high, low) for high in BITS for low in BITS if low <= high]
NESTED = ("nested", "nested+1", "nested+8", "nested+32")
NARROWABLE = ("double_rounding", *NESTED, "centred", "truncate", "adabits")
LEARNED = ("double_rounding", *NESTED, "centred", "truncate", "lsq")
DERIVED = ("adabits", "dorefa")


def pairs_of(scheme: str) -> list[tuple[int, int]]:
    """The (high, low) that a scheme allows among the usual widths."""
    return [(h, low) for h, low in PAIRS if h >= least_high(scheme)] if scheme in NARROWABLE else [(b, b) for b in BITS]


def phase_of(scheme: str) -> int:
    return int(scheme.partition("+")[2] or 0)


def least_high(scheme: str) -> int:
    """The fewest stored bits that have room for the phase."""
    return {0: 2, 1: 3, 8: 6, 32: 8}[phase_of(scheme)]


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def randn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=generator(seed))


# --- references ---------------------------------------------------------------------------------


def narrow_one(code: int, high: int, low: int, scheme: str, ties: str) -> int:
    """The second rounding in exact rationals: code / 2^shift to the nearest, or down."""
    exact = Fraction(code, 2 ** (high - low))
    if scheme != "double_rounding":
        return math.floor(exact)
    if high == low:
        return code
    nearest = round(exact) if ties == "even" else math.floor(exact + Fraction(1, 2))
    return min(nearest, 2 ** (low - 1) - 1)


def quantize_one(ratio: float, bits: int, scheme: str) -> int:
    """The first rounding of a float32 quotient, in exact rationals (round() is half to even), and the phase."""
    exact = Fraction(float(ratio))
    code, phase = math.floor(exact) if scheme == "centred" else round(exact), phase_of(scheme)
    return max(-(2 ** (bits - 1)), min(2 ** (bits - 1) - 1 - phase, code)) + phase


def value_one(code: int, shift: int, scheme: str) -> float:
    """The value of a code that is `shift` bits below the stored ones, in steps of the stored ones: exact in a float."""
    if scheme == "centred":
        return (code + 0.5) * 2**shift
    middle = 2 ** (shift - 1) if scheme in NESTED and shift else 0
    return float(code * 2**shift + middle - phase_of(scheme))


def open_interval(scheme: str, high: int, low: int) -> tuple[int, int]:
    """Where W / scale is not clipped, in units of high-bit codes.

    Rounding to nearest is clipped beyond the outermost low-bit codes; floors have cells that reach to the next code,
    so `centred` covers [-2^(h-1), 2^(h-1)); `truncate` and `nested` round to nearest first, and a phase takes its room
    at the top.
    """
    half = 2 ** (high - 1)
    top = {
        "double_rounding": (2 ** (low - 1) - 1) * 2 ** (high - low),
        "lsq": half - 1,
        "centred": half,
        "truncate": half - 1,
    }
    return -half, top.get(scheme, half - 1 - phase_of(scheme))


def weight_reference(
    weight: Tensor, scale: Tensor, grad: Tensor, high: int, low: int, scheme: str, ties: str
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Output, d/dW, d/dscale in float64, element by element, and the size of the terms summed."""
    rows, upstream = (t.numpy().reshape(t.shape[0], -1) for t in (weight, grad))
    factor = 2.0 ** (high - low)
    bottom, top = open_interval(scheme, high, low)
    out, to_weight = np.zeros(rows.shape), np.zeros(rows.shape)
    to_scale, size = np.zeros(scale.numel()), np.zeros(scale.numel())
    for c, i in np.ndindex(*rows.shape):
        channel = c if scale.numel() > 1 else 0
        s = scale.numpy()[channel]
        ratio = rows[c, i] / s
        assert ratio.dtype == np.float32
        code = narrow_one(quantize_one(ratio, high, scheme), high, low, scheme, ties)
        level = value_one(code, high - low, scheme) / factor
        inside = bottom < ratio < top
        exact_v = float(rows[c, i]) / (float(s) * factor)
        out[c, i] = level * float(s) * factor
        to_weight[c, i] = float(upstream[c, i]) if inside else 0.0
        term = float(upstream[c, i]) * factor * (level - exact_v if inside else level)
        to_scale[channel] += term
        size[channel] += abs(float(upstream[c, i])) * factor * max(abs(level), abs(exact_v))
    shape = tuple(weight.shape)
    return out.reshape(shape), to_weight.reshape(shape), to_scale, size


def leaf(values: Tensor) -> Tensor:
    return values.clone().requires_grad_()


def grad_of(tensor: Tensor) -> Tensor:
    assert tensor.grad is not None
    return tensor.grad


# --- quantize, dequantize and fake_quantize -----------------------------------------------------


@pytest.mark.parametrize("scheme", LEARNED)
def test_quantize_is_the_rational_definition(scheme: str) -> None:
    weight = randn(3, 40, seed=1) * 2
    weight[0, :8] = torch.tensor([0.5, 1.5, -0.5, -1.5, 2.5, -0.0, 200.0, -200.0]) * 0.0078125
    scale = torch.tensor([0.0078125, 0.013, 0.05])
    for bits in range(least_high(scheme), 9):
        codes = bf.quantize(weight, scale, bits=bits, scheme=scheme)
        ratios = weight.numpy() / scale.numpy()[:, None]
        expected = [[quantize_one(r, bits, scheme) for r in row] for row in ratios]
        assert codes.dtype == torch.int8
        assert codes.tolist() == expected


@pytest.mark.parametrize("scheme", NARROWABLE)
def test_dequantize_is_the_formula_for_every_code(scheme: str) -> None:
    scale = torch.tensor([0.75])
    for high, low in ALL_PAIRS:
        codes = torch.arange(-(2 ** (low - 1)), 2 ** (low - 1), dtype=torch.int8).view(1, -1)
        values = bf.dequantize(codes, scale, shift=high - low, scheme=scheme)
        expected = [value_one(c, high - low, scheme) * 0.75 for c in codes[0].tolist()]
        assert values[0].tolist() == expected  # exact: 0.75 needs two bits
        assert values.dtype == torch.float32


def test_dequantize_scales_each_channel_by_its_own_scale() -> None:
    codes = torch.tensor([[[1, 2]], [[3, -4]]], dtype=torch.int8)
    values = bf.dequantize(codes, torch.tensor([0.5, 2.0]), shift=1)
    assert values.tolist() == [[[1.0, 2.0]], [[12.0, -16.0]]]


@pytest.mark.parametrize("codes", [torch.tensor([[1.0, 2.0]]), torch.tensor([[1, 2]])])
def test_dequantize_leaves_its_codes_alone(codes: Tensor) -> None:
    before = codes.clone()
    bf.dequantize(codes, torch.tensor([2.0]), scheme="nested", shift=1)
    assert torch.equal(codes, before)


@st.composite
def weights_and_scale(draw: st.DrawFn) -> tuple[Tensor, Tensor]:
    """Weights, some of them exact ties, edges or far outside, and a scale per channel or tensor."""
    shape = draw(st.sampled_from([(1, 5), (3, 4), (4, 1), (2, 2, 1, 3)]))
    channels = draw(st.sampled_from([1, shape[0]]))
    one_scale = st.floats(2**-16, 16, width=32)
    scale = np.array(draw(st.lists(one_scale, min_size=channels, max_size=channels)), np.float32)
    size = math.prod(shape)
    free = st.floats(-4, 4, width=32).map(lambda v: (v, False))
    halves = st.integers(-300, 300).map(lambda v: (v / 2, True))  # in units of the scale
    drawn = draw(st.lists(free | halves, min_size=size, max_size=size))
    of_row = np.repeat(np.broadcast_to(scale, shape[0]), size // shape[0])
    pairs = zip(drawn, of_row, strict=True)
    flat = [np.float32(v) * s if in_scales else np.float32(v) for (v, in_scales), s in pairs]
    return torch.from_numpy(np.array(flat, np.float32).reshape(shape)), torch.from_numpy(scale)


@pytest.mark.parametrize(("scheme", "ties"), [("double_rounding", "up"), *((s, "even") for s in NARROWABLE)])
@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=weights_and_scale())
def test_training_and_integers_agree_bit_for_bit(scheme: str, ties: str, data: tuple[Tensor, Tensor]) -> None:
    weight, scale = data
    for high, low in ALL_PAIRS:
        if high < least_high(scheme):
            continue
        stored = bf.quantize(weight, scale, bits=high, scheme=scheme)
        codes = bf.narrow(stored, high=high, low=low, scheme=scheme, ties=ties)
        integers = bf.dequantize(codes, scale, shift=high - low, scheme=scheme)
        floats = bf.fake_quantize(weight, scale, high=high, low=low, scheme=scheme, ties=ties)
        assert floats.dtype == torch.float32
        assert torch.equal(floats, integers), (high, low)


@pytest.mark.parametrize("scheme", ["lsq", "dorefa"])
@settings(max_examples=40, deadline=None, derandomize=True)
@given(data=weights_and_scale())
def test_schemes_that_do_not_narrow_agree_at_each_width(scheme: str, data: tuple[Tensor, Tensor]) -> None:
    weight, scale = data
    for bits in range(2, 9):
        codes = bf.quantize(weight, scale, bits=bits, scheme=scheme)
        floats = bf.fake_quantize(weight, scale, high=bits, low=bits, scheme=scheme)
        assert torch.equal(floats, bf.dequantize(codes, scale, scheme=scheme)), bits


@pytest.mark.parametrize("scheme", DERIVED)
def test_derived_schemes_agree_with_their_own_scale(scheme: str) -> None:
    weight = randn(4, 6, 3, 3, seed=2)
    for channels in (1, 4):
        for high, low in pairs_of(scheme):
            scale = bf.derived_scale(weight, bits=high, scheme=scheme, shape=(channels,))
            codes = bf.quantize(weight, scale, bits=high, scheme=scheme)
            if high != low:
                codes = bf.narrow(codes, high=high, low=low, scheme=scheme)
            floats = bf.fake_quantize(weight, scale, high=high, low=low, scheme=scheme)
            integers = bf.dequantize(codes, scale, shift=high - low, scheme=scheme)
            assert torch.equal(floats, integers)


@pytest.mark.parametrize("scheme", ["lsq", "dorefa"])
def test_schemes_that_do_not_narrow_say_so(scheme: str) -> None:
    with pytest.raises(ConfigError, match=f"'{scheme}' cannot be narrowed"):
        bf.narrow(torch.zeros(3, dtype=torch.int8), high=8, low=4, scheme=scheme)
    with pytest.raises(ConfigError, match=f"'{scheme}'.*high == low"):
        bf.fake_quantize(torch.ones(2, 2), torch.ones(2), high=8, low=4, scheme=scheme)


# --- the DoReFa family against the printed formulas ---------------------------------------------


def tanh_family(weight: Tensor, bits: int, scheme: str, channels: int) -> tuple[np.ndarray, ...]:
    """Values by the original formulas in float64, and how far each is from a rounding boundary."""
    tanh = np.tanh(weight.double().numpy()).reshape(channels, -1)
    largest = np.abs(tanh).max(axis=1, keepdims=True)
    x = tanh / (2 * largest) + 0.5
    if scheme == "dorefa":
        steps = 2**bits - 1
        levels = 2 * np.round(x * steps) / steps - 1
        margin = np.abs(x * steps - np.floor(x * steps) - 0.5)
    else:
        levels = 2 * np.minimum(np.floor(2**bits * x), 2**bits - 1) / 2**bits - 1
        margin = np.abs(2**bits * x - np.round(2**bits * x))
    return (levels * largest).reshape(weight.shape), margin.reshape(weight.shape)


@pytest.mark.parametrize("channels", [1, 5])
@pytest.mark.parametrize("scheme", DERIVED)
def test_tanh_family_is_the_original_formula(scheme: str, channels: int) -> None:
    weight = randn(5, 400, seed=3)
    for high, low in pairs_of(scheme):
        scale = bf.derived_scale(weight, bits=high, scheme=scheme, shape=(channels,))
        got = bf.fake_quantize(weight, scale, high=high, low=low, scheme=scheme)
        expected, margin = tanh_family(weight, low, scheme, channels)
        clear = margin > 1e-4  # elsewhere float32 may fall on the other side
        assert clear.mean() > 0.98
        np.testing.assert_allclose(got.numpy()[clear], expected[clear], rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize("scheme", DERIVED)
def test_tanh_family_at_its_extremes(scheme: str) -> None:
    """The largest weights sit exactly on a boundary of the formula: x = 0 and x = 1."""
    weight = torch.tensor([[0.9, -0.9, 0.0]])
    m = math.tanh(float(weight[0, 0]))
    for bits in BITS:
        scale = bf.derived_scale(weight, bits=bits, scheme=scheme, shape=(1,))
        got = bf.fake_quantize(weight, scale, high=bits, low=bits, scheme=scheme)[0].tolist()
        step = 2 * m / 2**bits
        top = m if scheme == "dorefa" else m - step
        assert got[:2] == pytest.approx([top, -m], rel=1e-6)
        # round((2^b - 1) / 2): the two middle levels are equally near, the tie goes to the even one
        middle = m / (2**bits - 1) if scheme == "dorefa" else 0.0
        assert got[2] == pytest.approx(middle, rel=1e-6)


@pytest.mark.parametrize("scheme", DERIVED)
def test_tanh_family_survives_zero_weights(scheme: str) -> None:
    weight = leaf(torch.zeros(2, 3))
    scale = bf.derived_scale(weight, bits=4, scheme=scheme, shape=(2,))
    out = bf.fake_quantize(weight, scale, high=4, low=4, scheme=scheme)
    out.sum().backward()
    assert bool((out.abs() < 1e-30).all())
    assert torch.equal(grad_of(weight), torch.ones(2, 3))
    # A normal number: where denormals are flushed to zero, 0 / scale must still be 0.
    assert bool((scale >= torch.finfo(torch.float32).tiny).all())


@pytest.mark.parametrize("scheme", DERIVED)
def test_tanh_family_gradient(scheme: str) -> None:
    values, upstream = randn(3, 2, 7, seed=4) * 2, randn(3, 2, 7, seed=5)
    for channels in (1, 3):
        for high, low in pairs_of(scheme):
            weight = leaf(values)
            scale = bf.derived_scale(weight, bits=high, scheme=scheme, shape=(channels,))
            assert not scale.requires_grad
            bf.fake_quantize(weight, scale, high=high, low=low, scheme=scheme).backward(upstream)
            slope = 1 - np.tanh(values.double().numpy()) ** 2
            expected = upstream.double().numpy() * slope
            np.testing.assert_allclose(grad_of(weight).numpy(), expected, rtol=1e-4, atol=1e-6)


# --- weight gradients ---------------------------------------------------------------------------


@pytest.mark.parametrize(("scheme", "ties"), [("double_rounding", "up"), *((s, "even") for s in LEARNED)])
def test_weight_gradients_are_the_derivation(scheme: str, ties: str) -> None:
    for index, (high, low) in enumerate(pairs_of(scheme)):
        for channels in (1, 3):
            scale = torch.rand(channels, generator=generator(10 + index)) * 0.1 + 0.01
            spread = scale.view(-1, 1, 1) * 2 ** (high - 1)
            weight = randn(3, 2, 9, seed=20 + index) * spread * 0.8  # about a fifth is clipped
            upstream = randn(3, 2, 9, seed=30 + index)
            out, to_weight, to_scale, size = weight_reference(weight, scale, upstream, high, low, scheme, ties)
            w, s = leaf(weight), leaf(scale)
            got = bf.fake_quantize(w, s, high=high, low=low, scheme=scheme, ties=ties)
            got.backward(upstream)
            np.testing.assert_allclose(got.detach().numpy(), out, rtol=1e-6)
            assert grad_of(s).shape == s.shape
            assert 0 < np.count_nonzero(to_weight) < to_weight.size
            np.testing.assert_array_equal(grad_of(w).numpy(), to_weight.astype(np.float32))
            error = np.abs(grad_of(s).numpy() - to_scale)
            assert (error <= 1e-5 * size).all(), (high, low, channels)


@pytest.mark.parametrize("scheme", LEARNED)
def test_weight_gradients_exactly_at_the_edges(scheme: str) -> None:
    """Clipped from the edge on: at v == n and v == p no gradient reaches the weight."""
    step = np.float32(2.0**-5)  # a power of two: W / scale is exact
    for high, low in pairs_of(scheme):
        factor = 2 ** (high - low)
        for edge, outward in zip(open_interval(scheme, high, low), (-np.inf, np.inf), strict=True):
            exact = np.float32(edge) * step
            inner = np.nextafter(exact, np.float32(-outward))
            outer = np.nextafter(exact, np.float32(outward))
            outermost = narrow_one(quantize_one(edge, high, scheme), high, low, scheme, "even")
            bound = value_one(outermost, high - low, scheme) / factor
            for value, inside in ((exact, False), (outer, False), (inner, True)):
                w, s = leaf(torch.tensor([[value]])), leaf(torch.tensor([step]))
                bf.fake_quantize(w, s, high=high, low=low, scheme=scheme).backward(torch.ones(1, 1))
                assert grad_of(w).item() == float(inside), (high, low, edge, value)
                level = bound - float(value) / (float(step) * factor) if inside else bound
                assert grad_of(s).item() == pytest.approx(factor * level, abs=1e-4 * factor)


@pytest.mark.parametrize("scheme", LEARNED)
def test_scale_gradient_is_the_slope_where_everything_is_clipped(scheme: str) -> None:
    """Far outside, out = (bound + offset) 2^shift scale is linear: differences are exact."""
    for high, low in pairs_of(scheme):
        for sign in (-1.0, 1.0):
            weight = torch.full((2, 3), sign * 1e4)
            s = leaf(torch.tensor([0.5, 2.0]))

            def total(scale: Tensor, weight: Tensor = weight, high: int = high, low: int = low) -> Tensor:
                return bf.fake_quantize(weight, scale, high=high, low=low, scheme=scheme).sum(dim=1)

            total(s).sum().backward()
            half = 2.0**-6
            slope = (total(s.detach() + half) - total(s.detach() - half)) / (2 * half)
            assert torch.equal(grad_of(s), slope)
            outermost = narrow_one(quantize_one(sign * 1e9, high, scheme), high, low, scheme, "even")
            if phase_of(scheme) == 0:
                assert outermost == (-(2 ** (low - 1)) if sign < 0 else 2 ** (low - 1) - 1)
            assert slope.tolist() == [3 * value_one(outermost, high - low, scheme)] * 2


@pytest.mark.parametrize("scheme", LEARNED)
def test_moving_weight_and_scale_together_scales_the_output(scheme: str) -> None:
    """Codes stay as they are along (W, scale): the directional derivative is out itself."""
    for index, (high, low) in enumerate(pairs_of(scheme)):
        scale = torch.rand(4, generator=generator(40 + index)) * 0.1 + 0.01
        weight = randn(4, 11, seed=50 + index) * scale.view(-1, 1) * 2 ** (high - 1) * 0.7
        upstream = randn(4, 11, seed=60 + index)
        w, s = leaf(weight), leaf(scale)
        out = bf.fake_quantize(w, s, high=high, low=low, scheme=scheme)
        double = bf.fake_quantize(weight * 2, scale * 2, high=high, low=low, scheme=scheme)
        assert torch.equal(double, out.detach() * 2)
        out.backward(upstream)
        along = (grad_of(w) * weight).double().sum(dim=1) + (grad_of(s) * scale).double()
        expected = (upstream * out.detach()).double().sum(dim=1)
        assert (along - expected).abs().max() < 1e-5 * (upstream * out.detach()).abs().sum(dim=1).max()


def test_gradient_scale_multiplies_the_scale_gradient_only() -> None:
    weight, scale, upstream = randn(3, 8, seed=6), torch.tensor([0.1, 0.2, 0.3]), randn(3, 8, seed=7)
    grads = []
    for factor in (1.0, 0.125):
        w, s = leaf(weight), leaf(scale)
        bf.fake_quantize(w, s, high=4, low=2, gradient_scale=factor).backward(upstream)
        grads.append((grad_of(w), grad_of(s)))
    assert torch.equal(grads[0][0], grads[1][0])
    assert torch.equal(grads[0][1] * 0.125, grads[1][1])


def test_frozen_weight_or_scale_gets_no_gradient() -> None:
    w, s = leaf(randn(2, 3, seed=8)), leaf(torch.ones(2))
    bf.fake_quantize(w.detach(), s, high=8, low=4).sum().backward()
    bf.fake_quantize(w, s.detach(), high=8, low=4).sum().backward()
    assert grad_of(s).shape == (2,)
    assert grad_of(w).shape == (2, 3)


def layouts(x: Tensor) -> dict[str, Tensor]:
    """The same (N, C, H, W) values in other memory layouts."""
    wide = torch.full((*x.shape[:-1], 2 * x.shape[-1]), float("nan"))
    wide[..., ::2] = x
    return {
        "channels_last": x.to(memory_format=torch.channels_last),
        "strided": wide[..., ::2],
        "transposed": x.transpose(0, 3).contiguous().transpose(0, 3),
    }


@pytest.mark.parametrize("scheme", LEARNED)
def test_weight_layout_does_not_matter(scheme: str) -> None:
    weight, upstream = randn(4, 3, 2, 5, seed=9), randn(4, 3, 2, 5, seed=10)
    high = max(4, least_high(scheme))
    low = high if scheme == "lsq" else 2

    def run(values: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        w, s = values.detach().requires_grad_(), leaf(torch.tensor([0.1, 0.2, 0.3, 0.4]))
        out = bf.fake_quantize(w, s, high=high, low=low, scheme=scheme)
        out.backward(grad)
        return out.detach(), grad_of(w), grad_of(s)

    expected = run(weight, upstream)
    for name, view in layouts(weight).items():
        assert not view.is_contiguous(), name
        for grad in (upstream, layouts(upstream)[name]):
            got = run(view, grad)
            assert torch.equal(got[0], expected[0]), name
            assert torch.equal(got[1], expected[1]), name
            torch.testing.assert_close(got[2], expected[2], rtol=1e-5, atol=1e-6)


def test_float64_weights_stay_float64() -> None:
    w, s = leaf(randn(2, 3, seed=11).double()), leaf(torch.ones(2).double())
    out = bf.fake_quantize(w, s, high=8, low=4)
    out.sum().backward()
    assert {out.dtype, grad_of(w).dtype, grad_of(s).dtype} == {torch.float64}


def test_scale_gradient_of_a_large_weight_is_accurate() -> None:
    """A quarter of a million residuals of one sign: they must be summed, not differenced."""
    weight = torch.rand(1, 1 << 18, generator=generator(12)) * 0.1 + 0.85
    s = leaf(torch.tensor([1 / 127]))
    bf.fake_quantize(weight, s, high=8, low=8).sum().backward()
    ratio = (weight / s.detach()).double()
    residual = ratio.round() - weight.double() / s.detach().double()
    size = residual.abs().sum().item()
    assert grad_of(s).item() == pytest.approx(residual.sum().item(), abs=1e-3 * size)


# --- from codes back to a weight ----------------------------------------------------------------


@pytest.mark.parametrize("scheme", [*NARROWABLE, "lsq", "dorefa"])
def test_a_weight_of_codes_has_these_codes(scheme: str) -> None:
    for bits in range(least_high(scheme), 9):
        least = -(2 ** (bits - 1)) + phase_of(scheme)
        stored = torch.arange(least, 2 ** (bits - 1), dtype=torch.int8)
        codes = torch.stack([stored, stored.flip(0), stored.roll(1)])
        for scale in (torch.tensor([0.0137]), torch.tensor([1e-4, 0.003, 0.7]), torch.rand(3, len(stored)) + 0.01):
            if scheme in DERIVED:  # tanh(W) lies within 1
                scale = scale / (scale.amax() * 2 ** (bits - 1) * 1.01)
            weight = bf.weight_of_codes(codes, scale, bits=bits, scheme=scheme)
            assert weight.dtype == torch.float32
            assert torch.equal(bf.quantize(weight, scale, bits=bits, scheme=scheme), codes), (bits, tuple(scale.shape))


def test_a_weight_of_adabits_codes_has_their_scale_too() -> None:
    for bits in range(2, 9):
        original = randn(4, 50, seed=bits) * 3
        scale = bf.derived_scale(original, bits=bits, scheme="adabits", shape=(4,))
        codes = bf.quantize(original, scale, bits=bits, scheme="adabits")
        weight = bf.weight_of_codes(codes, scale, bits=bits, scheme="adabits")
        found = bf.derived_scale(weight, bits=bits, scheme="adabits", shape=(4,))
        torch.testing.assert_close(found, scale, rtol=1e-6, atol=0)
        assert torch.equal(bf.quantize(weight, found, bits=bits, scheme="adabits"), codes)


def test_nothing_changes_its_arguments() -> None:
    weight, scale = randn(2, 3, seed=20), torch.ones(2)
    before = [t.clone() for t in (weight, scale)]
    for scheme in (*LEARNED, *DERIVED):
        bf.fake_quantize(weight, scale, high=8, low=8, scheme=scheme)
        bf.quantize(weight, scale, bits=8, scheme=scheme)
    for tensor, copy in zip((weight, scale), before, strict=True):
        assert torch.equal(tensor, copy)


W, S, C = torch.ones(2, 2), torch.ones(2), torch.ones(2, 2, dtype=torch.int8)
NAN, INF = float("nan"), float("inf")

WRONG: dict[str, tuple[Callable[[], object], type[BitdialError], str]] = {
    "quantize bits": (lambda: bf.quantize(W, S, bits=1), ConfigError, "=1"),
    "quantize scheme": (lambda: bf.quantize(W, S, bits=4, scheme="abc"), ConfigError, "'abc'"),
    "quantize NaN": (lambda: bf.quantize(W * NAN, S, bits=4), QuantizationError, "NaN"),
    "quantize inf": (lambda: bf.quantize(W * INF, S, bits=4), QuantizationError, "infinity"),
    "scale 0": (lambda: bf.quantize(W, S * 0, bits=4), QuantizationError, "scale"),
    "scale -1": (lambda: bf.quantize(W, -S, bits=4), QuantizationError, "scale"),
    "scale NaN": (lambda: bf.quantize(W, S * NAN, bits=4), QuantizationError, "scale"),
    "scale inf": (lambda: bf.quantize(W, S * INF, bits=4), QuantizationError, "scale"),
    "fake widths": (lambda: bf.fake_quantize(W, S, high=4, low=8), ConfigError, "low=8"),
    "fake scheme": (
        lambda: bf.fake_quantize(W, S, high=8, low=8, scheme="abc"), ConfigError, "'abc'"),
    "fake ties": (lambda: bf.fake_quantize(W, S, high=8, low=4, ties="odd"), ConfigError, "'odd'"),
    "dequantize scheme": (lambda: bf.dequantize(C, S, scheme="abc"), ConfigError, "'abc'"),
}  # fmt: skip


def test_wrong_input_is_named() -> None:
    for function, error, message in WRONG.values():
        with pytest.raises(error, match=message):
            function()
