"""What the kernels are told about a width: numbers in a table on the device, picked by an index on the device.

A recorded CUDA graph repeats its kernels with the same arguments. Ranges of codes and factors change with the width, so
they are no arguments: the kernels read the row of the table that `choice` names at that moment.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from bitdial import functional as bf

SECOND = {None: 0, "nearest even": 1, "nearest up": 2, "floor": 3}
PLAIN, DOUBLED, NESTED = 0, 1, 2  # how weight integers follow from codes; see `kernels.switch`


class Dial(NamedTuple):
    """A table (widths, numbers) in float32, and the row of it that is in use (1,), a whole number."""

    table: Tensor
    choice: Tensor

    @classmethod
    def of(cls, rows: Sequence[tuple[float, ...]], choice: Tensor | None, device: torch.device) -> "Dial":
        """One row and no choice, or a row for each width and the choice of one."""
        table = _table(tuple(rows), device)
        return cls(table, first_row(device) if choice is None else choice)


# Recorded graphs read these tensors by their address, so they are kept for good. They are small, and few.
@functools.cache
def _table(rows: tuple[tuple[float, ...], ...], device: torch.device) -> Tensor:
    return torch.tensor(rows, dtype=torch.float32, device=device)


@functools.cache
def first_row(device: torch.device) -> Tensor:
    """The choice of the first row."""
    return torch.zeros(1, dtype=torch.int64, device=device)


class WeightCodes(NamedTuple):
    """How the kernels quantise a weight: its scale, its width, the kinds of its roundings.

    A row of the dial: the range of the first rounding, that of the low codes, 2^-shift, 2^shift, the open range of
    W / scale within which nothing is clipped, the factor of the scale's gradient, the phase, the offset of the values.
    """

    scale: Tensor
    dial: Dial
    first_floor: bool
    second: int

    @classmethod
    def of(cls, scale: Tensor, *, high: int, low: int, scheme: str, ties: str, gradient_scale: float) -> "WeightCodes":
        """The codes at one width."""
        return cls.one_of(scale, [(high, low, gradient_scale)], None, scheme=scheme, ties=ties)

    @classmethod
    def one_of(
        cls, scale: Tensor, widths: Sequence[tuple[int, int, float]], choice: Tensor | None, *, scheme: str, ties: str
    ) -> "WeightCodes":
        """The codes at the width (high, low, gradient scale) that `choice` names."""
        rule = bf.scheme_of(scheme)
        rows = [_weight_row(rule, *width) for width in widths]
        return cls(scale, Dial.of(rows, choice, scale.device), rule.first_is_floor, SECOND[rule.second_rounding(ties)])


@functools.cache
def _weight_row(rule: bf.Scheme, high: int, low: int, gradient_scale: float) -> tuple[float, ...]:
    up = 2.0 ** (high - low)
    unclipped = (bound * up for bound in bf.unclipped_range(rule, high, low))
    phase = rule.stored_range(high)[0] - bf.code_range(high)[0]
    first = (code - phase for code in rule.stored_range(high))
    offset = rule.offset(high - low)
    return *first, *bf.code_range(low), 1 / up, up, *unclipped, gradient_scale, float(phase), offset


class ActivationCodes(NamedTuple):
    """How the kernels quantise an activation: its scale, and its width.

    A row of the dial: the range of the codes, the factor of the scale's gradient.
    """

    scale: Tensor
    dial: Dial

    @classmethod
    def of(cls, scale: Tensor, *, bits: int, kind: str, gradient_scale: float) -> "ActivationCodes":
        """The codes at one width."""
        return cls.one_of(scale, [(bits, gradient_scale)], None, kind=kind)

    @classmethod
    def one_of(
        cls, scale: Tensor, widths: Sequence[tuple[int, float]], choice: Tensor | None, *, kind: str
    ) -> "ActivationCodes":
        """The codes at the width (bits, gradient scale) that `choice` names."""
        rows = [(*bf.code_range(bits, signed=kind == "signed"), factor) for bits, factor in widths]
        return cls(scale, Dial.of(rows, choice, scale.device))
