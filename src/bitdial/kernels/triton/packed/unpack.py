"""Linear layers on packed weights for many tokens: the weight as 16-bit numbers, then the library's product.

Rows are taken in chunks. For each chunk

    1. a kernel reads its packed words once and writes c + offset, exactly, as a matrix of x's type;
    2. the library multiplies x by it, with float32 sums;
    3. a kernel multiplies the sums by the scale, adds the bias and writes the chunk's columns of y.

The matrix is the same memory for all chunks and has at most `CHUNK_WEIGHTS` numbers, 32 MB, which a GPU's L2 cache can
hold (that of an H200 has 50). It has whole tiles: what lies after the last row and column is written and never read.
There are at most as many sums at a time, so that a call needs no more than 96 MB beside its result.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from bitdial.kernels.triton.packed.words import followed_by, slot_numbers, whole_codes
from bitdial.kernels.word_layout import TILE_COLUMNS, TILE_ROWS

CHUNK_WEIGHTS = 1 << 24
_WARPS = 4
_TOKENS, _ROWS = 8, 256  # of a program that writes y: a warp has 16 bytes a thread of one token


@triton.jit(do_not_specialize=["column_tiles"])
def _unpack(  # type: ignore[no-untyped-def]
    words_ptr,
    matrix_ptr,
    plane_words,
    column_tiles,
    PIECES: tl.constexpr,
    RANGES: tl.constexpr,
    STEPS: tl.constexpr,
    PLANES: tl.constexpr,
    WARPS: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """The numbers of WARPS tiles of 16 rows, side by side, a warp each.

    A thread's 16 bytes of words are 8 numbers in a row for each of two rows and each pair of slots, so it stores 16
    bytes at a time too; as in the kernel for few tokens, reshapes and permutations move nothing between threads.
    """
    row_tile = tl.program_id(0)
    tile = tl.program_id(1) * WARPS + tl.arange(0, WARPS)
    start = (row_tile.to(tl.int64) * column_tiles + tile)[:, None] * 128 + tl.arange(0, 128)[None, :]
    live = (tile < column_tiles)[:, None]
    words = ()
    for plane in tl.static_range(PLANES):
        at = words_ptr + plane * plane_words.to(tl.int64) + start
        words = followed_by(words, tl.load(at, mask=live, other=0, eviction_policy="evict_first"))
    cells = whole_codes(words, PIECES, RANGES)

    lead = tl.arange(0, 2 * WARPS * 8)  # row // 8, warp, row % 8
    row = row_tile * 16 + lead // (WARPS * 8) * 8 + lead % 8
    out_tile = tl.program_id(1) * WARPS + lead // 8 % WARPS
    out_start = (row.to(tl.int64) * column_tiles + out_tile)[:, None] * 256 + tl.arange(0, 32)[None, :]
    out_live = (out_tile < column_tiles)[:, None]
    for two in tl.static_range(8):
        pair = tl.join(slot_numbers(cells, two * 2, STEPS, DTYPE), slot_numbers(cells, two * 2 + 1, STEPS, DTYPE))
        pair = tl.reshape(pair, (WARPS, 8, 4, 2, 2, 2, 2))  # warp, row % 8, q, c, row // 8, e, slot
        pair = tl.reshape(tl.permute(pair, (4, 0, 1, 2, 6, 3, 5)), (2 * WARPS * 8, 32))
        tl.store(matrix_ptr + out_start + two * 32, pair, mask=out_live)


@triton.jit(do_not_specialize=["tokens"])
def _scale_sums(  # type: ignore[no-untyped-def]
    sums_ptr, scale_ptr, bias_ptr, y_ptr, tokens, rows, all_rows, factor,
    HAS_BIAS: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """y (tokens, rows of all_rows) = the sums (tokens, rows) times the scale, plus the bias."""
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS).to(tl.int64)[:, None]
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)[None, :]
    live = (token < tokens) & (row < rows)
    same = row + tl.zeros((TOKENS, 1), dtype=tl.int32)  # of two dimensions, so that no scale moves between threads
    y = tl.load(sums_ptr + token * rows + row, mask=live, other=0.0)
    y = y * (tl.load(scale_ptr + same, mask=live, other=0.0) * factor)
    if HAS_BIAS:
        y += tl.load(bias_ptr + same, mask=live, other=0.0).to(tl.float32)
    tl.store(y_ptr + token * all_rows + row, y.to(y_ptr.dtype.element_ty), mask=live)


def chunk_rows(rows: int, columns: int) -> int:
    """The rows of a chunk: a power of two, or all rows in whole tiles if these are fewer.

    A power of two divides into the blocks of a product without a rest: with 2,048 tokens and 128 x 128 outputs a block,
    1,024 rows are 128 blocks for the 132 multiprocessors of an H200; 1,152 would be 144, a second round for 12 of them.
    """
    most = max(CHUNK_WEIGHTS // columns, TILE_ROWS)
    return min(1 << (most.bit_length() - 1), triton.cdiv(rows, TILE_ROWS) * TILE_ROWS)


def many(
    x: Tensor, words: Tensor, scale: Tensor, bias: Tensor | None, y: Tensor, factor: float, unpacking: dict[str, Any]
) -> None:
    """Write into y (tokens, rows) what `triton_linear.linear` returns; `unpacking`: constants of `_unpack`."""
    (tokens, columns), rows = x.shape, y.shape[1]
    _, row_tiles, column_tiles, tile_words = words.shape
    chunk = chunk_rows(rows, column_tiles * TILE_COLUMNS)
    step = CHUNK_WEIGHTS // chunk
    matrix = torch.empty((chunk, column_tiles * TILE_COLUMNS), dtype=x.dtype, device=x.device)
    for first in range(0, rows, chunk):
        last = min(first + chunk, rows)
        tiles = triton.cdiv(last - first, TILE_ROWS)
        _unpack[(tiles, triton.cdiv(column_tiles, _WARPS))](
            words[:, first // TILE_ROWS :], matrix, row_tiles * column_tiles * tile_words, column_tiles, **unpacking,
            WARPS=_WARPS, num_warps=_WARPS,
        )  # fmt: skip
        weight = matrix[: last - first, :columns]
        for token in range(0, tokens, step):
            some = x[token : token + step]
            _scale_sums[(triton.cdiv(len(some), _TOKENS), triton.cdiv(last - first, _ROWS))](
                _product(some, weight), scale[first:], scale if bias is None else bias[first:], y[token:, first:],
                len(some), last - first, rows, factor, HAS_BIAS=bias is not None, TOKENS=_TOKENS, ROWS=_ROWS,
            )  # fmt: skip


def _product(x: Tensor, weight: Tensor) -> Tensor:
    """x @ weight.T in float32 sums, float32 (tokens, rows)."""
    if x.is_cuda:
        # Parts of a split product are added in the type of the output or of the sums, and both are float32: torch's
        # setting allow_bf16_reduced_precision_reduction is for outputs in bf16.
        return torch.mm(x, weight.t(), out_dtype=torch.float32)
    return torch.mm(x.float(), weight.float().t())
