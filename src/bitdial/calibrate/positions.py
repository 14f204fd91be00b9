"""How much each pixel of an activation counts: one with huge values counts as one, not as hundreds.

Some networks put values of up to 50 standard deviations, in many channels, at a few places; MobileNetV2 does in the
corners of some images. There they matter no more than elsewhere, since a mean over all places follows. But they make up
a good part of every variance and of every squared error. If they are clipped, which is right, a norm would take all
other pixels for too small and stretch them. So statistics and errors are weighted: a pixel of many times the usual
energy counts by its relative error. Tokens of a sequence are not weighted: models make use of single large ones.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

MOST_ENERGY = 4.0  # of a pixel, in means of all, up to which it counts as it is


class Moments(NamedTuple):
    """Mean and variance of each channel (C,), float64."""

    mean: Tensor
    variance: Tensor


def position_weights(batches: Sequence[Tensor], channel_dim: int) -> list[Tensor]:
    """min(MOST_ENERGY / energy, 1) of each position of `batches`, in their shapes but for one channel.

    The energy is the mean over channels of (x - mean)^2 / variance, with the channel's moments over all batches.
    """
    mean, variance = moments_of(batches, channel_dim)
    usual = variance.mean().clamp_min(1e-30)
    spread = torch.where(variance > 0, variance, usual)
    mean, spread = mean.to(batches[0].dtype), spread.to(batches[0].dtype)
    weights = []
    for x in batches:
        shape = [1] * x.dim()
        shape[channel_dim] = -1
        apart = (x - mean.view(shape)).square_().div_(spread.view(shape))
        weights.append(MOST_ENERGY / apart.mean(dim=channel_dim, keepdim=True).clamp_min_(MOST_ENERGY))
    return weights


def moments_of(batches: Sequence[Tensor], channel_dim: int, weights: Sequence[Tensor] | None = None) -> Moments:
    """The moments of all `batches` together; `weights` are those of positions."""
    counts = [None] * len(batches) if weights is None else [_rows(each, channel_dim) for each in weights]
    pairs = list(zip(batches, counts, strict=True))
    found = [_sums(_rows(x, channel_dim), own) for x, own in [pair for pair in pairs if pair[0].numel()] or pairs]
    sizes, means, spreads = (torch.stack(each) for each in zip(*found, strict=True))
    total, sizes = sizes.sum(), sizes[:, None]
    mean = (means * sizes).sum(dim=0) / total
    return Moments(mean, (spreads + (means - mean).square_().mul_(sizes)).sum(dim=0) / total)


def _rows(x: Tensor, channel_dim: int) -> Tensor:
    return x.movedim(channel_dim, 0).flatten(1)


def _sums(rows: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Of `rows` (C, n): the sum of the weights (1, n), the means, the sums of squared differences; in float64."""
    if weights is None:
        size = rows.shape[1]
        spread = rows.var(dim=1, correction=0).double() * size
        return spread.new_full((), size), rows.mean(dim=1, dtype=torch.float64), spread
    total = weights.sum(dtype=torch.float64)
    mean = (rows * weights).sum(dim=1, dtype=torch.float64) / total
    apart = (rows - mean.to(rows.dtype)[:, None]).square_().mul_(weights)
    return total, mean, apart.sum(dim=1, dtype=torch.float64)
