"""Packed weights as products on the CPU read them: made once for a width, not at every call."""

from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from bitdial.kernels.cpu.digits import (
    DIGITS,
    MOST_COLUMNS,
    Digits,
    added_up,
    digit_sums,
    planes_of,
    prepacked,
    products_are_exact,
)
from bitdial.kernels.cpu.nibbles import MOST_BITS, NibbleLayout, nibble_layout
from bitdial.kernels.kept_layouts import Use
from bitdial.kernels.reference.packed_linear import weight_values
from bitdial.kernels.word_layout import unpack_scales, unpack_words

MOST_SUMS = 1 << 24  # that are held at a time: 64 MB
_FACTORS = tuple(1 << i for i in range(9))  # that make whole numbers of offsets


@dataclass(frozen=True)
class IntegerLayout:
    """Weight integers in planes of bytes: one for most weights, two where integers have 9 to 16 bits."""

    weight: Tensor  # (planes * rows, columns), opaque
    step: Tensor  # (planes * rows,): the value of 1
    rows: int

    def multiply(self, x: Digits) -> Tensor:
        """The products (tokens, rows) in float32."""
        tokens, planes = x.digits.shape[0] // DIGITS, self.step.shape[0] // self.rows  # len() takes ten times as long
        part = max(1, MOST_SUMS // (DIGITS * self.step.shape[0]))
        if tokens > part:
            digits, unit = x.digits.view(DIGITS, tokens, -1), cast(Tensor, x.unit)
            cuts = [slice(i, i + part) for i in range(0, tokens, part)]
            parts = [Digits(digits[:, cut].flatten(0, 1), unit[cut], x.finite) for cut in cuts]
            return torch.cat([self.multiply(each) for each in parts])
        sums = digit_sums(x.digits, self.weight, self.step).view(DIGITS, tokens, -1)
        if planes > 1:
            sums = added_up(sums.view(DIGITS, tokens, planes, -1).permute(2, 0, 1, 3))
        return added_up(sums).mul_(x.unit)

    def tensors(self) -> list[Tensor]:
        """The weight and its steps."""
        return [self.weight, self.step]


@dataclass(frozen=True)
class FloatLayout:
    """The dequantised weight, for what has no integers: scales that are any float32 for each group."""

    weight: Tensor  # (rows, columns), float32

    def multiply(self, x: Tensor) -> Tensor:
        """The products (tokens, rows) of the float32 x."""
        return F.linear(x, self.weight)

    def tensors(self) -> list[Tensor]:
        """The weight."""
        return [self.weight]


@dataclass(frozen=True)
class Layouts:
    """What a weight has at one width: for everything, and beside it for few tokens in bf16, at up to 4 bits."""

    exact: IntegerLayout | FloatLayout
    nibbles: NibbleLayout | None = None

    def tensors(self) -> list[Tensor]:
        """What both hold."""
        return [*self.exact.tensors(), *([] if self.nibbles is None else self.nibbles.tensors())]


@torch.inference_mode(False)
@torch.no_grad()
def make_layouts(words: Tensor, scale: Tensor, group_scale: Tensor | None, use: Use, columns: int) -> Layouts:
    """The layouts of a weight of so many columns; by integers where the product is exact and the weight has such."""
    shift, rows = use.high - use.bits, len(scale)
    codes = unpack_words(words, use.fields, use.bits, rows, columns)
    factor = next((f for f in _FACTORS if (f * use.offset).is_integer()), None)
    by_bytes = group_scale is None or group_scale.dtype == torch.uint8
    if factor is None or not by_bytes or columns > MOST_COLUMNS or not products_are_exact():
        return Layouts(FloatLayout(weight_values(codes, scale, group_scale, shift, use.offset).float()))
    integers = codes.to(torch.int32).mul_(factor).add_(int(factor * use.offset))
    multipliers = None if group_scale is None else unpack_scales(group_scale, rows, columns).to(torch.int32)
    if multipliers is not None:
        integers = (integers.view(*multipliers.shape, -1) * multipliers[:, :, None]).view(rows, columns)
    planes = planes_of(integers)
    step = scale * 2.0**shift
    exact = IntegerLayout(prepacked(planes), (step / factor).repeat(len(planes) // rows), rows)
    return Layouts(exact, nibble_layout(codes, multipliers, use.offset, step) if use.bits <= MOST_BITS else None)
