"""Blocks of GGUF's types from integer codes and their scales: which type says a weight exactly, and its bytes.

    a scale for each block      Q8_0, Q4_0, Q5_0        weight = d * q
    ... and a minimum           Q4_1, Q5_1              weight = d * q + m
    scales of two levels        Q3_K, Q6_K              weight = d * sc * q
    ... and minima              Q2_K, Q4_K, Q5_K        weight = d * sc * q - dmin * mn

d, m and dmin are IEEE halves; sc and mn are whole numbers, one for each part of a block. Our weight is code plus offset
times step. So q is our weight integer, or the code counted from the lowest one, whose value is then the minimum; sc
and mn are the multipliers of our groups. Nothing is rounded but the halves. What that costs is found by decoding the
blocks with the library.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import gcd
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from bitdial.live.codes import Codes

Array = np.ndarray[Any, Any]
NEAR = 2.0**-10  # rounding scales to halves costs a layer no more, unless they are subnormal
AT_ONCE = 1 << 24  # weights that are packed and compared at a time


class Weight(NamedTuple):
    """A layer's weight at one width, in rows: (code + addend / factor) * step.

    codes         (rows, inputs), int8, from `least` to `most`
    row_step      (rows,), float32, what a step is a multiple of
    multipliers   (rows, groups), whole numbers; None where each group has a step of its own
    step          (rows, groups), float32
    """

    codes: Tensor
    least: int
    most: int
    factor: int
    addend: int
    row_step: Tensor
    multipliers: Tensor | None
    step: Tensor

    def rows(self, picked: Tensor | slice) -> "Weight":
        """Those rows of it."""
        multipliers = None if self.multipliers is None else self.multipliers[picked]
        codes, row_step, step = (part[picked] for part in (self.codes, self.row_step, self.step))
        return self._replace(codes=codes, row_step=row_step, multipliers=multipliers, step=step)

    def values(self) -> Tensor:
        """The weight (rows, inputs), float32, as the live model has it."""
        whole = self.codes.float() + self.addend / self.factor
        return (whole.unflatten(1, (self.step.shape[1], -1)) * self.step[:, :, None]).flatten(1)


def weight_at(codes: Codes, bits: int) -> Weight:
    """The weight of a live layer's `codes` at `bits`."""
    shift = codes.shift(bits)
    factor, addend = codes.rule.integers(shift)
    common = gcd(factor, addend)
    least, most = (code >> shift for code in codes.rule.stored_range(bits + shift))
    found, step, multipliers = codes.weight_codes(bits), codes.step(bits), codes.multipliers
    row_step = codes.scale[0] * 2.0**shift if multipliers is not None else step[:, 0] if step.dim() == 2 else step
    if step.dim() == 1:
        row_step = step.expand(len(found))
        step, multipliers = row_step[:, None], torch.ones(len(found), 1, dtype=torch.uint8)
    return Weight(found, least, most, factor // common, addend // common, row_step, multipliers, step)


class Parts(NamedTuple):
    """What a block type packs, a row for each block.

    q             (blocks, weights), uint8, counted from the type's least
    d, minimum    (blocks, 1), float16
    multipliers   (blocks, parts), uint8; empty where the scale of a block is its own
    """

    q: Array
    d: Array
    minimum: Array
    multipliers: Array


@dataclass(frozen=True)
class BlockType:
    """A type of GGUF. Every `part` of a `block` of weights share a scale, and q goes from `least` to `most`.

    minimum   the sign with which minima are added; 0: there are none
    """

    name: str
    bytes: int
    block: int
    part: int
    least: int
    most: int
    minimum: int
    pack: Callable[[Parts], list[Array]]

    @property
    def two_levels(self) -> bool:
        """Whether the scale of a part is a multiple of the block's."""
        return self.part < self.block

    def holds(self, weight: Weight) -> bool:
        """Whether its blocks lie inside our rows, its parts inside our groups, and its q has all our codes."""
        inputs, groups = weight.codes.shape[1], weight.step.shape[1]
        if inputs % self.block or (groups > 1 and inputs // groups % self.part):
            return False
        if self.two_levels and weight.multipliers is None:
            return False
        if self.minimum:
            return weight.most - weight.least <= self.most
        least, most = (weight.factor * code + weight.addend for code in (weight.least, weight.most))
        return self.least <= least and most <= self.most

    def parts(self, weight: Weight) -> Parts:
        """`weight` as blocks of this type."""
        blocks, inputs = weight.codes.shape[1] // self.block, weight.codes.shape[1]
        steps = weight.row_step[:, None].expand(-1, blocks) if self.two_levels else _each(weight.step, blocks)
        codes, multipliers = weight.codes.to(torch.int16), torch.empty(0, dtype=torch.uint8)
        if self.two_levels:
            assert weight.multipliers is not None
            multipliers = _each(weight.multipliers, inputs // self.part).to(torch.uint8)
        if self.minimum:
            q, d = codes - weight.least, steps.half()
            lowest = weight.least + weight.addend / weight.factor
            minimum = (d.double() * (lowest * self.minimum)).half()
        else:
            q, d = codes * weight.factor + weight.addend - self.least, (steps / weight.factor).half()
            minimum = torch.zeros_like(d)
        count = d.numel()
        return Parts(
            q.to(torch.uint8).reshape(count, self.block).numpy(), d.reshape(count, 1).numpy(),
            minimum.reshape(count, 1).numpy(), multipliers.reshape(count, -1).numpy(),
        )  # fmt: skip


def _each(by_group: Tensor, count: int) -> Tensor:
    """`by_group` (rows, groups) for `count` runs of inputs; each lies in one group."""
    return by_group.repeat_interleave(count // by_group.shape[1], dim=1)


# --- bytes ----------------------------------------------------------------------------------------


def _fold(values: Array, bits: int, width: int) -> Array:
    """`values` (blocks, n) of `bits` bits as bytes: those that lie `width` apart share one, the first at the bottom."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    runs = values.reshape(len(values), -1, 8 // bits, width)
    return np.bitwise_or.reduce(runs << shifts, axis=2).reshape(len(values), -1)


def _bytes(halves: Array) -> Array:
    return halves.view(np.uint8)


def _q8_0(p: Parts) -> list[Array]:
    return [_bytes(p.d), p.q + np.uint8(128)]  # from 0..255 to int8's bits


def _q4_0(p: Parts) -> list[Array]:
    return [_bytes(p.d), _fold(p.q, 4, 16)]


def _q4_1(p: Parts) -> list[Array]:
    return [_bytes(p.d), _bytes(p.minimum), _fold(p.q, 4, 16)]


def _q5_0(p: Parts) -> list[Array]:
    return [_bytes(p.d), _fold(p.q >> 4, 1, 1), _fold(p.q & 15, 4, 16)]


def _q5_1(p: Parts) -> list[Array]:
    return [_bytes(p.d), _bytes(p.minimum), _fold(p.q >> 4, 1, 1), _fold(p.q & 15, 4, 16)]


def _q2_k(p: Parts) -> list[Array]:
    return [p.multipliers | p.multipliers << 4, _fold(p.q, 2, 32), _bytes(p.d), _bytes(p.minimum)]


def _q3_k(p: Parts) -> list[Array]:
    scales = p.multipliers + np.uint8(32)
    return [
        _fold(p.q >> 2, 1, 32),
        _fold(p.q & 3, 2, 32),
        _fold(scales & 15, 4, 8),
        _fold(scales >> 4, 2, 4),
        _bytes(p.d),
    ]


def _scales_and_minima(p: Parts) -> list[Array]:
    """12 bytes of 6-bit numbers: four whole, the upper two bits of the other four above them, then their rest."""
    low, high = p.multipliers[:, :4], p.multipliers[:, 4:]
    whole = low | high >> 4 << 6
    return [whole, whole, (high & 15) | (high & 15) << 4]


def _q4_k(p: Parts) -> list[Array]:
    return [_bytes(p.d), _bytes(p.minimum), *_scales_and_minima(p), _fold(p.q, 4, 32)]


def _q5_k(p: Parts) -> list[Array]:
    return [_bytes(p.d), _bytes(p.minimum), *_scales_and_minima(p), _fold(p.q >> 4, 1, 32), _fold(p.q & 15, 4, 32)]


def _q6_k(p: Parts) -> list[Array]:
    return [_fold(p.q & 15, 4, 64), _fold(p.q >> 4, 2, 32), p.multipliers, _bytes(p.d)]


# From few bytes a weight to many; of two of one size the plainer first.
TYPES = (
    BlockType("Q2_K", 84, 256, 16, 0, 3, -1, _q2_k),
    BlockType("Q3_K", 110, 256, 16, -4, 3, 0, _q3_k),
    BlockType("Q4_0", 18, 32, 32, -8, 7, 0, _q4_0),
    BlockType("Q4_K", 144, 256, 32, 0, 15, -1, _q4_k),
    BlockType("Q4_1", 20, 32, 32, 0, 15, 1, _q4_1),
    BlockType("Q5_0", 22, 32, 32, -16, 15, 0, _q5_0),
    BlockType("Q5_K", 176, 256, 32, 0, 31, -1, _q5_k),
    BlockType("Q5_1", 24, 32, 32, 0, 31, 1, _q5_1),
    BlockType("Q6_K", 210, 256, 16, -32, 31, 0, _q6_k),
    BlockType("Q8_0", 34, 32, 32, -128, 127, 0, _q8_0),
)


# --- choosing -------------------------------------------------------------------------------------


class Rounding(NamedTuple):
    """How far decoded weights are from ours: the largest relative error of one, and the root mean square over all.

    Weights below half a step count as half a step.
    """

    largest: float
    rms: float


class Packed(NamedTuple):
    """A weight as blocks of a type, in rows, and what rounding its halves cost: 0 and 0 if nothing."""

    type: str
    blocks: Array
    rounding: Rounding


def packed(weight: Weight, types: tuple[BlockType, ...] = TYPES) -> Packed | None:
    """`weight` in the smallest type that says it exactly; None if no type holds it.

    If halves must be rounded in all of them, it is the smallest in which that costs at most NEAR, or else the nearest.
    """
    made = []
    for kind in types:
        if kind.holds(weight) and (found := _packed_as(kind, weight)) is not None:
            if found.rounding == (0, 0):
                return found
            made.append(found)
    return next((p for p in made if p.rounding.rms <= NEAR), min(made, key=lambda p: p.rounding.rms, default=None))


def _packed_as(kind: BlockType, weight: Weight) -> Packed | None:
    """`weight` as blocks of that type; None if a scale is beyond what a half can say."""
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    blocks, largest, error, total = [], 0.0, 0.0, 0.0
    for some in _slices(weight):
        parts = kind.parts(some)
        if not (np.isfinite(parts.d).all() and np.isfinite(parts.minimum).all()):
            return None
        made = np.concatenate(kind.pack(parts), axis=1)
        decoded = torch.from_numpy(dequantize(made, GGMLQuantizationType[kind.name])).reshape(some.codes.shape)
        ours = some.values()
        if not torch.equal(decoded, ours):
            off = (decoded.double() - ours).abs()
            half_a_step = _each(some.step, ours.shape[1]).double() / 2
            largest = max(largest, float((off / torch.maximum(ours.abs(), half_a_step)).max()))
            error += float(off.square().sum())
        total += float(ours.double().square().sum())
        blocks.append(made.reshape(len(ours), -1))
    return Packed(kind.name, np.concatenate(blocks), Rounding(largest, (error / total) ** 0.5 if error else 0.0))


def _slices(weight: Weight) -> Iterator[Weight]:
    count, inputs = weight.codes.shape
    at_once = max(AT_ONCE // inputs, 1)
    for start in range(0, count, at_once):
        yield weight.rows(slice(start, start + at_once))
