"""Scales per group of inputs in the kernel for few tokens: how they are loaded, and how they meet the sums.

`word_layout.pack_scales` draws how they lie in memory: RUNS in each row of a tile, bytes or float32. Weights enter the
product as c + offset, exactly, so the scales can only meet float32 sums. There are two ways:

    between   the sums of a run are made anew, multiplied by its scale and added to the total: any number of tokens.
    spread    a tensor core multiplies by 8 tokens at a time. Where there is one token, the other 7 columns are free:
              its numbers of run i go to column i * 8 / RUNS, and zeros to all others, so the sums of all runs lie
              beside each other in one accumulator. They meet their scales once a tile, each other at the very end.

For a tile of 4 runs of bytes a thread has 1 load, 2 conversions, 4 additions and 4 multiply-adds more than with a
scale per row where runs are spread; between them, up to 8 tokens, 1, 8, 16 and 16.

Thread t of a warp holds the sums of rows t // 4 and t // 4 + 8, and of tokens 2 * (t % 4) and one more. The scales of
these two rows lie beside each other, and threads that need the same ones load them from one address: nothing moves
between threads.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from bitdial.kernels.triton.packed.words import followed_by


class Scales(NamedTuple):
    """A weight's scales: of its rows (rows,), of groups where it has them, by `pack_scales`, and a factor for all."""

    row: Tensor
    group: Tensor | None
    factor: float


class Grouping(NamedTuple):
    """What the kernel knows of groups when it is compiled; `runs` is 0 where there is a scale per row only."""

    runs: int = 0
    spread: int = 0  # in so many chains of products; 0: between
    each: int = 1  # scales that a thread has of each of its two rows for a tile
    loads: int = 1  # in so many loads,
    size: int = 2  # of so many bytes each


def grouping(group_scale: Tensor | None, spread: int) -> Grouping:
    """How the kernel deals with these scales; `spread` is for one token only."""
    if group_scale is None:
        return Grouping()
    runs = group_scale.shape[3]
    each = max(runs // 4, 1) if spread else runs
    all_bytes = 2 * each * group_scale.element_size()
    size = min(all_bytes, 8)
    return Grouping(runs, spread, each, all_bytes // size, size)


@triton.jit
def load_scales(ptr, row_tile, tile, rows, column_tiles, GROUPING: tl.constexpr):  # type: ignore[no-untyped-def]
    """What a thread needs for a tile: a tuple of integers (row tiles * warps, 32), which `sums_scale` takes apart.

    After the last tile it is that tile once more: its sums are 0 or not stored.
    """
    PARTS: tl.constexpr = GROUPING[0] // GROUPING[2]  # of a row, one to a thread
    LOADS: tl.constexpr = GROUPING[3]
    lane = tl.arange(0, 32)[None, :]
    row_tile = tl.minimum(row_tile, (rows - 1) // 16)[:, None].to(tl.int64)
    tile = tl.minimum(tile, column_tiles - 1)[:, None]
    part = lane // 4 * PARTS + lane % 4 * PARTS // 4
    start = _integers(ptr, GROUPING[4]) + (row_tile * column_tiles * (8 * PARTS) + part) * LOADS
    loaded = ()
    for i in tl.static_range(LOADS):
        found = tl.load(start + tile * (8 * PARTS * LOADS) + i)
        loaded = followed_by(loaded, found.to(tl.int32) if GROUPING[4] == 2 else found)
    return loaded


@triton.jit
def _integers(ptr, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    """`ptr` as a pointer to integers of SIZE bytes."""
    if SIZE == 8:
        return ptr.to(tl.pointer_type(tl.int64), bitcast=True)
    elif SIZE == 4:
        return ptr.to(tl.pointer_type(tl.int32), bitcast=True)
    else:
        return ptr.to(tl.pointer_type(tl.int16), bitcast=True)


@triton.jit
def _pair(loaded, INDEX: tl.constexpr, GROUPING: tl.constexpr):  # type: ignore[no-untyped-def]
    """Scale INDEX of both rows of each thread, float32, the rows in a new last dimension."""
    ITEM: tl.constexpr = GROUPING[3] * GROUPING[4] // (2 * GROUPING[2])  # bytes of a scale
    EACH: tl.constexpr = GROUPING[2] // GROUPING[3]  # pairs of a load
    word = loaded[INDEX // EACH]
    if ITEM == 1:
        BY: tl.constexpr = INDEX % EACH * 16
        return tl.join(((word >> BY) & 255).to(tl.float32), ((word >> (BY + 8)) & 255).to(tl.float32))
    else:
        low, high = word.to(tl.int32), (word >> 32).to(tl.int32)
        return tl.join(low.to(tl.float32, bitcast=True), high.to(tl.float32, bitcast=True))


@triton.jit
def sums_scale(  # type: ignore[no-untyped-def]
    loaded,
    RUN: tl.constexpr,
    GROUPING: tl.constexpr,
    TOKEN_TILES: tl.constexpr,
    ROW_TILES: tl.constexpr,
    WARPS: tl.constexpr,
):
    """What the sums (warps, rows, tokens) are multiplied by: the scale of RUN, or, spread, those of all runs."""
    FIRST: tl.constexpr = 0 if GROUPING[1] else RUN
    SECOND: tl.constexpr = GROUPING[2] - 1 if GROUPING[1] else RUN
    scale = tl.join(_pair(loaded, FIRST, GROUPING), _pair(loaded, SECOND, GROUPING))
    if TOKEN_TILES == 2:
        scale = tl.join(scale, scale)
    # row tile, warp, row % 8, q, row // 8, token % 2, token // 8
    scale = tl.reshape(scale, (ROW_TILES, WARPS, 8, 4, 2, 2, TOKEN_TILES))
    return tl.reshape(tl.permute(scale, (1, 0, 4, 2, 6, 3, 5)), (WARPS, ROW_TILES * 16, TOKEN_TILES * 8))
