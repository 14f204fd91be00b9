"""A scale for each token, against references written from the formulas."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from bitdial import functional as bf
from bitdial.errors import ConfigError

BITS = (8, 6, 5, 4, 3, 2)


def tokens(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    size = torch.rand(*shape[:-1], 1, generator=generator) * 6 - 3
    return torch.randn(*shape, generator=generator) * 10**size


def by_hand(token: np.ndarray, ratio: float, bits: int) -> tuple[list[int], np.float32]:
    """Codes and scale of one token, one float32 operation after the other."""
    high = 2 ** (bits - 1) - 1
    factor = np.float32(min(max(np.float32(ratio), np.float32(2**-10)), np.float32(1))) / np.float32(high)
    scale = max(np.abs(token).max() * factor, np.float32(2.0**-100))
    codes = [min(max(round(float(value / scale)), -high - 1), high) for value in token]
    return codes, scale


def check(x: Tensor, ratio: float, bits: int) -> None:
    clip_ratio = torch.tensor([ratio])
    scale = bf.token_scale(x, bf.token_factor(clip_ratio, bits))
    codes = bf.quantize_activation(x, clip_ratio, bits=bits, kind="dynamic")
    values = bf.fake_quantize_activation(x, clip_ratio, bits=bits, kind="dynamic")
    assert codes.dtype == torch.int8
    assert torch.equal(values, bf.dequantize_activation(codes, scale, bits=bits))
    width = x.shape[-1]
    for token, found, step in zip(
        x.numpy().reshape(-1, width), codes.reshape(-1, width), scale.reshape(-1), strict=True
    ):
        expected, expected_scale = by_hand(token, ratio, bits)
        assert found.tolist() == expected
        assert step.item() == float(expected_scale)


@settings(max_examples=60, deadline=None)
@given(
    values=st.lists(st.floats(width=32, min_value=-(2.0**99), max_value=2.0**99), min_size=1, max_size=12),
    ratio=st.floats(width=32, min_value=0.001953125, max_value=1.5),
    bits=st.sampled_from(BITS),
)
def test_codes_and_scales_are_those_of_the_formula(values: list[float], ratio: float, bits: int) -> None:
    check(torch.tensor([values, [-v for v in values]]), ratio, bits)


def test_tokens_are_rows_of_the_last_axis_whatever_the_shape() -> None:
    for shape in ((16,), (5, 16), (2, 3, 16), (2, 2, 2, 16)):
        for bits in BITS:
            check(tokens(*shape), 0.7, bits)
    x, ratio = tokens(4, 6, 16), torch.tensor([0.8])
    together = bf.quantize_activation(x, ratio, bits=4, kind="dynamic")
    alone = torch.stack([bf.quantize_activation(row, ratio, bits=4, kind="dynamic") for row in x.flatten(0, 1)])
    assert torch.equal(together.flatten(0, 1), alone)
    assert bf.quantize_activation(x[:0], ratio, bits=4, kind="dynamic").shape == (0, 6, 16)
    strided = x.transpose(0, 1)
    assert torch.equal(bf.quantize_activation(strided, ratio, bits=4, kind="dynamic"), together.transpose(0, 1))


def test_a_token_of_zeros_has_codes_0_and_tiny_ones_stay_finite() -> None:
    x = torch.zeros(3, 4)
    x[1] = torch.tensor([1e-40, -1e-45, 0.0, 3e-39])
    x[2] = torch.tensor([1e-20, 2e-20, -3e-20, 0.0])
    x.requires_grad_()
    ratio = torch.tensor([0.9], requires_grad=True)
    for bits in BITS:
        assert not bf.quantize_activation(x.detach()[:2], ratio, bits=bits, kind="dynamic").any()
        out = bf.fake_quantize_activation(x, ratio, bits=bits, kind="dynamic")
        assert torch.equal(out[:2], torch.zeros(2, 4))
        assert bool(out[2].any())
        x.grad = ratio.grad = None
        out.sum().backward()
        assert x.grad is not None and ratio.grad is not None  # noqa: PT018
        assert torch.equal(x.grad[:2], torch.ones(2, 4)), "nothing is clipped there"
        assert bool(x.grad.isfinite().all() & ratio.grad.isfinite().all())


def test_what_is_not_finite_stays_visible_and_spoils_no_other_token() -> None:
    clean = tokens(4, 8)
    ratio = torch.tensor([1.0])
    for bad in (math.nan, math.inf, -math.inf):
        x = clean.clone()
        x[1, 3] = bad
        for bits in BITS:
            out = bf.fake_quantize_activation(x, ratio, bits=bits, kind="dynamic")
            assert bool(out[1].isnan().all())
            expected = bf.fake_quantize_activation(clean, ratio, bits=bits, kind="dynamic")
            assert torch.equal(out[[0, 2, 3]], expected[[0, 2, 3]])


def test_a_ratio_outside_of_its_range_is_used_as_the_nearest_inside() -> None:
    x = tokens(3, 8)
    for given_ratio, used in ((1.7, 1.0), (-0.3, 2.0**-10), (0.0, 2.0**-10)):
        ratio = torch.tensor([given_ratio], requires_grad=True)
        same = torch.tensor([used], requires_grad=True)
        for each in (ratio, same):
            out = bf.fake_quantize_activation(x, each, bits=4, kind="dynamic")
            out.backward(torch.cos(x))
        assert ratio.grad is not None
        assert torch.equal(ratio.grad, same.grad), "the gradient goes straight through"
        assert bool(ratio.grad.any())


# --- gradients ------------------------------------------------------------------------------------


def reference_gradients(x: Tensor, ratio: float, grad: Tensor, bits: int) -> tuple[Tensor, float]:
    """d/dx and d/dratio in float64, element by element."""
    least, most = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    grad_x, grad_ratio = torch.zeros_like(x), 0.0
    for row in range(len(x)):
        largest = float(x[row].abs().max())
        scale = largest * ratio / most
        holders = [i for i in range(x.shape[1]) if abs(float(x[row, i])) == largest]
        for i in range(x.shape[1]):
            value, g = float(x[row, i]), float(grad[row, i])
            if least < value / scale < most:
                grad_x[row, i] += g
                grad_ratio += g * (round(value / scale) - value / scale) * scale / ratio
                continue
            code = least if value < 0 else most
            grad_ratio += g * code * scale / ratio
            for holder in holders:  # the output is code * ratio / most times the largest magnitude
                grad_x[row, holder] += g * code * ratio / most * math.copysign(1, x[row, holder]) / len(holders)
    return grad_x, grad_ratio


@pytest.mark.parametrize("ratio", [0.93, 0.5, 0.11])
def test_gradients_are_those_of_the_formula(ratio: float) -> None:
    x = tokens(6, 12, seed=3).double()
    x[2, 5], x[2, 7] = x[2].abs().max() + 1, -(x[2].abs().max() + 1)  # two of the same magnitude
    grad = tokens(6, 12, seed=4).double()
    for bits in BITS:
        leaf, r = x.clone().requires_grad_(), torch.tensor([ratio], dtype=torch.float64, requires_grad=True)
        bf.fake_quantize_activation(leaf, r, bits=bits, kind="dynamic", gradient_scale=0.25).backward(grad)
        expected_x, expected_ratio = reference_gradients(x, ratio, grad, bits)
        assert leaf.grad is not None and r.grad is not None  # noqa: PT018
        torch.testing.assert_close(leaf.grad, expected_x, rtol=1e-9, atol=1e-9)
        assert r.grad.item() == pytest.approx(0.25 * expected_ratio, rel=1e-9)


def test_without_clipping_the_gradient_of_a_token_is_whole() -> None:
    """At ratio 1 the largest element may count as clipped or not by a rounding: its gradient is 1 in both cases."""
    x = tokens(200, 9, seed=5).requires_grad_()
    out = bf.fake_quantize_activation(x, torch.ones(1), bits=8, kind="dynamic")
    out.sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, torch.ones_like(x), rtol=1e-5, atol=1e-5)


def test_a_gradient_of_the_ratio_leads_to_less_error() -> None:
    """Tokens with one outlier at 3 bits: the ratio falls, and so does the squared error."""
    x = torch.randn(64, 32, generator=torch.Generator().manual_seed(6))
    x[:, 0] *= 4
    ratio = torch.ones(1, requires_grad=True)
    errors = []
    for _ in range(80):
        error = (bf.fake_quantize_activation(x, ratio, bits=3, kind="dynamic") - x).square().mean()
        errors.append(error.item())
        ratio.grad = None
        error.backward()
        assert ratio.grad is not None
        with torch.no_grad():
            ratio -= 0.05 * ratio.grad
    assert errors[-1] < 0.8 * errors[0]
    assert ratio.item() < 0.9


def test_a_zero_point_is_refused() -> None:
    with pytest.raises(ConfigError, match="'dynamic': a zero_point goes with 'asymmetric'"):
        bf.fake_quantize_activation(torch.ones(2), torch.ones(1), torch.ones(1), bits=4, kind="dynamic")
