"""The quotient of `_quotient_to_round` rounds to the right integer: every case that could be wrong.

Write x = X * 2^i and the scale s = S * 2^j with X and S in [2^23, 2^24). The corrected quotient is x / s plus at most
2^-22 ulp, rounded. It rounds to another integer than the IEEE quotient only if a middle of two floats, next to some k
+ 1/2, lies between x / s and that sum. Such a middle is M / 2^n, M odd with 25 bits, of the form (2k + 1) * 2^m + 1
or - 1 with m at least 16 (k is at most 255); the distance to x / s is |X * 2^24 - M * S| (or with 2^25) in units of
which 2^-22 ulp are at most 8. So M * S would have to be within 8 of a multiple of 2^24. Its low 16 bits are those of
S or -S, so S would have to be within 8 of a multiple of 2^16, and not one, as M is odd. These S are tried here, with
the two X next to each middle.
"""

import numpy as np
import pytest
import torch

from bitdial.kernels.epilogue import Epilogue
from bitdial.kernels.integer import run_epilogue

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NEAR = 8


def hard_cases() -> tuple[np.ndarray, np.ndarray]:
    """Values x and scales s, in float32, such that x / s is next to the middle of k + 1/2 and a neighbour."""
    near = np.array([d for d in range(-NEAR, NEAR + 1) if d])
    scales = (np.arange(128, 257)[:, None] * 2**16 + near).reshape(-1, 1, 1, 1)
    scales = scales[(scales >= 2**23) & (scales < 2**24)].reshape(-1, 1, 1, 1)
    odd = (2 * np.arange(256) + 1).reshape(-1, 1, 1)
    exponent = np.floor(np.log2(odd)).astype(np.int64) - 1  # of k + 1/2
    side = np.array([1, -1]).reshape(-1, 1)
    below_a_half = (odd == 1) & (side == -1)  # there floats lie twice as close
    middle = np.where(below_a_half, 2**25 - 1, odd * 2 ** (23 - exponent) + side)
    exponent = exponent - below_a_half
    product = middle * scales
    surplus = np.floor(np.log2(product.astype(np.float64))).astype(np.int64) - 23
    values = (product >> surplus) + np.array([0, 1])
    x = np.ldexp(values.astype(np.float64), surplus + exponent - 24)
    x, s = np.broadcast_arrays(x, scales)
    assert np.array_equal(x, x.astype(np.float32))
    return x.reshape(-1).astype(np.float32), s.reshape(-1).astype(np.float32)


def multiply_add(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """a * b + c in float32, rounded once: the sum is first rounded to odd, which a second rounding cannot spoil."""
    product, c = a.astype(np.float64) * b, c.astype(np.float64)  # exact: 48 bits
    total = product + c
    part = total - product
    error = (product - (total - part)) + (c - part)
    even = total.view(np.int64) % 2 == 0
    away = np.nextafter(total, np.where(error > 0, np.inf, -np.inf))
    return np.where((error != 0) & even, away, total).astype(np.float32)


def corrected(x: np.ndarray, s: np.ndarray) -> np.ndarray:
    """What the kernel computes."""
    inverse = np.float32(1) / s
    ratio = x * inverse
    return multiply_add(multiply_add(ratio, -s, x), inverse, ratio)


def test_the_emulated_multiply_add_is_rounded_once() -> None:
    one, tiny = np.float32([1]), np.float32([2.0**-40])
    half_ulp = np.float32([2.0**-24])
    assert multiply_add(half_ulp, one + half_ulp * 2, one) == np.float32(1 + 2**-23)  # just above the middle
    assert multiply_add(half_ulp, one, one) == 1  # the middle: to even
    assert multiply_add(tiny, -one, one) == 1


def test_the_hard_cases_are_hard() -> None:
    x, s = hard_cases()
    assert len(x) > 2_000_000
    expected = np.rint(x / s)
    assert (np.rint(x * (np.float32(1) / s)) != expected).any()  # without a correction integers are wrong
    assert np.abs(x.astype(np.float64) / s % 1 - 0.5).max() < 1e-4


def test_hard_cases_round_to_the_same_integer() -> None:
    x, s = hard_cases()
    assert np.array_equal(np.rint(corrected(x, s)), np.rint(x / s))


def test_values_around_every_step_of_random_scales() -> None:
    random = np.random.default_rng(0)
    s = np.exp(random.uniform(-15, 5, (2000, 1, 1))).astype(np.float32)
    x = ((np.arange(256) + 0.5).reshape(-1, 1) * s).astype(np.float32)
    x = (x.view(np.int32) + np.arange(-3, 4, dtype=np.int32)).view(np.float32)
    assert np.array_equal(np.rint(corrected(x, s)), np.rint(x / s))


@pytest.mark.parametrize("zero", [0.0, 100.0])
def test_the_operator_on_hard_cases(zero: float) -> None:
    x, s = hard_cases()
    for scale in np.unique(s)[::97]:
        mine = np.concatenate([x[s == scale], -x[s == scale]])
        numbers = torch.tensor([scale, zero, 0.0, 255.0, 128.0], device=DEVICE)
        values = torch.from_numpy(mine).view(-1, 1).to(DEVICE)
        _, codes, _ = run_epilogue(values, Epilogue(quantizer_a=numbers, keep_value=False))
        expected = np.clip(np.rint(mine / scale) + zero, 0, 255) - 128
        assert np.array_equal(codes.flatten().cpu().numpy(), expected)
