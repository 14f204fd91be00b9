"""What a live layer is: integer codes, their scales, and the quantizer of its input. How it multiplies is its engine's.

    value of a code   = (code + offset) * step              step = scale * 2^shift, shift = stored width - width
    weight integer    = factor * code + addend              whole numbers whose sums kernels take
                        times the multiplier of its group   where scales have two levels; the step is then the row's

Weights are in rows (output channels, inputs, ...), as `bitdial.nn.layer_kinds` says. Everything is computed by
`bitdial.functional` from what is stored; nothing here depends on the width that is selected.
"""

from typing import NamedTuple, Protocol, cast

import torch
from torch import Tensor, nn

from bitdial import functional as bf

ALL = slice(None)


class CodeSource(Protocol):
    """Where the codes of a layer lie: as they are stored, or packed into words. A module."""

    def read(self, bits: int) -> tuple[Tensor, int]:
        """Codes (int8, in rows) of a width that is not below `bits`, and that width."""
        ...

    def tensors(self) -> dict[str, list[Tensor]]:
        """What it holds, by the names of `bitdial.live.memory`."""
        ...


class StoredCodes(nn.Module):
    """Codes of the highest width as one tensor, int8; for schemes that cannot narrow, the float weight."""

    stored: Tensor

    def __init__(self, stored: Tensor, bits: int):
        super().__init__()
        self.register_buffer("stored", stored)
        self.bits = bits

    def read(self, bits: int) -> tuple[Tensor, int]:
        """The stored codes, whatever is asked for."""
        return self.stored, self.bits

    def tensors(self) -> dict[str, list[Tensor]]:
        """They are what a switch starts from."""
        return {"master": [self.stored]}


class CodeFacts(NamedTuple):
    """What a file says of all its codes, and of one layer's activations ('float': they are not quantised)."""

    scheme: str
    ties: str
    bit_choices: tuple[int, ...]
    act_kind: str


class CodeScales(NamedTuple):
    """The scales of a layer, as its file has them.

    weight           (widths or 1, rows or 1), or (1, rows, groups)
    multipliers      (rows, groups), uint8, of the rows' scales: two levels; None without
    act, zero_point  (widths,), where the input is quantised; for the kind 'dynamic', `act` are clip ratios
    """

    weight: Tensor
    multipliers: Tensor | None = None
    act: Tensor | None = None
    act_zero_point: Tensor | None = None


class Codes(nn.Module):
    """The codes of one layer's weight at every width of its file, and the quantizer of its input.

    Scales are float32 whatever type a model runs in.
    """

    scale: Tensor
    multipliers: Tensor | None
    act_scale: Tensor | None
    act_zero_point: Tensor | None

    def __init__(self, facts: CodeFacts, source: nn.Module, scales: CodeScales):
        super().__init__()
        self.scheme, self.ties, self.bit_choices, self.act_kind = facts
        self.rule = bf.scheme_of(facts.scheme)
        self.source = source
        self.register_buffer("scale", scales.weight)
        self.register_buffer("multipliers", scales.multipliers)
        self.register_buffer("act_scale", scales.act)
        self.register_buffer("act_zero_point", scales.act_zero_point)

    @property
    def stored(self) -> Tensor:
        """The widest codes that there are, in rows: int8, or the float weight for schemes that cannot narrow."""
        return self._source.read(self.bit_choices[0])[0]

    @property
    def is_dynamic(self) -> bool:
        """Whether each token of the input has a scale of its own."""
        return self.act_kind == bf.DYNAMIC

    @property
    def groups(self) -> int:
        """How many scales a row has."""
        if self.multipliers is not None:
            return self.multipliers.shape[1]
        return self.scale.shape[2] if self.scale.dim() == 3 else 1

    @property
    def has_row_steps(self) -> bool:
        """Whether all weight integers of a row have one step, so that its sums are integer sums."""
        return self.scale.dim() == 2

    def shift(self, bits: int) -> int:
        """How many bits below the stored codes those of `bits` are."""
        return self.bit_choices[0] - bits if self.rule.narrows else 0

    def weight_scale(self, bits: int | None = None) -> Tensor:
        """The scale of one step between stored codes: (1,), (rows,) or (rows, groups).

        Schemes that cannot narrow have one for each width.
        """
        if not self.rule.narrows:
            assert bits is not None
            return self.scale[self.bit_choices.index(bits)]
        return self.scale[0] if self.multipliers is None else bf.join_scale(self.scale[0], self.multipliers)

    def step(self, bits: int) -> Tensor:
        """The scale of one step between codes of `bits`: (1,), (rows,) or (rows, groups)."""
        return self.weight_scale(bits) * 2.0 ** self.shift(bits)

    def offset(self, bits: int) -> float:
        """What is added to a code of `bits` before it is multiplied with its step."""
        return self.rule.offset(self.shift(bits))

    def weight_codes(self, bits: int, rows: slice = ALL) -> Tensor:
        """Codes (int8, in rows) at `bits`; of some `rows` only, where a copy of all would take too much memory."""
        if not self.rule.narrows:
            return bf.quantize(self.stored, self.weight_scale(bits), bits=bits, scheme=self.scheme)[rows]
        codes, width = self._source.read(bits)
        codes = codes[rows].to(self.scale.device)
        return codes if width == bits else bf.narrow(codes, high=width, low=bits, scheme=self.scheme, ties=self.ties)

    def weight_values(self, bits: int) -> Tensor:
        """The dequantised weight (float32, in rows) at `bits`."""
        codes, step = self.weight_codes(bits), self.step(bits)
        rows, flat = bf.by_scale(codes.to(step.dtype, copy=True).add_(self.offset(bits)), step)
        return rows.mul_(bf.spread(flat, rows)).reshape(codes.shape)

    def weight_integers(self, bits: int, rows: slice = ALL) -> Tensor:
        """The weight at `bits`, or some `rows` of it, as integers (int16).

        With scales of two levels an integer is multiplied with its group's multiplier.
        """
        factor, addend = self.rule.integers(self.shift(bits))
        integers = self.weight_codes(bits, rows).to(torch.int16) * factor + addend
        if self.multipliers is None:
            return integers
        multipliers = self.multipliers[rows]
        grouped = integers.reshape(*multipliers.shape, -1) * multipliers[:, :, None].to(torch.int16)
        return grouped.reshape(integers.shape)

    def integer_step(self, bits: int) -> Tensor:
        """The step between weight integers at `bits`: (1,), (rows,), or (rows, groups) of plain float scales.

        With scales of two levels it is the row's.
        """
        scale = self.weight_scale(bits) if self.multipliers is None else self.scale[0]
        return scale * 2.0 ** self.shift(bits) / self.rule.integers(self.shift(bits))[0]

    def act_parameters(self, bits: int) -> tuple[Tensor, Tensor | None]:
        """Scale (for the kind 'dynamic', clip ratio) and zero-point (1,) of the input's quantizer at `bits`."""
        assert self.act_scale is not None
        i = self.bit_choices.index(bits)
        scale, zero_point = self.act_scale[i : i + 1], self.act_zero_point
        return scale, None if zero_point is None else zero_point[i : i + 1].to(scale.dtype)

    @property
    def _source(self) -> CodeSource:
        return cast(CodeSource, self.source)
