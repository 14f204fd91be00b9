"""Scales per tensor, channel and group of inputs: groups are shorter rows, two-level scales are whole multiples."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from bitdial import functional as bf
from bitdial import kernels
from bitdial.errors import ConfigError

LEARNED = ("double_rounding", "nested", "nested+8", "centred", "truncate")


def randn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def rand(*shape: int, seed: int) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed))


# --- the shape of a scale -----------------------------------------------------------------------


def test_the_shape_of_a_scale_for_every_size_and_group() -> None:
    for rows in (1, 3):
        for inputs in range(1, 33):
            shape = (rows, inputs)
            assert bf.Granularity().scale_shape(shape) == (rows,)
            assert bf.Granularity(per_channel=False).scale_shape(shape) == (1,)
            for size in range(1, 40):
                for per_channel in (True, False):  # groups lie within a channel, whatever is said of channels
                    groups = bf.Granularity(per_channel=per_channel, group_size=size)
                    if inputs <= size:
                        assert groups.scale_shape(shape) == (rows,)
                    elif inputs % size == 0:
                        assert groups.scale_shape(shape) == (rows, inputs // size)
                    else:
                        with pytest.raises(ConfigError, match=f"{inputs} inputs are no multiple of group_size={size}"):
                            groups.scale_shape(shape)


def test_windows_count_by_their_channels() -> None:
    """Dimension 1 of a convolution's weight is grouped, with all the taps of its channels."""
    assert bf.Granularity(group_size=4).scale_shape((6, 8, 3, 3)) == (6, 2)
    assert bf.Granularity(group_size=8).scale_shape((6, 8, 3, 3)) == (6,)
    assert bf.Granularity().scale_shape((6, 8, 3, 3)) == (6,)


def test_what_does_not_fit_names_the_layer_and_the_way_out() -> None:
    with pytest.raises(ConfigError) as caught:
        bf.Granularity(group_size=32).scale_shape((4, 100), "blocks.0.down")
    message = str(caught.value)
    for part in (
        "layer 'blocks.0.down'",
        "its 100 inputs",
        "group_size=32",
        "Rule(pattern='blocks.0.down', group_size=",
    ):
        assert part in message


# --- groups are shorter rows --------------------------------------------------------------------


def each_entry(weight: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """The scale of every weight, by its place: row r, input i has that of group i // (inputs / groups)."""
    found = np.empty_like(weight)
    for place in np.ndindex(*weight.shape):
        row, column = place[:2]
        if scale.ndim == 2:
            found[place] = scale[row, column // (weight.shape[1] // scale.shape[1])]
        else:
            found[place] = scale[row if scale.size > 1 else 0]
    return found


SHAPES = [((3, 12), 4), ((3, 12), 12), ((3, 12), 2), ((2, 6, 3, 2), 3), ((2, 4, 5), 2), ((1, 8), 1), ((4, 8, 1, 1), 8)]


def scales_of(shape: tuple[int, ...], groups: int) -> list[Tensor]:
    rows = shape[0]
    return [rand(*size, seed=3) / 20 + 0.01 for size in ((1,), (rows,), (rows, groups))]


def test_values_by_scale_take_the_scale_of_their_place() -> None:
    for shape, groups in SHAPES:
        values = randn(*shape, seed=1)
        for scale in scales_of(shape, groups):
            rows, flat = bf.by_scale(values, scale)
            assert flat.shape == (scale.numel(),)
            assert torch.equal(flat, scale.flatten())
            if scale.numel() > 1:
                assert rows.shape[0] == scale.numel()
            assert torch.equal(rows.flatten(), values.flatten())
            assert bf.spread(flat, rows).shape == (flat.numel(), *(1,) * (rows.dim() - 1))
            expected = values.numpy() * each_entry(values.numpy(), scale.numpy())
            assert np.array_equal(bf.values_by_scale(values, scale).numpy(), expected), (shape, tuple(scale.shape))


@pytest.mark.parametrize("fake_quantize", [bf.fake_quantize, kernels.fake_quantize], ids=["functional", "kernels"])
@pytest.mark.parametrize("scheme", LEARNED)
def test_a_weight_with_groups_is_a_weight_of_shorter_rows(scheme: str, fake_quantize: object) -> None:
    for shape, groups in SHAPES:
        weight, scale = randn(*shape, seed=4), rand(shape[0], groups, seed=5) / 20 + 0.01
        upstream = randn(*shape, seed=6)
        short = (shape[0] * groups, -1)
        for low in (8, 6, 3, 2):
            results = []
            for w, s, g in (
                (weight, scale, upstream),
                (weight.reshape(short), scale.flatten(), upstream.reshape(short)),
            ):
                w, s = w.clone().requires_grad_(), s.clone().requires_grad_()
                out = fake_quantize(w, s, high=8, low=low, scheme=scheme, gradient_scale=0.3)  # type: ignore[operator]
                out.backward(g)
                codes = bf.quantize(w.detach(), s.detach(), bits=8, scheme=scheme)
                narrow = bf.narrow(codes, high=8, low=low, scheme=scheme)
                values = bf.dequantize(narrow, s.detach(), shift=8 - low, scheme=scheme)
                assert torch.equal(values, out.detach())
                back = bf.weight_of_codes(codes, s.detach(), bits=8, scheme=scheme)
                assert out.shape == codes.shape == values.shape == back.shape == w.shape
                assert s.grad is not None
                assert s.grad.shape == s.shape
                results.append([t.flatten() for t in (out.detach(), codes, narrow, back, w.grad, s.grad)])
            assert all(torch.equal(a, b) for a, b in zip(*results, strict=True)), (shape, groups, low)


def test_groups_that_have_one_scale_are_a_channel() -> None:
    weight, channel = randn(3, 12, seed=7), rand(3, seed=8) / 20 + 0.01
    for scheme in LEARNED:
        alike = bf.fake_quantize(weight, channel[:, None].expand(3, 4).contiguous(), high=8, low=4, scheme=scheme)
        assert torch.equal(alike, bf.fake_quantize(weight, channel, high=8, low=4, scheme=scheme))


def test_derived_scales_of_groups() -> None:
    weight = randn(3, 12, seed=9)
    for shape in ((1,), (3,), (3, 4)):
        scale = bf.derived_scale(weight, bits=8, scheme="adabits", shape=shape)
        assert scale.shape == shape
        largest = np.abs(np.tanh(weight.double().numpy())).reshape(scale.numel(), -1).max(axis=1)
        np.testing.assert_allclose(scale.flatten().numpy(), largest / 128, rtol=1e-6)
        codes = bf.quantize(weight, scale, bits=8, scheme="adabits")
        values = bf.dequantize(bf.narrow(codes, high=8, low=4, scheme="adabits"), scale, shift=4, scheme="adabits")
        assert torch.equal(bf.fake_quantize(weight, scale, high=8, low=4, scheme="adabits"), values)


# --- two-level scales ---------------------------------------------------------------------------


@st.composite
def group_scales(draw: st.DrawFn) -> Tensor:
    rows, groups = draw(st.integers(1, 3)), draw(st.integers(1, 5))
    one = st.floats(2**-20, 2**4, width=32)
    found = draw(st.lists(one, min_size=rows * groups, max_size=rows * groups))
    return torch.tensor(found, dtype=torch.float32).reshape(rows, groups)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(scale=group_scales())
def test_two_level_scales_are_rows_times_small_whole_numbers(scale: Tensor) -> None:
    rows, multipliers = bf.split_scale(scale)
    assert multipliers.dtype == torch.uint8
    assert rows.dtype == torch.float32
    assert (rows.shape, multipliers.shape) == (scale.shape[:1], scale.shape)
    joined = bf.join_scale(rows, multipliers)
    for r, row in enumerate(scale.tolist()):
        assert rows[r].item() == np.float32(max(row)) / np.float32(bf.MOST_MULTIPLIER)
        assert multipliers[r].max() == bf.MOST_MULTIPLIER
        for g, value in enumerate(row):
            m = int(multipliers[r, g])
            assert 1 <= m <= bf.MOST_MULTIPLIER
            # bit for bit: one float32 product, as a reader of the file would take it
            assert joined[r, g].item() == np.float32(rows[r].item()) * np.float32(m)
            away = {k: abs(Fraction(value) - k * Fraction(rows[r].item())) for k in range(1, bf.MOST_MULTIPLIER + 1)}
            assert away[m] <= min(away.values()) * (1 + Fraction(1, 2**20)) + Fraction(value) / 2**22  # the nearest
    assert torch.equal(bf.two_level(scale), joined)


def test_every_multiplier_comes_back() -> None:
    every = torch.arange(1, bf.MOST_MULTIPLIER + 1, dtype=torch.uint8)
    for seed in range(50):
        rows = torch.cat([rand(6, seed=seed) * 10 ** (seed % 9 - 6), torch.tensor([1.0, 2.0**-20])])
        scale = bf.join_scale(rows, every.expand(len(rows), -1))
        found, multipliers = bf.split_scale(scale)
        assert torch.equal(multipliers, every.expand(len(rows), -1))
        torch.testing.assert_close(found, rows, rtol=2e-7, atol=0)


def test_half_rows_have_seven_bits_and_make_every_scale_a_half() -> None:
    scale = rand(40, 6, seed=3) * 10.0 ** -torch.arange(4).repeat(10)[:, None] + 1e-4
    rows, multipliers = bf.split_scale(scale, half=True)
    for r, row in enumerate(rows.tolist()):
        exponent = Fraction(2) ** (math.frexp(row)[1] - 7)
        assert (Fraction(row) / exponent).denominator == 1, "seven significant bits"
        whole = np.float32(scale[r].max()) / np.float32(bf.MOST_MULTIPLIER)
        assert abs(Fraction(row) - Fraction(float(whole))) <= exponent / 2, "the nearest"
    assert bf.has_half_rows(rows)
    assert not bf.has_half_rows(bf.split_scale(scale)[0])
    assert bool((multipliers.amax(dim=1) == bf.MOST_MULTIPLIER).all())
    joined = bf.two_level(scale, half=True)
    assert torch.equal(joined, bf.join_scale(rows, multipliers))
    assert torch.equal(joined.half().float(), joined)
    for half in (True, False):  # what was split once stays, also where 'half' is not said again
        assert torch.equal(bf.two_level(joined, half=half), joined)
        above = bf.two_level_above(scale, half=half)
        assert bool((above >= scale * (1 - 1e-6)).all())
        assert torch.equal(bf.two_level(above, half=half), above)


def test_the_gradient_goes_straight_through() -> None:
    scale, upstream = (rand(3, 4, seed=1) + 0.1).requires_grad_(), randn(3, 4, seed=2)
    out = bf.two_level(scale)
    assert not torch.equal(out, scale)
    out.backward(upstream)
    assert torch.equal(scale.grad, upstream)  # type: ignore[arg-type]


def test_sums_of_a_row_with_two_level_scales_are_integer_sums() -> None:
    """Row scale times the sum of (multiplier * code) * activation code, in exact rationals."""
    weight, scale = randn(2, 12, seed=3), bf.two_level(rand(2, 3, seed=4) / 20 + 0.01)
    rows, multipliers = bf.split_scale(scale)
    codes = bf.quantize(weight, scale, bits=8)
    x = torch.randint(0, 256, (12,), generator=torch.Generator().manual_seed(5))
    whole = multipliers.long().repeat_interleave(4, dim=1) * codes.long()
    for r in range(2):
        exact = sum(Fraction(rows[r].item()) * int(w) * int(a) for w, a in zip(whole[r], x, strict=True))
        assert Fraction(rows[r].item()) * int((whole[r] * x).sum()) == exact
        values = bf.dequantize(codes, scale)[r].double() @ x.double()
        assert float(exact) == pytest.approx(float(values), rel=1e-6)
