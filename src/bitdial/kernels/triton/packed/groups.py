"""Scales per group of inputs in the kernel for few tokens: how they are loaded, and how they meet the sums.

`word_layout.pack_scales` draws how they lie in memory: RUNS in each row of a tile, bytes or float32. Weights enter the
product as c + offset, exactly, so the scales can only meet float32 sums. There are two ways:

    between   the sums of a run are made anew, multiplied by its scale and added to the total: any number of tokens.
    spread    a tensor core multiplies by 8 tokens at a time. Where there is one token, the other 7 columns are free:
              those from i * 8 / RUNS on hold its numbers of run i. The sums of run i, made anew, are right in these
              columns, and in the others nobody looks at them: each thread keeps those of its own run. They meet their
              scales once a tile, each other at the very end.

For a tile of 4 runs of bytes, spread, a thread loads its run's numbers only, 2 times and not 8, which takes 8 registers
and not 32; it has 1 load, 2 conversions, 6 selections and 2 multiply-adds more than with a scale per row. Between runs,
up to 8 tokens, it has 1 load, 8 conversions and 16 multiply-adds more.

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
    spread: int = 0  # a run's sums in so many chains of products; 0: between
    each: int = 1  # scales that a thread has of each of its two rows for a tile
    loads: int = 1  # in so many loads,
    size: int = 2  # of so many bytes each


def grouping(group_scale: Tensor | None, spread: int) -> Grouping:
    """How the kernel deals with these scales; `spread` is for one token only, where a tile has two chains or more."""
    if group_scale is None:
        return Grouping()
    runs = group_scale.shape[3]
    each = max(runs // 4, 1) if spread else runs
    all_bytes = 2 * each * group_scale.element_size()
    size = min(all_bytes, 8)
    return Grouping(runs, max(spread, 2 // runs) if spread else 0, each, all_bytes // size, size)


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
    """What the sums (warps, rows, tokens) of RUN are multiplied by, where runs are not spread."""
    scale = _pair(loaded, RUN, GROUPING)
    scale = tl.join(scale, scale)
    if TOKEN_TILES == 2:
        scale = tl.join(scale, scale)
    # row tile, warp, row % 8, q, row // 8, token % 2, token // 8
    scale = tl.reshape(scale, (ROW_TILES, WARPS, 8, 4, 2, 2, TOKEN_TILES))
    return tl.reshape(tl.permute(scale, (1, 0, 4, 2, 6, 3, 5)), (WARPS, ROW_TILES * 16, TOKEN_TILES * 8))


@triton.jit
def spread_scale(loaded, INDEX: tl.constexpr, GROUPING: tl.constexpr, ROW_TILES: tl.constexpr, WARPS: tl.constexpr):  # type: ignore[no-untyped-def]
    """What sums (warps, rows, 4) of spread runs are multiplied by: scale INDEX of each thread."""
    # row tile, warp, row % 8, q, row // 8
    scale = tl.reshape(_pair(loaded, INDEX, GROUPING), (ROW_TILES, WARPS, 8, 4, 2))
    return tl.reshape(tl.permute(scale, (1, 0, 4, 2, 3)), (WARPS, ROW_TILES * 16, 4))


@triton.jit
def token_sums(sums, GROUPING: tl.constexpr):  # type: ignore[no-untyped-def]
    """The sums (rows, 1) of the token from those of spread runs (rows, 4), in which fewer than 4 runs repeat."""
    if GROUPING[0] < 4:
        sums = tl.where((tl.arange(0, 4) % (4 // GROUPING[0]) == 0)[None, :], sums, 0.0)
    return tl.sum(sums, axis=1)[:, None]
