"""Rotations: orthogonal products that spread outliers over many values, made of few numbers.

A Hadamard matrix of size n (a power of two) has entries of 1 and -1, and its rows are orthogonal: x H / sqrt(n) is a
rotation. It takes n log2(n) additions (`walsh_hadamard`), in a fixed order, so every value of the result is the same
whatever else is computed beside it. Two forms are used here:

    block   x in blocks of n; each block times H, then one power of two
    turn    x of any width m * n, m odd: random signs, H on each run of n, then a matrix (m, m) across the runs

The matrix across is Hartley's, (cos + sin)(2 pi i j / m) / sqrt(m): symmetric, its own inverse, no entry above
sqrt(2 / m). So `turn_back` is the same steps in the other order.
"""

import math

import torch
from torch import Tensor


def walsh_hadamard(x: Tensor, size: int) -> Tensor:
    """Each run of `size` values (a power of two) along the last dimension of `x`, times the Hadamard matrix of 1, -1.

    Each step adds and subtracts neighbours and puts the sums before the differences.
    """
    rows = x.reshape(-1, size)
    for _ in range(size.bit_length() - 1):
        even, odd = rows[:, 0::2], rows[:, 1::2]
        rows = torch.cat((even + odd, even - odd), dim=1)
    return rows.view(x.shape)


def half_power(size: int) -> float:
    """The power of two that is 1 / sqrt(size), or sqrt(2) above it, for a `size` that is a power of two."""
    return 2.0 ** -((size.bit_length() - 1) // 2)


def largest_block(width: int) -> int:
    """The largest power of two that divides `width`."""
    return width & -width


def across(width: int) -> Tensor:
    """The matrix (m, m), float64, of a turn of that `width`, with what `half_power` leaves of the length."""
    size = largest_block(width)
    count = width // size
    place = torch.arange(count, dtype=torch.float64)
    angle = place[:, None] * place * (2 * math.pi / count)
    return (angle.cos() + angle.sin()) / (math.sqrt(width) * half_power(size))


def turn(x: Tensor, signs: Tensor, matrix: Tensor) -> Tensor:
    """`x` (..., width) rotated: times `signs` (..., width), then Hadamard and `across`."""
    count, width = len(matrix), x.shape[-1]
    size = width // count
    runs = (walsh_hadamard(x * signs, size) * half_power(size)).unflatten(-1, (count, size))
    return (runs * matrix[0, 0] if count == 1 else matrix @ runs).flatten(-2)


def turn_back(x: Tensor, signs: Tensor, matrix: Tensor) -> Tensor:
    """The inverse of `turn`: what was turned by the same `signs` and `matrix`."""
    return turn(x, torch.ones_like(signs), matrix) * signs
