"""Which weights share a scale: all of them, those of an output channel, or groups of inputs of a channel.

A weight is seen in rows: dimension 0 counts output channels, dimension 1 their inputs. The shape of its scale says how
fine it is:

    (1,)             one scale for the whole weight
    (rows,)          one for each output channel
    (rows, groups)   one for each run of inputs / groups neighbouring inputs of a channel

A run of inputs of one channel is contiguous in memory, so a weight with groups is a weight of rows * groups shorter
rows: `by_scale` views it so, and everything that is defined for a scale per channel holds for groups.

Two-level scales keep sums of a row integer sums: a group's scale is a whole number from 1 to MOST_MULTIPLIER times the
scale of its row, so the row's sum is a sum of (multiplier * code) times activation codes. With 'half' a row's scale has
7 significant bits: the scale of each group then has 11 and is an IEEE half, as other formats store it.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bitdial.errors import ConfigError
from bitdial.functional.schemes import apply

MOST_MULTIPLIER = 15  # 4 bits a group; GGUF's blocks have as many
GROUP_SCALES: tuple[str, ...] = ("integer", "half", "float")
_CUT = 17  # bits that a float32 has beyond 7 significant ones


@dataclass(frozen=True)
class Granularity:
    """How fine the scales of a weight are: per tensor, per channel, or per group of `group_size` inputs."""

    per_channel: bool = True
    group_size: int | None = None

    def scale_shape(self, shape: tuple[int, ...], name: str = "") -> tuple[int, ...]:
        """The shape of the scale of a weight (rows, inputs, ...); ConfigError, naming the layer, if groups do not fit.

        A layer of no more inputs than a group has one group a row, which is a scale per channel.
        """
        if self.group_size is None or shape[1] <= self.group_size:
            return (shape[0] if self.per_channel or self.group_size is not None else 1,)
        groups, rest = divmod(shape[1], self.group_size)
        if rest:
            raise ConfigError(
                f"layer {name!r}: its {shape[1]} inputs are no multiple of group_size={self.group_size}; give it "
                f"another by a rule, such as Rule(pattern={name!r}, group_size=...), or 0 for a scale per channel"
            )
        return shape[0], groups


def has_groups(scale_shape: tuple[int, ...]) -> bool:
    """Whether a scale of that shape is one per group of inputs."""
    return len(scale_shape) == 2


def scale_bytes(scale_shape: tuple[int, ...], group_scales: str) -> int:
    """Bytes of a scale of that shape as a file stores it: 4 a number; of two levels, 4 a row and 1 a group."""
    if has_groups(scale_shape) and group_scales != "float":
        return 4 * scale_shape[0] + math.prod(scale_shape)
    return 4 * math.prod(scale_shape)


def by_scale(weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """(weight, scale) viewed so that each entry of the scale belongs to one row of the weight: (rows, ...), (rows,)."""
    if scale.dim() < 2:
        return weight, scale
    return weight.reshape(scale.numel(), -1), scale.reshape(-1)


def spread(scale: Tensor, like: Tensor) -> Tensor:
    """View a `scale` (rows,) or (1,) so that it broadcasts over dimension 0 of `like`."""
    return scale.view(-1, *(1,) * (like.dim() - 1))


def values_by_scale(values: Tensor, scale: Tensor) -> Tensor:
    """`values` (weight-shaped) times its scale of any granularity, in the shape of `values`."""
    rows, flat = by_scale(values, scale)
    return (rows * spread(flat, rows)).reshape(values.shape)


def split_scale(scale: Tensor, *, half: bool = False) -> tuple[Tensor, Tensor]:
    """Row scales (rows,), float, and multipliers (rows, groups), uint8, of the two-level scale nearest to `scale`.

    The row's scale is that of its largest group divided by MOST_MULTIPLIER; `half` rounds it to 7 significant bits. To
    split what `join_scale` gives changes nothing: row * 15 / 15 is the row again, though row * 15 is rounded.
    """
    rows, ratio = _by_row(scale, 1 << _CUT - 1 if half else None)
    return rows, ratio.round_().clamp_(1, MOST_MULTIPLIER).to(torch.uint8)


def _by_row(scale: Tensor, added: int | None) -> tuple[Tensor, Tensor]:
    """The rows' scales, and how many of them each group has; with `added`, cut to 7 bits after that was added to them.

    The bits of a float32 are a number that counts all of them, so half of the last kept bit rounds to the nearest.
    """
    rows = scale.amax(dim=1) / torch.full_like(scale[:, 0], MOST_MULTIPLIER)
    if added is not None:
        rows = (rows.view(torch.int32) + added >> _CUT << _CUT).view(rows.dtype)
    return rows, scale / rows[:, None]


def has_half_rows(rows: Tensor) -> bool:
    """Whether all row scales have 7 significant bits."""
    return not bool((rows.view(torch.int32) & (1 << _CUT) - 1).any())


def two_level_above(scale: Tensor, *, half: bool = False) -> Tensor:
    """The least two-level scale that is nowhere below `scale` (rows, groups), up to rounding."""
    rows, ratio = _by_row(scale, (1 << _CUT) - 1 if half else None)
    return join_scale(rows, ratio.ceil_().clamp_(1, MOST_MULTIPLIER))


def join_scale(rows: Tensor, multipliers: Tensor) -> Tensor:
    """The scale (rows, groups) of row scales (rows,) and multipliers (rows, groups)."""
    return rows[:, None] * multipliers.to(rows.dtype)


class _TwoLevel(torch.autograd.Function):
    """The nearest two-level scale; straight-through."""

    @staticmethod
    def forward(ctx: Any, scale: Tensor, half: bool) -> Tensor:
        return join_scale(*split_scale(scale, half=half))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


def two_level(scale: Tensor, *, half: bool = False) -> Tensor:
    """The two-level scale nearest to the learned `scale` (rows, groups); its gradient goes straight through."""
    return apply(_TwoLevel, scale, half)
