"""How much each position of an activation counts: one with huge values counts as one, not as hundreds.

A position is a pixel, a token or a sample: all channels at one place. Some networks put values of 30 to 50 standard
deviations, in all channels, at a few of them; MobileNetV2 does in the corners of some images. There they matter no more
than elsewhere, since a mean over positions follows. But they make up a good part of every variance and of every squared
error. If they are clipped, which is right, a norm would take all other positions for too small and stretch them. So
statistics and errors are weighted: a position of many times the usual energy counts by its relative error.
"""

import torch
from torch import Tensor


MOST_ENERGY = 2.0  # of a position, in means of all, up to which it counts as it is


def position_weights(x: Tensor, mean: Tensor, variance: Tensor, channel_dim: int) -> Tensor:
    """min(MOST_ENERGY / energy, 1) of each position of `x`, in its shape but for one channel.

    The energy is the mean over channels of (x - mean)^2 / variance, with the channels' own `mean` and `variance` (C,).
    """
    shape = [1] * x.dim()
    shape[channel_dim] = -1
    usual = variance.mean().clamp_min(1e-30)
    spread = torch.where(variance > 0, variance, usual).to(x.dtype)
    apart = (x - mean.to(x.dtype).view(shape)).square_().div_(spread.view(shape))
    return MOST_ENERGY / apart.mean(dim=channel_dim, keepdim=True).clamp_min_(MOST_ENERGY)


def weighted_moments(rows: Tensor, weights: Tensor | None) -> tuple[float, Tensor, Tensor]:
    """Of `rows` (C, n), each column weighted: the sum of the weights, means, sums of squared differences from them.

    Sums are float64. None weighs each column with 1.
    """
    if weights is None:
        size = rows.shape[1]
        return size, rows.mean(dim=1, dtype=torch.float64), rows.var(dim=1, correction=0).double() * size
    total = weights.sum(dtype=torch.float64)
    mean = (rows * weights).sum(dim=1, dtype=torch.float64) / total
    apart = (rows - mean.to(rows.dtype)[:, None]).square_().mul_(weights)
    return float(total), mean, apart.sum(dim=1, dtype=torch.float64)


def as_rows(x: Tensor, channel_dim: int = 1) -> Tensor:
    """`x` as (channels, positions)."""
    return x.movedim(channel_dim, 0).flatten(1)

