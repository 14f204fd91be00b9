"""The arithmetic against references written from the formulas: Fractions, loops, float64.

Nothing here calls one function of the source to check another, except where the claim is that
two of them agree bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

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
TIES = ("even", "up")
NARROWABLE = ("double_rounding", "nested", "truncate", "adabits")
LEARNED = ("double_rounding", "nested", "truncate", "lsq")
DERIVED = ("adabits", "dorefa")
KINDS = ("unsigned", "signed", "asymmetric")

OFFSET = {"double_rounding": 0.0, "nested": 0.5, "truncate": 0.0, "lsq": 0.0}


def pairs_of(scheme: str) -> list[tuple[int, int]]:
    """The (high, low) that a scheme allows among the usual widths."""
    return PAIRS if scheme in NARROWABLE else [(b, b) for b in BITS]


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def randn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=generator(seed))


# --- references ---------------------------------------------------------------------------------


def clip(value: int, bits: int, *, signed: bool = True) -> int:
    if signed:
        return max(-(2 ** (bits - 1)), min(2 ** (bits - 1) - 1, value))
    return max(0, min(2**bits - 1, value))


def narrow_one(code: int, high: int, low: int, scheme: str, ties: str) -> int:
    """The second rounding in exact rationals: code / 2^shift to the nearest, or down."""
    exact = Fraction(code, 2 ** (high - low))
    if scheme != "double_rounding":
        return math.floor(exact)
    if high == low:
        return code
    nearest = round(exact) if ties == "even" else math.floor(exact + Fraction(1, 2))
    return clip(nearest, low)


def quantize_one(ratio: np.float32, bits: int, scheme: str) -> int:
    """The first rounding of a float32 quotient, in exact rationals (round() is half to even)."""
    exact = Fraction(float(ratio))
    return clip(math.floor(exact) if scheme == "nested" else round(exact), bits)


def open_interval(scheme: str, high: int, low: int) -> tuple[int, int]:
    """Where W / scale is not clipped, in units of high-bit codes.

    Rounding to nearest is clipped beyond the outermost low-bit codes; floors have cells that reach
    to the next code, so `nested` covers [-2^(h-1), 2^(h-1)); `truncate` rounds to nearest first.
    """
    half = 2 ** (high - 1)
    top = {
        "double_rounding": (2 ** (low - 1) - 1) * 2 ** (high - low),
        "lsq": half - 1,
        "nested": half,
        "truncate": half - 1,
    }
    return -half, top[scheme]


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
        level = code + OFFSET[scheme]
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


# --- narrow: exhaustive -------------------------------------------------------------------------


@pytest.mark.parametrize("ties", TIES)
@pytest.mark.parametrize("scheme", NARROWABLE)
def test_narrow_is_the_rational_definition_for_every_code(scheme: str, ties: str) -> None:
    for high, low in ALL_PAIRS:
        codes = list(range(-(2 ** (high - 1)), 2 ** (high - 1)))
        expected = [narrow_one(c, high, low, scheme, ties) for c in codes]
        got = bf.narrow(torch.tensor(codes, dtype=torch.int8), high=high, low=low, scheme=scheme,
                        ties=ties)  # fmt: skip
        assert got.tolist() == expected, (high, low)
        assert got.dtype == torch.int8
        assert min(expected) >= -(2 ** (low - 1))
        assert max(expected) <= 2 ** (low - 1) - 1


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.int32, torch.int64])
def test_narrow_keeps_dtype_shape_and_its_argument(dtype: torch.dtype) -> None:
    codes = torch.arange(-128, 128, dtype=dtype).view(4, 8, 8).transpose(0, 2)
    before = codes.clone()
    for scheme in NARROWABLE:
        for low in (8, 4):
            got = bf.narrow(codes, high=8, low=low, scheme=scheme)
            assert got.dtype == dtype
            assert got.shape == codes.shape
            got.zero_()  # not a view of the stored codes, even where nothing is narrowed
            assert torch.equal(codes, before)


@pytest.mark.parametrize("codes", [np.zeros(3, np.int8), [1, 2, 3], 5])
def test_narrow_takes_tensors(codes: Any) -> None:
    with pytest.raises(ConfigError, match=rf"codes must be a torch tensor, got {type(codes).__name__}"):
        bf.narrow(codes, high=8, low=4)


@pytest.mark.parametrize("wrong", [8.0, True, "8", None, torch.tensor(8.0)], ids=str)
def test_widths_that_are_no_whole_numbers(wrong: Any) -> None:
    codes, scale = torch.zeros(3, dtype=torch.int8), torch.ones(1)
    for name in ("high", "low"):
        widths = {"high": 8, "low": 4, name: wrong}
        for call in (
            lambda widths=widths: bf.narrow(codes, **widths),
            lambda widths=widths: bf.fake_quantize(torch.zeros(3), scale, **widths),
        ):
            with pytest.raises(ConfigError, match=rf"{name}=.* must be a whole number of bits, such as 8"):
                call()
    for call in (
        lambda: bf.quantize(torch.zeros(3), scale, bits=wrong),
        lambda: bf.quantize_activation(torch.zeros(3), scale, bits=wrong, kind="signed"),
    ):
        with pytest.raises(ConfigError, match=r"bits=.* must be a whole number of bits"):
            call()


def test_widths_may_be_whole_numbers_of_numpy() -> None:
    codes = torch.arange(-128, 128, dtype=torch.int16).to(torch.int8)
    assert torch.equal(bf.narrow(codes, high=np.int64(8), low=np.int64(4)), bf.narrow(codes, high=8, low=4))


def test_narrow_of_nothing_is_nothing() -> None:
    empty = torch.zeros(0, 3, dtype=torch.int8)
    assert bf.narrow(empty, high=8, low=2).shape == (0, 3)


INT8 = torch.arange(-128, 128, dtype=torch.int8)


@pytest.mark.parametrize(("low", "percent"), [(7, 25.0), (6, 12.5), (4, 3.125), (2, 0.78125)])
def test_tie_rules_differ_on_the_known_share_of_int8_codes(low: int, percent: float) -> None:
    even = bf.narrow(INT8, high=8, low=low, ties="even")
    up = bf.narrow(INT8, high=8, low=low, ties="up")
    assert (even != up).sum().item() / 256 * 100 == percent


@pytest.mark.parametrize(("low", "percent"), [(4, 3.125), (2, 12.5)])
@pytest.mark.parametrize("ties", TIES)
def test_the_known_share_of_int8_codes_overflows(low: int, percent: float, ties: str) -> None:
    """Codes that round above the top level, and so read as the top level."""
    top = 2 ** (low - 1) - 1
    over = INT8.double() / 2 ** (8 - low) >= top + 0.5  # the tie at the top rounds up in both rules
    assert over.double().mean().item() * 100 == percent
    assert bool((bf.narrow(INT8, high=8, low=low, ties=ties)[over] == top).all())


def test_narrowing_in_steps_is_not_narrowing() -> None:
    at6 = bf.narrow(INT8, high=8, low=6)
    stepped = bf.narrow(at6, high=6, low=4)
    assert (stepped != bf.narrow(INT8, high=8, low=4)).sum().item() == 30


@pytest.mark.parametrize("scheme", ["nested", "truncate", "adabits"])
def test_floors_may_be_taken_in_steps(scheme: str) -> None:
    at6 = bf.narrow(INT8, high=8, low=6, scheme=scheme)
    stepped = bf.narrow(at6, high=6, low=4, scheme=scheme)
    assert torch.equal(stepped, bf.narrow(INT8, high=8, low=4, scheme=scheme))


# --- quantize, dequantize and fake_quantize -----------------------------------------------------


@pytest.mark.parametrize("scheme", LEARNED)
def test_quantize_is_the_rational_definition(scheme: str) -> None:
    weight = randn(3, 40, seed=1) * 2
    weight[0, :8] = torch.tensor([0.5, 1.5, -0.5, -1.5, 2.5, -0.0, 200.0, -200.0]) * 0.0078125
    scale = torch.tensor([0.0078125, 0.013, 0.05])
    for bits in range(2, 9):
        codes = bf.quantize(weight, scale, bits=bits, scheme=scheme)
        ratios = weight.numpy() / scale.numpy()[:, None]
        expected = [[quantize_one(r, bits, scheme) for r in row] for row in ratios]
        assert codes.dtype == torch.int8
        assert codes.tolist() == expected


@pytest.mark.parametrize("scheme", ["double_rounding", "nested", "truncate", "adabits"])
def test_dequantize_is_the_formula_for_every_code(scheme: str) -> None:
    scale = torch.tensor([0.75])
    offset = 0.5 if scheme == "nested" else 0.0
    for high, low in ALL_PAIRS:
        codes = torch.arange(-(2 ** (low - 1)), 2 ** (low - 1), dtype=torch.int8).view(1, -1)
        values = bf.dequantize(codes, scale, shift=high - low, scheme=scheme)
        expected = [(c + offset) * 0.75 * 2 ** (high - low) for c in codes[0].tolist()]
        assert values[0].tolist() == expected  # exact: 0.75 needs two bits
        assert values.dtype == torch.float32


def test_dequantize_scales_each_channel_by_its_own_scale() -> None:
    codes = torch.tensor([[[1, 2]], [[3, -4]]], dtype=torch.int8)
    values = bf.dequantize(codes, torch.tensor([0.5, 2.0]), shift=1)
    assert values.tolist() == [[[1.0, 2.0]], [[12.0, -16.0]]]


@pytest.mark.parametrize("codes", [torch.tensor([[1.0, 2.0]]), torch.tensor([[1, 2]])])
def test_dequantize_leaves_its_codes_alone(codes: Tensor) -> None:
    before = codes.clone()
    try:
        bf.dequantize(codes, torch.tensor([2.0]), scheme="nested")
        bf.dequantize_activation(codes, torch.tensor([2.0]), bits=4)
    except BitdialError:
        pass  # refusing floats would do as well
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


@pytest.mark.parametrize("ties", TIES)
@pytest.mark.parametrize("scheme", NARROWABLE)
@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=weights_and_scale())
def test_training_and_integers_agree_bit_for_bit(scheme: str, ties: str, data: tuple[Tensor, Tensor]) -> None:
    weight, scale = data
    for high, low in ALL_PAIRS:
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
            scale = bf.derived_scale(weight, bits=high, scheme=scheme, channels=channels)
            codes = bf.quantize(weight, scale, bits=high, scheme=scheme)
            if high != low:
                codes = bf.narrow(codes, high=high, low=low, scheme=scheme)
            floats = bf.fake_quantize(weight, scale, high=high, low=low, scheme=scheme)
            integers = bf.dequantize(codes, scale, shift=high - low, scheme=scheme)
            assert torch.equal(floats, integers)


@pytest.mark.parametrize("scheme", ["lsq", "dorefa"])
def test_schemes_that_do_not_narrow_say_so(scheme: str) -> None:
    with pytest.raises(ConfigError, match=f"'{scheme}' cannot be narrowed"):
        bf.narrow(INT8, high=8, low=4, scheme=scheme)
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
        scale = bf.derived_scale(weight, bits=high, scheme=scheme, channels=channels)
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
        scale = bf.derived_scale(weight, bits=bits, scheme=scheme, channels=1)
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
    scale = bf.derived_scale(weight, bits=4, scheme=scheme, channels=2)
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
            scale = bf.derived_scale(weight, bits=high, scheme=scheme, channels=channels)
            assert not scale.requires_grad
            bf.fake_quantize(weight, scale, high=high, low=low, scheme=scheme).backward(upstream)
            slope = 1 - np.tanh(values.double().numpy()) ** 2
            expected = upstream.double().numpy() * slope
            np.testing.assert_allclose(grad_of(weight).numpy(), expected, rtol=1e-4, atol=1e-6)


# --- weight gradients ---------------------------------------------------------------------------


@pytest.mark.parametrize("ties", TIES)
@pytest.mark.parametrize("scheme", LEARNED)
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
            bound = clip(math.floor(edge / factor), low) + OFFSET[scheme]
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
            bottom, top = -(2 ** (low - 1)), 2 ** (low - 1) - 1
            if scheme == "truncate":  # the highest high-bit code, floored: the top low-bit code
                assert top == (2 ** (high - 1) - 1) >> (high - low)
            bound = (bottom if sign < 0 else top) + OFFSET[scheme]
            assert slope.tolist() == [3 * bound * 2.0 ** (high - low)] * 2


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
    low = 4 if scheme == "lsq" else 2

    def run(values: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        w, s = values.detach().requires_grad_(), leaf(torch.tensor([0.1, 0.2, 0.3, 0.4]))
        out = bf.fake_quantize(w, s, high=4, low=low, scheme=scheme)
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


# --- activations --------------------------------------------------------------------------------


def whole_zero(zero_point: float | None, bits: int) -> int:
    if zero_point is None:
        return 0
    return clip(round(Fraction(float(np.float32(zero_point)))), bits, signed=False)


def activation_reference(
    x: Tensor, scale: float, zero_point: float | None, grad: Tensor, bits: int, kind: str
) -> tuple[list[int], list[float], list[float], float, float]:
    """Codes, values, d/dx, d/dscale and d/dzero_point in float64, element by element."""
    signed = kind == "signed"
    least, most = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if signed else (0, 2**bits - 1)
    z = whole_zero(zero_point, bits)
    codes, values, to_x, to_scale, to_zero = [], [], [], 0.0, 0.0
    s = np.float32(scale)
    for value, g in zip(x.reshape(-1).numpy(), grad.reshape(-1).tolist(), strict=True):
        ratio = value / s
        assert ratio.dtype == np.float32
        code = clip(round(Fraction(float(ratio))) + z, bits, signed=signed)
        inside = least < float(ratio) + z < most
        exact = float(value) / float(s)
        codes.append(code)
        values.append((code - z) * float(s))
        to_x.append(g if inside else 0.0)
        to_scale += g * ((code - z) - exact if inside else code - z)
        to_zero += 0.0 if inside else -float(s) * g
    return codes, values, to_x, to_scale, to_zero


ZERO_POINTS: dict[str, tuple[float | None, ...]] = {
    "unsigned": (None,),
    "signed": (None,),
    "asymmetric": (0.0, 0.4, 1.5, 1.2, 2.5, -7.0, 1000.0),
}


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("kind", KINDS)
def test_activations_are_the_derivation(kind: str, bits: int) -> None:
    for zero_point in ZERO_POINTS[kind]:
        x = randn(2, 3, 4, 5, seed=bits) * 2**bits * 0.05
        upstream = randn(2, 3, 4, 5, seed=100 + bits)
        codes, values, to_x, to_scale, to_zero = activation_reference(x, 0.07, zero_point, upstream, bits, kind)
        xs, s = leaf(x), leaf(torch.tensor([0.07]))
        z = None if zero_point is None else leaf(torch.tensor([zero_point]))
        out = bf.fake_quantize_activation(xs, s, z, bits=bits, kind=kind)
        out.backward(upstream)
        np.testing.assert_allclose(out.detach().reshape(-1).numpy(), values, rtol=1e-6)
        assert grad_of(xs).reshape(-1).tolist() == to_x
        size = float((upstream.abs() * out.detach().abs()).sum()) / 0.07 + 1
        assert grad_of(s).shape == (1,)
        assert grad_of(s).item() == pytest.approx(to_scale, abs=1e-5 * size)
        if z is not None:
            assert grad_of(z).shape == (1,)
            assert grad_of(z).item() == pytest.approx(to_zero, abs=1e-5)

        whole = bf.quantize_activation(x, s.detach(), z, bits=bits, kind=kind)
        assert whole.dtype == (torch.int8 if kind == "signed" else torch.uint8)
        assert whole.reshape(-1).tolist() == codes
        back = bf.dequantize_activation(whole, s.detach(), z, bits=bits)
        assert torch.equal(back, out.detach())


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("kind", KINDS)
def test_activation_gradients_exactly_at_the_edges(kind: str, bits: int) -> None:
    step, zero = np.float32(0.25), 1 if kind == "asymmetric" else 0
    least, most = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if kind == "signed" else (0, 2**bits - 1)
    for edge, outward in ((least, -np.inf), (most, np.inf)):
        exact = np.float32(edge - zero) * step
        far = np.float32(1e-3) * np.sign(np.float32(outward))  # beside 0 an ulp is lost in x/s + z
        inner = exact - far if zero else np.nextafter(exact, np.float32(-outward))
        outer = exact + far if zero else np.nextafter(exact, np.float32(outward))
        for value, inside in ((exact, False), (outer, False), (inner, True)):
            x, s = leaf(torch.tensor([value])), leaf(torch.tensor([step]))
            z = leaf(torch.tensor([1.0])) if zero else None
            out = bf.fake_quantize_activation(x, s, z, bits=bits, kind=kind)
            out.backward(torch.ones(1))
            assert out.item() == (edge - zero) * step
            assert grad_of(x).item() == float(inside)
            expected = (edge - zero) - float(value) / 0.25 if inside else edge - zero
            assert grad_of(s).item() == pytest.approx(expected, abs=1e-4)
            if z is not None:
                assert grad_of(z).item() == (0.0 if inside else -0.25)


@pytest.mark.parametrize("kind", KINDS)
def test_activation_moved_with_its_scale_scales_the_output(kind: str) -> None:
    x, upstream = randn(50, seed=13), randn(50, seed=14)
    for bits in BITS:
        xs, s = leaf(x), leaf(torch.tensor([0.05]))
        z = torch.tensor([1.0]) if kind == "asymmetric" else None
        out = bf.fake_quantize_activation(xs, s, z, bits=bits, kind=kind)
        out.backward(upstream)
        along = (grad_of(xs) * x).double().sum() + (grad_of(s) * 0.05).double().sum()
        expected = (upstream * out.detach()).double().sum()
        assert along.item() == pytest.approx(expected.item(), abs=1e-5)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    x=st.lists(st.floats(-1000, 1000, width=32), min_size=1, max_size=8),
    scale=st.floats(2**-10, 8, width=32),
    zero_point=st.floats(-300, 300, width=32),
    bits=st.sampled_from(BITS),
    kind=st.sampled_from(KINDS),
)
def test_activation_codes_and_training_agree_bit_for_bit(
    x: list[float], scale: float, zero_point: float, bits: int, kind: str
) -> None:
    values, s = torch.tensor(x), torch.tensor([scale])
    z = torch.tensor([zero_point]) if kind == "asymmetric" else None
    codes = bf.quantize_activation(values, s, z, bits=bits, kind=kind)
    fake = bf.fake_quantize_activation(values, s, z, bits=bits, kind=kind)
    assert torch.equal(fake, bf.dequantize_activation(codes, s, z, bits=bits))


@pytest.mark.parametrize("kind", KINDS)
def test_gradient_scale_multiplies_scale_and_zero_point(kind: str) -> None:
    x, upstream = randn(40, seed=15), randn(40, seed=16)
    grads = []
    for factor in (1.0, 0.25):
        xs, s = leaf(x), leaf(torch.tensor([0.1]))
        z = leaf(torch.tensor([1.0])) if kind == "asymmetric" else None
        out = bf.fake_quantize_activation(xs, s, z, bits=3, kind=kind, gradient_scale=factor)
        out.backward(upstream)
        grads.append([grad_of(t) for t in (xs, s, z) if t is not None])
    assert torch.equal(grads[0][0], grads[1][0])
    for full, scaled in zip(grads[0][1:], grads[1][1:], strict=True):
        assert full.item() != 0
        assert torch.equal(full * 0.25, scaled)


@pytest.mark.parametrize("kind", KINDS)
def test_activation_layout_does_not_matter(kind: str) -> None:
    x, upstream = randn(4, 3, 2, 5, seed=17), randn(4, 3, 2, 5, seed=18)

    def run(values: Tensor, grad: Tensor) -> list[Tensor]:
        xs, s = values.detach().requires_grad_(), leaf(torch.tensor([0.2]))
        z = leaf(torch.tensor([2.0])) if kind == "asymmetric" else None
        out = bf.fake_quantize_activation(xs, s, z, bits=3, kind=kind)
        out.backward(grad)
        return [out.detach(), *(grad_of(t) for t in (xs, s, z) if t is not None)]

    expected = run(x, upstream)
    for name, view in layouts(x).items():
        for grad in (upstream, layouts(upstream)[name]):
            got = run(view, grad)
            assert torch.equal(got[0], expected[0]), name
            assert torch.equal(got[1], expected[1]), name
            for one, other in zip(got[2:], expected[2:], strict=True):
                torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    # A gradient that is one number read many times, as sum() sends it.
    got = run(x, torch.ones(1).expand(4, 3, 2, 5))
    assert torch.equal(got[1], run(x, torch.ones(4, 3, 2, 5))[1])


@pytest.mark.parametrize("kind", ["unsigned", "signed"])
def test_scale_gradient_of_a_large_activation_is_accurate(kind: str) -> None:
    """A million values near the top code, with gradients of one sign: the residuals are 300 times
    smaller than the values, so a difference of two float32 sums of values would drown them."""
    x = torch.rand(1 << 20, generator=generator(19)) * 0.1 + 0.85
    s = leaf(torch.tensor([1 / 255 if kind == "unsigned" else 1 / 127]))
    bf.fake_quantize_activation(x, s, bits=8, kind=kind).sum().backward()
    ratio = (x / s.detach()).double()
    residual = ratio.round() - x.double() / s.detach().double()
    size = residual.abs().sum().item()
    assert grad_of(s).item() == pytest.approx(residual.sum().item(), abs=1e-3 * size)


def test_nothing_changes_its_arguments() -> None:
    weight, scale, x, zero = randn(2, 3, seed=20), torch.ones(2), randn(4, seed=21), torch.ones(1)
    before = [t.clone() for t in (weight, scale, x, zero)]
    for scheme in (*LEARNED, *DERIVED):
        bf.fake_quantize(weight, scale, high=4, low=4, scheme=scheme)
        bf.quantize(weight, scale, bits=4, scheme=scheme)
    bf.fake_quantize_activation(x, zero, zero, bits=4, kind="asymmetric")
    bf.quantize_activation(x, zero, zero, bits=4, kind="asymmetric")
    for tensor, copy in zip((weight, scale, x, zero), before, strict=True):
        assert torch.equal(tensor, copy)


# --- small things -------------------------------------------------------------------------------


def test_lsq_gradient_scale() -> None:
    assert bf.lsq_gradient_scale(100, 2, signed=True) == pytest.approx(1 / math.sqrt(100 * 1))
    assert bf.lsq_gradient_scale(100, 2, signed=False) == pytest.approx(1 / math.sqrt(100 * 3))
    assert bf.lsq_gradient_scale(576, 8, signed=True) == pytest.approx(1 / math.sqrt(576 * 127))
    assert bf.lsq_gradient_scale(576, 8, signed=False) == pytest.approx(1 / math.sqrt(576 * 255))
    assert math.isfinite(bf.lsq_gradient_scale(0, 4, signed=True))  # an empty batch


@pytest.mark.parametrize(
    ("bits", "signed", "expected"),
    [(2, True, (-2, 1)), (3, True, (-4, 3)), (8, True, (-128, 127)), (2, False, (0, 3)),
     (8, False, (0, 255))],
)  # fmt: skip
def test_code_range(bits: int, signed: bool, expected: tuple[int, int]) -> None:
    assert bf.code_range(bits, signed=signed) == expected


W, S, C, X = torch.ones(2, 2), torch.ones(2), torch.ones(2, 2, dtype=torch.int8), torch.ones(3)
NAN, INF = float("nan"), float("inf")

WRONG: dict[str, tuple[Callable[[], object], type[BitdialError], str]] = {
    "narrow high": (lambda: bf.narrow(C, high=9, low=4), ConfigError, "high=9"),
    "narrow low": (lambda: bf.narrow(C, high=8, low=1), ConfigError, "low=1"),
    "narrow wider": (lambda: bf.narrow(C, high=4, low=6), ConfigError, "high=4, low=6"),
    "narrow scheme": (lambda: bf.narrow(C, high=8, low=4, scheme="abc"), ConfigError, "'abc'"),
    "narrow ties": (lambda: bf.narrow(C, high=8, low=4, ties="odd"), ConfigError, "'odd'"),
    "narrow floats": (lambda: bf.narrow(W, high=8, low=4), ConfigError, "float32"),
    "narrow bools": (lambda: bf.narrow(C > 0, high=8, low=4), ConfigError, "bool"),
    "narrow outside": (
        lambda: bf.narrow(C * 8, high=4, low=2), QuantizationError, r"\[8, 8\].*\[-8, 7\]"),
    "narrow outside 8": (
        lambda: bf.narrow(C.int() * 128, high=8, low=2), QuantizationError, r"\[-128, 127\]"),
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
    "act bits": (
        lambda: bf.fake_quantize_activation(X, S[:1], bits=9, kind="signed"), ConfigError, "=9"),
    "act kind": (
        lambda: bf.fake_quantize_activation(X, S[:1], bits=8, kind="abc"), ConfigError, "'abc'"),
    "act codes kind": (
        lambda: bf.quantize_activation(X, S[:1], bits=8, kind="abc"), ConfigError, "'abc'"),
    "act codes bits": (
        lambda: bf.quantize_activation(X, S[:1], bits=1, kind="signed"), ConfigError, "=1"),
    "act zero missing": (
        lambda: bf.fake_quantize_activation(X, S[:1], bits=8, kind="asymmetric"), ConfigError,
        "zero_point"),
    "act zero extra": (
        lambda: bf.fake_quantize_activation(X, S[:1], S[:1], bits=8, kind="signed"), ConfigError,
        "'signed'"),
    "check_codes": (
        lambda: bf.check_codes(C * -1, bits=8, signed=False), QuantizationError, r"\[0, 255\]"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_wrong_input_is_named(case: str) -> None:
    function, error, message = WRONG[case]
    with pytest.raises(error, match=message):
        function()
