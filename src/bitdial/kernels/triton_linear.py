"""Linear layers on packed weights: a kernel for a few tokens, which reads weights at the speed of memory, and one for many.

**Few tokens** (up to 16). The weight is the left operand of the tensor cores, 16 rows at a time; the tokens, padded to
8 or 16, the right one. A program takes `16 * row_tiles` rows; its warps divide the columns among them and add up at the
end. Packed words come from memory in the order in which a thread needs them (see `layouts`), 16 bytes a load. Where
there are too few rows to fill the GPU, `splits` programs share the columns; they leave float32 sums that a second
kernel adds in order, so results repeat from run to run.

**Many tokens.** The usual tiled product; a tile of the weight becomes 16-bit numbers on its way into the tensor cores.

Weights enter the product as c + offset, exactly; the scale is applied to the float32 sums.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from bitdial.kernels.layouts import TILE_COLUMNS, TILE_ROWS, extracts, merges, read_fields
from bitdial.kernels.triton_words import slot_numbers, whole_codes

DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


class FewSettings(NamedTuple):
    """How the kernel for few tokens is cut: found by trying, never needed for a right result."""

    row_tiles: int = 1
    warps: int = 8
    splits: int = 1
    stages: int = 1
    registers: int | None = None


@triton.jit
def _few(  # type: ignore[no-untyped-def]
    x_ptr,
    words_ptr,
    scale_ptr,
    bias_ptr,
    y_ptr,
    tokens,
    rows,
    columns,
    plane_words,
    column_tiles,
    factor,
    PIECES: tl.constexpr,
    RANGES: tl.constexpr,
    STEPS: tl.constexpr,
    PLANES: tl.constexpr,
    TOKEN_TILES: tl.constexpr,
    ROW_TILES: tl.constexpr,
    WARPS: tl.constexpr,
    SPLITS: tl.constexpr,
    AHEAD: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    EVEN: tl.constexpr,
    DTYPE: tl.constexpr,
):
    # Tensors are shaped so that what one warp works on lies along one dimension (WARPS), and what one thread has of it
    # along the first and last: then the reshapes and permutations below move nothing.
    split = tl.program_id(1)
    row_tile = tl.program_id(0) * ROW_TILES + tl.arange(0, ROW_TILES)
    warp = tl.arange(0, WARPS)
    at = tl.arange(0, 128)
    live_rows = row_tile * 16 < rows
    tile_start = (row_tile.to(tl.int64) * column_tiles)[:, None, None] * 128 + at[None, None, :]
    token = tl.arange(0, TOKEN_TILES)[:, None] * 8 + tl.arange(0, 8)[None, :]
    inside = tl.arange(0, 32)
    x_start = token[:, None, :, None] * columns + inside[None, None, None, :]
    live_tokens = (token < tokens)[:, None, :, None]
    total = tl.zeros((WARPS, ROW_TILES * 16, TOKEN_TILES * 8), dtype=tl.float32)
    other = tl.zeros((WARPS, ROW_TILES * 16, TOKEN_TILES * 8), dtype=tl.float32)  # two chains of sums wait half as long

    per_split = tl.cdiv(tl.cdiv(column_tiles, WARPS), SPLITS)
    first = split * per_split
    end = tl.minimum(first + per_split, tl.cdiv(column_tiles, WARPS))
    words = _words(words_ptr, tile_start, first * WARPS + warp, live_rows, plane_words, column_tiles, PLANES)
    for step in range(first, end):
        tile = step * WARPS + warp
        ahead = words
        if AHEAD:
            ahead = _words(words_ptr, tile_start, tile + WARPS, live_rows, plane_words, column_tiles, PLANES)
        cells = whole_codes(words, PIECES, RANGES)
        for two in tl.static_range(8):
            column = tile * 256 + two * 32
            x_live = live_tokens & (tile < column_tiles)[None, :, None, None]
            if not EVEN:
                x_live = x_live & ((column[None, :, None, None] + inside[None, None, None, :]) < columns)
            x = tl.load(x_ptr + x_start + column[None, :, None, None], mask=x_live, other=0.0)
            x = tl.reshape(x, (TOKEN_TILES, WARPS, 8, 4, 2, 2, 2))  # tokens / 8, warp, token % 8, q, slot, c, e
            even, odd = tl.split(tl.permute(x, (0, 1, 2, 3, 5, 6, 4)))
            total = _product(cells, even, total, two * 2, STEPS, TOKEN_TILES, ROW_TILES, WARPS, DTYPE)
            other = _product(cells, odd, other, two * 2 + 1, STEPS, TOKEN_TILES, ROW_TILES, WARPS, DTYPE)
        if AHEAD:
            words = ahead
        else:
            words = _words(words_ptr, tile_start, tile + WARPS, live_rows, plane_words, column_tiles, PLANES)

    row = tl.program_id(0) * ROW_TILES * 16 + tl.arange(0, ROW_TILES * 16)
    token_out = tl.arange(0, TOKEN_TILES * 8)
    sums = tl.sum(total + other, axis=0)
    live_out = (row < rows)[:, None] & (token_out < tokens)[None, :]
    if SPLITS == 1:
        sums = sums * (tl.load(scale_ptr + row, mask=row < rows, other=0.0) * factor)[:, None]
        if HAS_BIAS:
            sums += tl.load(bias_ptr + row, mask=row < rows, other=0.0).to(tl.float32)[:, None]
    place = (split * tokens + token_out)[None, :] * rows + row[:, None]
    tl.store(y_ptr + place, sums.to(y_ptr.dtype.element_ty), mask=live_out)


@triton.jit
def _words(words_ptr, start, tile, live_rows, plane_words, column_tiles, PLANES: tl.constexpr):  # type: ignore[no-untyped-def]
    """The words of one tile for each warp: a tuple of PLANES tensors (row tiles, warps, 128)."""
    live = live_rows[:, None, None] & (tile < column_tiles)[None, :, None]
    at = words_ptr + (start + tile[None, :, None] * 128)
    words = ()
    for plane in tl.static_range(PLANES):
        loaded = tl.load(at + plane * plane_words.to(tl.int64), mask=live, other=0, eviction_policy="evict_first")
        words = words + (loaded,)
    return words


@triton.jit
def _product(  # type: ignore[no-untyped-def]
    cells,
    x,
    total,
    SLOT: tl.constexpr,
    STEPS: tl.constexpr,
    TOKEN_TILES: tl.constexpr,
    ROW_TILES: tl.constexpr,
    WARPS: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """`total` plus the product of one slot's weights with its tokens."""
    weight = slot_numbers(cells, SLOT, STEPS, DTYPE)
    weight = tl.reshape(weight, (ROW_TILES, WARPS, 8, 4, 2, 2, 2))  # row tile, warp, row % 8, q, c, row // 8, e
    weight = tl.reshape(tl.permute(weight, (1, 0, 5, 2, 3, 4, 6)), (WARPS, ROW_TILES * 16, 16))
    x = tl.reshape(tl.permute(x, (1, 3, 4, 5, 0, 2)), (WARPS, 16, TOKEN_TILES * 8))
    return tl.dot(weight, x, total)
