"""Linear layers on packed weights: a kernel for up to 16 tokens, which is to read at the speed of memory.

The weight is the left operand of the tensor cores, 16 rows at a time; the tokens, padded to 8 or 16, the right one. A
program takes `16 * row_tiles` rows; its warps divide the columns among them and add up at the end. Packed words come
from memory in the order in which a thread needs them (see `word_layout`), 16 bytes a load. Where there are too few rows
to fill the GPU, `splits` programs share the columns; they leave float32 sums that a second kernel adds in order, so
results repeat from run to run. More tokens are left to `unpack`.

Weights enter the product as c + offset, exactly; the scale is applied to the float32 sums, and the scales of groups of
inputs while they are summed: see `groups`.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from bitdial.kernels.triton.packed import unpack as triton_unpack
from bitdial.kernels.triton.packed.few_settings import FewSettings, few_settings, with_room_for_groups
from bitdial.kernels.triton.packed.groups import Scales, grouping, load_scales, spread_scale, sums_scale, token_sums
from bitdial.kernels.triton.packed.words import followed_by, product, slot_numbers, whole_codes
from bitdial.kernels.word_layout import TILE_COLUMNS, extracts, merges, read_fields

DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit(do_not_specialize=["tokens", "column_tiles"])
def _few(  # type: ignore[no-untyped-def]
    x_ptr,
    words_ptr,
    scale_ptr,
    group_ptr,
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
    GROUPING: tl.constexpr,
    DTYPE: tl.constexpr,
):
    # What is loaded has two dimensions: the last lies in one piece in memory, and the first runs over what the threads
    # of a warp share, then the warps, then what one thread has in turn. Triton hands out 16 bytes a thread in that very
    # order, and the reshapes and permutations below move nothing.
    RUNS: tl.constexpr = GROUPING[0]
    SPREAD: tl.constexpr = GROUPING[1]
    PAIRS: tl.constexpr = 8 if RUNS == 0 else 8 // RUNS  # of slots that are summed before they are scaled
    split = tl.program_id(1)
    lead = tl.arange(0, ROW_TILES * WARPS)
    row_tile = tl.program_id(0) * ROW_TILES + lead // WARPS
    live_rows = row_tile * 16 < rows
    word_start = (row_tile.to(tl.int64) * column_tiles)[:, None] * 128 + tl.arange(0, 128)[None, :]
    x_lead = tl.arange(0, TOKEN_TILES * WARPS * 8)
    token = x_lead // (WARPS * 8) * 8 + x_lead % 8
    x_warp = x_lead // 8 % WARPS
    inside = tl.arange(0, 32)
    x_start = (token * columns)[:, None] + inside[None, :]
    SUMS: tl.constexpr = 4 if SPREAD else TOKEN_TILES * 8
    total = tl.zeros((WARPS, ROW_TILES * 16, SUMS), dtype=tl.float32)
    other = tl.zeros((WARPS, ROW_TILES * 16, SUMS), dtype=tl.float32)  # two chains wait half as long

    per_split = tl.cdiv(tl.cdiv(column_tiles, WARPS), SPLITS)
    first = split * per_split
    end = tl.minimum(first + per_split, tl.cdiv(column_tiles, WARPS))
    tile = first * WARPS + lead % WARPS
    words = _words(words_ptr, word_start, tile, live_rows, plane_words, column_tiles, PLANES)
    next_scales = ()
    if RUNS > 0:
        next_scales = load_scales(group_ptr, row_tile, tile, rows, column_tiles, GROUPING)
    for step in range(first, end):
        tile = step * WARPS + lead % WARPS
        if not AHEAD:
            words = _words(words_ptr, word_start, tile, live_rows, plane_words, column_tiles, PLANES)
        cells = whole_codes(words, PIECES, RANGES)
        if AHEAD:
            words = _words(words_ptr, word_start, tile + WARPS, live_rows, plane_words, column_tiles, PLANES)
        scales = next_scales
        if RUNS > 0:
            next_scales = load_scales(group_ptr, row_tile, tile + WARPS, rows, column_tiles, GROUPING)
        x_tile = step * WARPS + x_warp
        if SPREAD:
            slots = _spread_slots(x_ptr, step * WARPS, columns, column_tiles, WARPS, EVEN, GROUPING)
            total, other = _add_spread(total, other, cells, slots, scales, STEPS, ROW_TILES, WARPS, GROUPING, DTYPE)
        else:
            for two in tl.static_range(8):
                column = (x_tile * 256 + two * 32)[:, None]
                x_live = ((token < tokens) & (x_tile < column_tiles))[:, None]
                if not EVEN:
                    x_live = x_live & (column + inside[None, :] < columns)
                x = tl.load(x_ptr + x_start + column, mask=x_live, other=0.0)
                even, odd = _slots(x, TOKEN_TILES, WARPS)
                if RUNS > 0:
                    if two % PAIRS == 0:
                        sums = tl.zeros_like(total)
                    sums = _slot_product(cells, even, sums, two * 2, STEPS, TOKEN_TILES, ROW_TILES, WARPS, DTYPE)
                    sums = _slot_product(cells, odd, sums, two * 2 + 1, STEPS, TOKEN_TILES, ROW_TILES, WARPS, DTYPE)
                    if (two + 1) % PAIRS == 0:
                        total += sums * sums_scale(scales, two // PAIRS, GROUPING, TOKEN_TILES, ROW_TILES, WARPS)
                else:
                    total = _slot_product(cells, even, total, two * 2, STEPS, TOKEN_TILES, ROW_TILES, WARPS, DTYPE)
                    other = _slot_product(cells, odd, other, two * 2 + 1, STEPS, TOKEN_TILES, ROW_TILES, WARPS, DTYPE)

    row = tl.program_id(0) * ROW_TILES * 16 + tl.arange(0, ROW_TILES * 16)
    token_out = tl.arange(0, TOKEN_TILES * 8)
    sums = tl.sum(total + other, axis=0)
    if SPREAD:
        sums = token_sums(sums, GROUPING) + tl.zeros((1, TOKEN_TILES * 8), dtype=tl.float32)
    live_out = (row < rows)[:, None] & (token_out < tokens)[None, :]
    if SPLITS == 1:
        sums = sums * (tl.load(scale_ptr + row, mask=row < rows, other=0.0) * factor)[:, None]
        if HAS_BIAS:
            sums += tl.load(bias_ptr + row, mask=row < rows, other=0.0).to(tl.float32)[:, None]
    place = (split * tokens + token_out)[None, :] * rows + row[:, None]
    tl.store(y_ptr + place, sums.to(y_ptr.dtype.element_ty), mask=live_out)


@triton.jit
def _words(words_ptr, start, tile, live_rows, plane_words, column_tiles, PLANES: tl.constexpr):  # type: ignore[no-untyped-def]
    """The words of one tile of each row for each warp: a tuple of PLANES tensors (row tiles * warps, 128)."""
    live = (live_rows & (tile < column_tiles))[:, None]
    at = words_ptr + (start + tile[:, None] * 128)
    words = ()
    for plane in tl.static_range(PLANES):
        loaded = tl.load(at + plane * plane_words.to(tl.int64), mask=live, other=0, eviction_policy="evict_first")
        words = followed_by(words, loaded)
    return words


@triton.jit
def _slots(x, TOKEN_TILES: tl.constexpr, WARPS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Numbers of 32 columns as those of their two slots."""
    x = tl.reshape(x, (TOKEN_TILES, WARPS, 8, 4, 2, 2, 2))  # token // 8, warp, token % 8, q, slot, c, e
    return tl.split(tl.permute(x, (0, 1, 2, 3, 5, 6, 4)))


@triton.jit
def _slot_product(  # type: ignore[no-untyped-def]
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
    return product(weight, x, total)


@triton.jit
def _spread_slots(  # type: ignore[no-untyped-def]
    x_ptr,
    first_tile,
    columns,
    column_tiles,
    WARPS: tl.constexpr,
    EVEN: tl.constexpr,
    GROUPING: tl.constexpr,
):
    """One token's numbers for a tile of each warp, those of run i in columns from i * 8 / RUNS on: a run's slots."""
    RUNS: tl.constexpr = GROUPING[0]
    lead = tl.arange(0, WARPS * 8)
    tile = first_tile + lead // 8
    column = (tile * 256 + lead % 8 * RUNS // 8 * (256 // RUNS))[:, None] + tl.arange(0, 32)[None, :]
    slots = ()
    for two in tl.static_range(8 // RUNS):
        live = (tile < column_tiles)[:, None]
        if not EVEN:
            live = live & (column + two * 32 < columns)
        even, odd = _slots(tl.load(x_ptr + column + two * 32, mask=live, other=0.0), 1, WARPS)
        slots = followed_by(followed_by(slots, even), odd)
    return slots


@triton.jit
def _add_spread(  # type: ignore[no-untyped-def]
    total,
    other,
    cells,
    slots,
    scales,
    STEPS: tl.constexpr,
    ROW_TILES: tl.constexpr,
    WARPS: tl.constexpr,
    GROUPING: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """`total` and `other` (warps, rows, 4) plus a tile's sums times their scales: what each thread keeps of them."""
    RUNS: tl.constexpr = GROUPING[0]
    EACH: tl.constexpr = GROUPING[2]
    PARTS: tl.constexpr = RUNS // EACH  # of a row, one to a thread
    part = tl.arange(0, 4)[None, None, :] * PARTS // 4
    found, found_odd = tl.zeros_like(total), tl.zeros_like(total)
    for run in tl.static_range(RUNS):
        sums = _run_sums(cells, slots, run, STEPS, ROW_TILES, WARPS, GROUPING, DTYPE)
        even, odd = tl.split(tl.reshape(sums, (WARPS, ROW_TILES * 16, 4, 2)))
        if run % EACH == 0:
            found = even if run == 0 else tl.where(part == run // EACH, even, found)
        else:
            found_odd = odd if run == 1 else tl.where(part == run // EACH, odd, found_odd)
    total += found * spread_scale(scales, 0, GROUPING, ROW_TILES, WARPS)
    if EACH == 2:
        other += found_odd * spread_scale(scales, 1, GROUPING, ROW_TILES, WARPS)
    return total, other


@triton.jit
def _run_sums(  # type: ignore[no-untyped-def]
    cells,
    slots,
    RUN: tl.constexpr,
    STEPS: tl.constexpr,
    ROW_TILES: tl.constexpr,
    WARPS: tl.constexpr,
    GROUPING: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """The sums (warps, rows, 8) of one run's weights with what `_spread_slots` returns; the run's own columns count."""
    SLOTS: tl.constexpr = 16 // GROUPING[0]
    sums = tl.zeros((WARPS, ROW_TILES * 16, 8), dtype=tl.float32)
    more = tl.zeros((WARPS, ROW_TILES * 16, 8), dtype=tl.float32)
    for i in tl.static_range(SLOTS):
        if GROUPING[1] > 1 and i % 2 == 1:
            more = _slot_product(cells, slots[i], more, RUN * SLOTS + i, STEPS, 1, ROW_TILES, WARPS, DTYPE)
        else:
            sums = _slot_product(cells, slots[i], sums, RUN * SLOTS + i, STEPS, 1, ROW_TILES, WARPS, DTYPE)
    return sums + more if GROUPING[1] > 1 else sums


@triton.jit
def _add_splits(  # type: ignore[no-untyped-def]
    parts_ptr, scale_ptr, bias_ptr, y_ptr, rows, count, factor,
    SPLITS: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """y = the sum of the parts, first to last, times the scale, plus the bias."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = at < count
    sums = tl.load(parts_ptr + at, mask=live, other=0.0)
    for split in tl.static_range(1, SPLITS):
        sums += tl.load(parts_ptr + split * count + at, mask=live, other=0.0)
    sums = sums * (tl.load(scale_ptr + at % rows, mask=live, other=0.0) * factor)
    if HAS_BIAS:
        sums += tl.load(bias_ptr + at % rows, mask=live, other=0.0).to(tl.float32)
    tl.store(y_ptr + at, sums.to(y_ptr.dtype.element_ty), mask=live)


# --- launching ----------------------------------------------------------------------------------

FEW_TOKENS = 16
_SPLIT_BLOCK = 512


class Reading(NamedTuple):
    """How packed words are read: `fields` that hold the first `bits` of `high` bits, and what is added to a code."""

    fields: tuple[int, ...]
    bits: int
    high: int
    offset: float


def linear(
    x: Tensor,
    words: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    reading: Reading,
    *,
    group_scale: Tensor | None = None,
    settings: FewSettings | None = None,
) -> Tensor:
    """x (tokens, columns) times the packed weight's `bits`-bit values (rows, columns): (tokens, rows) in x's type.

    `scale` and `group_scale` as `packed_ops.packed_linear` takes them. `settings` are for up to 16 tokens; more have
    none.
    """
    tokens, rows, bits = len(x), len(scale), reading.bits
    y = torch.empty((tokens, rows), dtype=x.dtype, device=x.device)
    if y.numel() == 0:
        return y
    x = x.contiguous()
    read = merges(read_fields(reading.fields, bits))
    steps = tuple(tuple(step) for step in extracts(bits, read.cell, x.dtype, reading.offset))
    constants = {
        "PIECES": read.pieces, "RANGES": read.ranges, "STEPS": steps, "PLANES": bits, "DTYPE": DTYPES[x.dtype]
    }  # fmt: skip
    if group_scale is not None and group_scale.data_ptr() % 8:
        group_scale = group_scale.clone()  # it is read 8 bytes at a time
    scales = Scales(scale, group_scale, 2.0 ** (reading.high - bits))
    if tokens > FEW_TOKENS:
        triton_unpack.many(x, words, scales, bias, y, constants)
        return y
    if settings is None:
        settings = with_room_for_groups(few_settings(tokens, rows, x.shape[1], bits), tokens, bits, group_scale)
    _few_tokens(x, words, scales, bias, y, constants, settings)
    return y


def _few_tokens(
    x: Tensor,
    words: Tensor,
    scales: Scales,
    bias: Tensor | None,
    y: Tensor,
    constants: dict[str, Any],
    settings: FewSettings,
) -> None:
    """Write into y (tokens, rows) what `linear` returns, for up to 16 tokens."""
    (tokens, columns), rows, splits = x.shape, y.shape[1], settings.splits
    _, row_tiles, column_tiles, _ = words.shape
    sizes = tokens, rows, columns, words.stride(0), column_tiles, scales.factor
    grouped = grouping(scales.group, spread=settings.spread if tokens == 1 else 0)
    out = y if splits == 1 else torch.empty((splits, tokens, rows), dtype=torch.float32, device=x.device)
    some_bias = scales.row if bias is None else bias
    limit = {} if settings.registers is None else {"maxnreg": settings.registers}
    _few[(triton.cdiv(row_tiles, settings.row_tiles), splits)](
        x, words, scales.row, scales.group, some_bias, out, *sizes, **constants, HAS_BIAS=bias is not None,
        EVEN=columns % TILE_COLUMNS == 0, GROUPING=tuple(grouped), TOKEN_TILES=1 if tokens <= 8 else 2,
        ROW_TILES=settings.row_tiles, WARPS=settings.warps, SPLITS=splits, AHEAD=settings.ahead,
        num_warps=settings.warps, num_stages=settings.stages, **limit,
    )  # fmt: skip
    if splits > 1:
        _add_splits[(triton.cdiv(y.numel(), _SPLIT_BLOCK),)](
            out, scales.row, some_bias, y, rows, y.numel(), scales.factor, SPLITS=splits, HAS_BIAS=bias is not None,
            BLOCK=_SPLIT_BLOCK,
        )  # fmt: skip
