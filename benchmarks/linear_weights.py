"""The packed weights that `linear.py` measures: one buffer for all widths or for one, a scale for a row or a group."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bitdial import functional as bf
from bitdial.kernels.packed_ops import packed_linear, packed_scales
from bitdial.kernels.word_layout import nested_fields, pack_words, packed_fields

BITS = (8, 6, 4, 3, 2)

Layer = Callable[[Tensor], Tensor]


class Ours(NamedTuple):
    """A kind of packed weight: its words, `nested` or `packed` for one width, and its scales' groups and their type."""

    words: str
    group: int = 0
    floats: bool = False

    @property
    def name(self) -> str:
        return self.words + (f" g{self.group}{'f' if self.floats else ''}" if self.group else "")

    @property
    def scheme(self) -> str:
        return "centred" if self.words == "nested" else "double_rounding"

    def group_bytes(self, shape: tuple[int, int]) -> int:
        """What the scales of groups take."""
        return shape[0] * shape[1] // self.group * (4 if self.floats else 1) if self.group else 0


class Packed(NamedTuple):
    """A packed weight as the op takes it, and what it says (rows, columns), float32."""

    words: Tensor
    scale: Tensor
    group_scale: Tensor | None
    fields: tuple[int, ...]
    offset: float
    values: Tensor

    def copy(self) -> "Packed":
        """The same at other addresses."""
        groups = None if self.group_scale is None else self.group_scale.clone()
        return self._replace(words=self.words.clone(), group_scale=groups)


def packed_weight(kind: Ours, shape: tuple[int, int], bits: int, seed: int, device: torch.device) -> Packed:
    """Random 8-bit codes, packed to be read at `bits`, and scales of one step at 8 bits."""
    generator = torch.Generator(device).manual_seed(seed)
    codes = torch.randint(-128, 128, shape, generator=generator, device=device, dtype=torch.int8)
    scale = torch.rand(shape[0], generator=generator, device=device) * 1e-4 + 1e-4
    multipliers = None
    if kind.group:
        groups = shape[0], shape[1] // kind.group
        multipliers = torch.randint(1, 16, groups, generator=generator, device=device, dtype=torch.uint8)
    low = bf.narrow(codes, high=8, low=bits, scheme=kind.scheme)
    fields = nested_fields(BITS) if kind.words == "nested" else packed_fields(bits)
    words = pack_words(codes if kind.words == "nested" else low, fields)
    joined = scale if multipliers is None else scale[:, None] * multipliers
    given = (joined, None) if kind.floats else (scale, multipliers)
    values = bf.dequantize(low, joined, shift=8 - bits, scheme=kind.scheme)
    offset = bf.scheme_of(kind.scheme).offset(8 - bits)
    return Packed(words, *packed_scales(*given, columns=shape[1]), fields, offset, values)


def with_settings(weight: Packed, bits: int, settings: Any) -> Layer:
    """Our layer by its op, or with chosen settings."""
    words, scale, groups, fields, offset, _ = weight
    if settings is None:
        return lambda x: packed_linear(x, words, scale, None, fields, bits, 8, offset, groups)
    from bitdial.kernels.triton.packed import linear as triton_linear

    reading = triton_linear.Reading(fields, bits, 8, offset)
    return lambda x: triton_linear.linear(x, words, scale, None, reading, group_scale=groups, settings=settings)
