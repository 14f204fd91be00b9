"""Linear layers on packed weights for many tokens: the weight as 16-bit numbers, then the library's product.

Rows are taken in chunks. For each chunk

    1. a kernel reads its packed words once and writes c + offset, exactly, as a matrix of x's type;
    2. the library multiplies x by it, with float32 sums;
    3. a kernel multiplies the sums by the scale, adds the bias and writes the chunk's columns of y.

Where groups of inputs have scales, 2 and 3 are one kernel of ours, slower than the library's product: each group is
summed on its own, and its sums meet their scale in float32.

The matrix is the same memory for all chunks and has at most `CHUNK_WEIGHTS` numbers, 32 MB, which a GPU's L2 cache can
hold (that of an H200 has 50). It has whole tiles: what lies after the last row and column is written and never read.
There are at most as many sums at a time, so that a call needs no more than 96 MB beside its result.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from bitdial.kernels.triton.packed.groups import Scales
from bitdial.kernels.triton.packed.words import followed_by, product, slot_numbers, whole_codes
from bitdial.kernels.word_layout import TILE_COLUMNS, TILE_ROWS

CHUNK_WEIGHTS = 1 << 24
_WARPS = 4
_TOKENS, _ROWS = 8, 256  # of a program that writes y: a warp has 16 bytes a thread of one token
_TILE_TOKENS, _TILE_ROWS = 128, 128  # of a program that multiplies by groups


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


@triton.jit(do_not_specialize=["tokens", "column_tiles"])
def _grouped_product(  # type: ignore[no-untyped-def]
    x_ptr, matrix_ptr, scale_ptr, group_ptr, bias_ptr, y_ptr, tokens, rows, columns, all_rows, column_tiles, factor,
    RUNS: tl.constexpr, HAS_BIAS: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """y (tokens, rows of all_rows) = x @ the matrix (rows, columns) with a scale for each run, plus the bias.

    STEP columns at a time, which divide a run. Rows are the left operand: a thread then has the sums of two of them, or
    a few, and no more scales to load.
    """
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS).to(tl.int64)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    inside = tl.arange(0, STEP)
    x_at = x_ptr + (token * columns)[None, :] + inside[:, None]
    weight_at = matrix_ptr + (row.to(tl.int64) * (column_tiles * 256))[:, None] + inside[None, :]
    # in `pack_scales`' order: row tile, column tile, row % 8, run, row // 8
    group_at = group_ptr + row.to(tl.int64) // 16 * (column_tiles * (16 * RUNS))
    group_at += row % 8 * (2 * RUNS) + row // 8 % 2
    live_tokens, live_rows = (token < tokens)[None, :], (row < rows)[:, None]
    total = tl.zeros((ROWS, TOKENS), dtype=tl.float32)
    for step in range(columns // STEP):
        x = tl.load(x_at + step * STEP, mask=live_tokens, other=0.0)
        weight = tl.load(weight_at + step * STEP, mask=live_rows, other=0.0)
        run = step * STEP // (256 // RUNS)
        at = group_at + (run // RUNS * (16 * RUNS) + run % RUNS * 2)
        scale = tl.load(at, mask=row < rows, other=0).to(tl.float32)
        total += product(weight, x, tl.zeros((ROWS, TOKENS), dtype=tl.float32)) * scale[:, None]
    y = total * (tl.load(scale_ptr + row, mask=row < rows, other=0.0) * factor)[:, None]
    if HAS_BIAS:
        y += tl.load(bias_ptr + row, mask=row < rows, other=0.0).to(tl.float32)[:, None]
    place = (token * all_rows)[None, :] + row[:, None]
    tl.store(y_ptr + place, y.to(y_ptr.dtype.element_ty), mask=live_tokens & live_rows)


def chunk_rows(rows: int, columns: int) -> int:
    """The rows of a chunk: a power of two, or all rows in whole tiles if these are fewer.

    A power of two divides into the blocks of a product without a rest: with 2,048 tokens and 128 x 128 outputs a block,
    1,024 rows are 128 blocks for the 132 multiprocessors of an H200; 1,152 would be 144, a second round for 12 of them.
    """
    most = max(CHUNK_WEIGHTS // columns, TILE_ROWS)
    return min(1 << (most.bit_length() - 1), triton.cdiv(rows, TILE_ROWS) * TILE_ROWS)


def many(x: Tensor, words: Tensor, scales: Scales, bias: Tensor | None, y: Tensor, unpacking: dict[str, Any]) -> None:
    """Write into y (tokens, rows) what `linear.linear` returns; `unpacking`: constants of `_unpack`."""
    columns, rows = x.shape[1], y.shape[1]
    column_tiles = words.shape[2]
    chunk = chunk_rows(rows, column_tiles * TILE_COLUMNS)
    matrix = torch.empty((chunk, column_tiles * TILE_COLUMNS), dtype=x.dtype, device=x.device)
    for first in range(0, rows, chunk):
        last = min(first + chunk, rows)
        tiles = triton.cdiv(last - first, TILE_ROWS)
        _unpack[(tiles, triton.cdiv(column_tiles, _WARPS))](
            words[:, first // TILE_ROWS :], matrix, words.stride(0), column_tiles, **unpacking,
            WARPS=_WARPS, num_warps=_WARPS,
        )  # fmt: skip
        group = None if scales.group is None else scales.group[first // TILE_ROWS :]
        some_scales = Scales(scales.row[first:], group, scales.factor)
        some_bias = None if bias is None else bias[first:]
        if group is None:
            _scaled(x, matrix[: last - first, :columns], some_scales, some_bias, y[:, first:], CHUNK_WEIGHTS // chunk)
        else:
            _scaled_by_group(x, matrix[: last - first], some_scales, some_bias, y[:, first:])


def _scaled(x: Tensor, weight: Tensor, scales: Scales, bias: Tensor | None, y: Tensor, step: int) -> None:
    """Write into the first columns of `y` the product with `weight` (rows, columns), `step` tokens at a time."""
    rows = len(weight)
    for token in range(0, len(x), step):
        some = x[token : token + step]
        _scale_sums[(triton.cdiv(len(some), _TOKENS), triton.cdiv(rows, _ROWS))](
            _product(some, weight), scales.row, scales.row if bias is None else bias, y[token:], len(some), rows,
            y.stride(0), scales.factor, HAS_BIAS=bias is not None, TOKENS=_TOKENS, ROWS=_ROWS,
        )  # fmt: skip


def _scaled_by_group(x: Tensor, matrix: Tensor, scales: Scales, bias: Tensor | None, y: Tensor) -> None:
    """Write into the first columns of `y` the product with `matrix` (rows, whole tiles), a scale for each run."""
    assert scales.group is not None
    (tokens, columns), (rows, whole), runs = x.shape, matrix.shape, scales.group.shape[3]
    some_bias = scales.row if bias is None else bias
    _grouped_product[(triton.cdiv(tokens, _TILE_TOKENS), triton.cdiv(rows, _TILE_ROWS))](
        x, matrix, scales.row, scales.group, some_bias, y, tokens, rows, columns, y.stride(0),
        whole // TILE_COLUMNS, scales.factor, RUNS=runs, HAS_BIAS=bias is not None, TOKENS=_TILE_TOKENS,
        ROWS=_TILE_ROWS, STEP=min(TILE_COLUMNS // runs, 64), num_warps=8, num_stages=3,
    )  # fmt: skip


def _product(x: Tensor, weight: Tensor) -> Tensor:
    """x @ weight.T in float32 sums, float32 (tokens, rows)."""
    if x.is_cuda:
        # Parts of a split product are added in the type of the output or of the sums, and both are float32: torch's
        # setting allow_bf16_reduced_precision_reduction is for outputs in bf16.
        return torch.mm(x, weight.t(), out_dtype=torch.float32)
    return torch.mm(x.float(), weight.float().t())
