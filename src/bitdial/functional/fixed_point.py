"""Fixed point: integers times a power of two, the smallest that fits. `live.engines.exact` says what for."""

import torch
from torch import Tensor


def fixed_point(x: Tensor, bits: int, *, by_sample: bool) -> tuple[Tensor, Tensor]:
    """`x` as integers of at most `bits` bits (held in float64) times a power of two: returns (integers, power).

    The power is the smallest that fits, for each sample (dimension 0) or for the whole tensor; it broadcasts. Where a
    number is NaN or infinite it is NaN.
    """
    inverse, power = fixed_point_powers(x, bits, by_sample=by_sample)
    return (x.double() * inverse).round_(), power


def fixed_point_powers(x: Tensor, bits: int, *, by_sample: bool) -> tuple[Tensor, Tensor]:
    """1 / power and power of `x` in fixed point."""
    dims = tuple(range(1, x.dim())) if by_sample else tuple(range(x.dim()))
    largest = (x.abs().amax(dim=dims, keepdim=True) if dims else x.abs()).double()
    exponent = (largest.view(torch.int64) >> 52) - 1022  # of float64: largest < 2**exponent
    exponent = torch.where(largest > 0, exponent, 0) - bits
    power = torch.where(largest.isfinite(), power_of_two(exponent), torch.nan)
    return power_of_two(-exponent), power


def power_of_two(exponent: Tensor) -> Tensor:
    """2 to that int64 power, in float64; of normal numbers."""
    return ((exponent + 1023) << 52).view(torch.float64)


def mean_of_images(x: Tensor) -> Tensor:
    """The mean of each image of x (..., H, W), kept as (..., 1, 1): the rounded quotient of the sum.

    PyTorch's own mean multiplies by 1 / count on a GPU, as does a division by a number that is no tensor.
    """
    return x.sum(dim=(-2, -1), keepdim=True) / x.new_full((), x.shape[-2] * x.shape[-1])
