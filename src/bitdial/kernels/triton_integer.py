"""Triton kernels of layers on integer codes: convolutions (a linear layer is one of 1x1), and what follows a layer.

Everything is channels last. A convolution is a matrix product whose left rows are gathered while it runs: for each tap
of the filter, a tile of (pixels, input channels) against a tile of (input channels, output channels), int8 tensor
cores, int32 sums. Pixels outside the image are read from `pad`, which holds the code of the value 0 over and over, so
no load has a mask where the channels fill their tiles, and all of them are 16 bytes wide where there are 16 channels.
(It holds it so often because all programs read there: one line of memory would be a bottleneck.) Where there are fewer
channels, as in an image, a whole row of the filter is one tap: its pixels lie in one piece.

Codes are stored as int8: those of an unsigned kind less 128. With x the stored code and pad the stored code of 0, a
layer sums (x - pad) * w = x * w - pad * w, the second part of which is `correction`, a number for each output channel.
Weights that are 2 * w + 1 and do not fit int8 (centred codes of 8 bits) take 2 * sum(x * w) + sum(x). Whether they do
is a number in memory, `halves`, which the kernel reads: a recorded graph follows the dial. It chooses between two
loops, so that other widths do not pay for it; where there is no such number, there is one loop.

What follows the sums is in `triton_finish`.
"""

import triton
import triton.language as tl
from torch import Tensor

from bitdial.kernels.integer_sums import PAD_CODES
from bitdial.kernels.integer_tiles import FEW_CHANNELS as FEW
from bitdial.kernels.integer_tiles import Geometry, Tiles, default_depthwise_tiles, default_tiles
from bitdial.kernels.triton_finish import Finish, _finish_tile, _quantizer, ending, finish_operands, outputs_for

FEW_CHANNELS = tl.constexpr(FEW)
PAD_LINE = tl.constexpr(128)  # bytes that one pixel's padding is read from; as many channels are in a tile at most
PAD_LINES = tl.constexpr(PAD_CODES // 128)


@triton.jit
def _weights(w_ptr, at, used, EVEN: tl.constexpr):  # type: ignore[no-untyped-def]
    """A tile of int8 weights; the one place that knows how they are stored."""
    if EVEN:
        return tl.load(w_ptr + at)
    else:
        return tl.load(w_ptr + at, mask=used, other=0)


@triton.jit
def _halves(tile):  # type: ignore[no-untyped-def]
    """The left and the right half of a tile's columns."""
    return tl.split(tl.permute(tl.reshape(tile, (tile.shape[0], 2, tile.shape[1] // 2)), (0, 2, 1)))


@triton.jit
def _operands(  # type: ignore[no-untyped-def]
    step,
    x_ptr,
    w_ptr,
    pad_ptr,
    window,
    top,
    left,
    outside,
    filter_at,
    H: tl.constexpr,
    W: tl.constexpr,
    C: tl.constexpr,
    DILATION_H: tl.constexpr,
    DILATION_W: tl.constexpr,
    PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    RUN: tl.constexpr,
    TAPS: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """What one step multiplies: codes (pixels, BLOCK_C) of the windows that begin at `window`, and weights.

    `outside` is where in `pad` a pixel finds what lies outside the image.
    """
    CHUNKS: tl.constexpr = (RUN + BLOCK_C - 1) // BLOCK_C
    EVEN: tl.constexpr = RUN % BLOCK_C == 0
    tap = step // CHUNKS
    c = step % CHUNKS * BLOCK_C + tl.arange(0, BLOCK_C)
    down, along = tap // TAPS * DILATION_H, tap % TAPS * DILATION_W
    at = x_ptr + (window + (down * W + along) * C)[:, None] + c[None, :]
    if PADDED:
        row, column = top + down, left + along
        inside = ((row >= 0) & (row < H))[:, None]
        if ROWS:
            places = (column * C)[:, None] + c[None, :]
            inside = inside & (places >= 0) & (places < W * C)
        else:
            inside = inside & ((column >= 0) & (column < W))[:, None]
        at = tl.where(inside, at, pad_ptr + outside[:, None] + tl.arange(0, BLOCK_C)[None, :])
    if EVEN:
        x = tl.load(at)
    else:
        x = tl.load(at, mask=(c < RUN)[None, :], other=0)
    return x, _weights(w_ptr, (filter_at + tap * RUN)[None, :] + c[:, None], (c < RUN)[:, None], EVEN)


@triton.jit
def _finish_sums(  # type: ignore[no-untyped-def]
    sums,
    p,
    live,
    group,
    start,
    ends,
    first,
    second,
    outs,
    K: tl.constexpr,
    KG: tl.constexpr,
    CAP: tl.constexpr,
    LIMIT: tl.constexpr,
):
    """What follows the sums of the pixels p and of the group's output channels from `start` on."""
    correction_ptr, factor_ptr, bias_ptr, norm_ptr, other_ptr = ends
    value_ptr, codes_ptr, more_ptr = outs
    k = start + tl.arange(0, sums.shape[1])[None, :]
    channel = group * KG + k
    used = k < KG
    sums += tl.load(correction_ptr + channel, mask=used, other=0)
    y = sums.to(tl.float32) * tl.load(factor_ptr + channel, mask=used, other=0.0)
    if bias_ptr is not None:
        y = y + tl.load(bias_ptr + channel, mask=used, other=0.0)
    _finish_tile(
        y, p[:, None] * K + channel, channel, live[:, None] & used, norm_ptr, other_ptr, first, second,
        value_ptr, codes_ptr, more_ptr, K, CAP, LIMIT,
    )  # fmt: skip


@triton.jit
def _convolve(  # type: ignore[no-untyped-def]
    x_ptr,
    w_ptr,
    pad_ptr,
    correction_ptr,
    factor_ptr,
    halves_ptr,
    bias_ptr,
    norm_ptr,
    other_ptr,
    first_ptr,
    second_ptr,
    value_ptr,
    codes_ptr,
    more_ptr,
    pixels,
    H: tl.constexpr,
    W: tl.constexpr,
    C: tl.constexpr,
    OH: tl.constexpr,
    OW: tl.constexpr,
    K: tl.constexpr,
    R: tl.constexpr,
    S: tl.constexpr,
    STRIDE_H: tl.constexpr,
    STRIDE_W: tl.constexpr,
    PAD_H: tl.constexpr,
    PAD_W: tl.constexpr,
    DILATION_H: tl.constexpr,
    DILATION_W: tl.constexpr,
    GROUPS: tl.constexpr,
    CAP: tl.constexpr,
    LIMIT: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SLICES: tl.constexpr,
):
    CG: tl.constexpr = C // GROUPS
    KG: tl.constexpr = K // GROUPS
    # What lies in one piece at a tap: the group's channels; or, where these are few, those of a row of the filter.
    ROWS: tl.constexpr = CG < FEW_CHANNELS and GROUPS == 1 and DILATION_W == 1
    RUN: tl.constexpr = S * CG if ROWS else CG
    TAPS: tl.constexpr = 1 if ROWS else S
    CHUNKS: tl.constexpr = (RUN + BLOCK_C - 1) // BLOCK_C
    ACROSS: tl.constexpr = (KG + BLOCK_K - 1) // BLOCK_K
    PADDED: tl.constexpr = PAD_H > 0 or PAD_W > 0
    # Neighbours share the pixels and differ in the output channels: the pixels are the larger operand.
    group = tl.program_id(1)
    p = tl.program_id(0) // ACROSS * BLOCK_P + tl.arange(0, BLOCK_P)
    k = tl.program_id(0) % ACROSS * BLOCK_K + tl.arange(0, BLOCK_K)
    live = p < pixels
    q = tl.where(live, p, 0)  # rows that nobody stores compute something that may be read
    filter_at = (group * KG + tl.where(k < KG, k, 0)) * (R * S * CG)
    image = q // (OH * OW)
    top = q // OW % OH * STRIDE_H - PAD_H
    left = q % OW * STRIDE_W - PAD_W
    window = ((image * H + top) * W + left) * C + group * CG  # where the filter's corner lies
    # Neighbours along a row and along a column of the image get different lines: their distance is odd.
    tl.static_assert(BLOCK_C <= PAD_LINE)
    outside = (q + q // OW * (1 + OW % 2)) % PAD_LINES * PAD_LINE
    halves = 0 if halves_ptr is None else tl.load(halves_ptr)
    STEPS: tl.constexpr = R * TAPS * CHUNKS
    places = (x_ptr, w_ptr, pad_ptr, window, top, left, outside, filter_at)
    sums = tl.zeros((BLOCK_P, BLOCK_K), dtype=tl.int32)
    if STEPS == 1:
        # One product, before the branch: with the same one in both, ptxas 12.8 forgot half of its operands in one.
        x, w = _operands(0, *places, H, W, C, DILATION_H, DILATION_W, PADDED, ROWS, RUN, TAPS, BLOCK_C)
        sums = tl.dot(x, w, sums, out_dtype=tl.int32)
        if halves != 0:
            sums = 2 * sums + tl.sum(x.to(tl.int32), axis=1)[:, None]
    elif halves != 0:  # the sums of 2 * w + 1
        ones = tl.full((BLOCK_C, 16), 1, tl.int8)
        totals = tl.zeros((BLOCK_P, 16), dtype=tl.int32)  # 16 times the same: the fewest that tensor cores take
        for step in range(STEPS):
            x, w = _operands(step, *places, H, W, C, DILATION_H, DILATION_W, PADDED, ROWS, RUN, TAPS, BLOCK_C)
            sums = tl.dot(x, w, sums, out_dtype=tl.int32)
            totals = tl.dot(x, ones, totals, out_dtype=tl.int32)
        sums = 2 * sums + tl.max(totals, axis=1)[:, None]
    else:
        for step in range(STEPS):
            x, w = _operands(step, *places, H, W, C, DILATION_H, DILATION_W, PADDED, ROWS, RUN, TAPS, BLOCK_C)
            sums = tl.dot(x, w, sums, out_dtype=tl.int32)
    # The rest goes slice by slice, so that its operands need not all be in registers at once.
    first = first_ptr if first_ptr is None else _quantizer(first_ptr, CAP)
    second = second_ptr if second_ptr is None else _quantizer(second_ptr, CAP)
    ends = (correction_ptr, factor_ptr, bias_ptr, norm_ptr, other_ptr)
    outs = (value_ptr, codes_ptr, more_ptr)
    start = tl.program_id(0) % ACROSS * BLOCK_K
    QUARTER: tl.constexpr = BLOCK_K // 4
    if SLICES == 4:
        left_half, right_half = _halves(sums)
        one, two = _halves(left_half)
        three, four = _halves(right_half)
        _finish_sums(one, p, live, group, start, ends, first, second, outs, K, KG, CAP, LIMIT)
        _finish_sums(two, p, live, group, start + QUARTER, ends, first, second, outs, K, KG, CAP, LIMIT)
        _finish_sums(three, p, live, group, start + 2 * QUARTER, ends, first, second, outs, K, KG, CAP, LIMIT)
        _finish_sums(four, p, live, group, start + 3 * QUARTER, ends, first, second, outs, K, KG, CAP, LIMIT)
    elif SLICES == 2:
        one, two = _halves(sums)
        _finish_sums(one, p, live, group, start, ends, first, second, outs, K, KG, CAP, LIMIT)
        _finish_sums(two, p, live, group, start + 2 * QUARTER, ends, first, second, outs, K, KG, CAP, LIMIT)
    else:
        _finish_sums(sums, p, live, group, start, ends, first, second, outs, K, KG, CAP, LIMIT)


@triton.jit
def _convolve_depthwise(  # type: ignore[no-untyped-def]
    x_ptr,
    w_ptr,
    pad_ptr,
    correction_ptr,
    factor_ptr,
    halves_ptr,
    bias_ptr,
    norm_ptr,
    other_ptr,
    first_ptr,
    second_ptr,
    value_ptr,
    codes_ptr,
    more_ptr,
    pixels,
    H: tl.constexpr,
    W: tl.constexpr,
    C: tl.constexpr,
    OH: tl.constexpr,
    OW: tl.constexpr,
    R: tl.constexpr,
    S: tl.constexpr,
    STRIDE_H: tl.constexpr,
    STRIDE_W: tl.constexpr,
    PAD_H: tl.constexpr,
    PAD_W: tl.constexpr,
    DILATION_H: tl.constexpr,
    DILATION_W: tl.constexpr,
    CAP: tl.constexpr,
    LIMIT: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """A channel of its own for each filter: no matrix product, the cost is that of reading and writing."""
    p = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    used = (c < C)[None, :]
    live = (p < pixels)[:, None] & used
    image = p // (OH * OW)
    top = p // OW % OH * STRIDE_H - PAD_H
    left = p % OW * STRIDE_W - PAD_W
    pad = tl.load(pad_ptr)
    halves = 0 if halves_ptr is None else tl.load(halves_ptr)
    sums = tl.zeros((BLOCK_P, BLOCK_C), dtype=tl.int32)
    for r in tl.static_range(R):
        for s in tl.static_range(S):
            row, column = top + r * DILATION_H, left + s * DILATION_W
            inside = (row >= 0) & (row < H) & (column >= 0) & (column < W)
            at = ((image * H + row) * W + column)[:, None] * C + c[None, :]
            x = tl.load(x_ptr + at, mask=live & inside[:, None], other=pad).to(tl.int32)
            w = _weights(w_ptr, c * (R * S) + (r * S + s), c < C, False).to(tl.int32)
            sums += x * (w * (1 + halves) + halves)[None, :]  # w or 2 * w + 1
    first = first_ptr if first_ptr is None else _quantizer(first_ptr, CAP)
    second = second_ptr if second_ptr is None else _quantizer(second_ptr, CAP)
    ends = (correction_ptr, factor_ptr, bias_ptr, norm_ptr, other_ptr)
    start = tl.program_id(1) * BLOCK_C
    _finish_sums(sums, p, p < pixels, 0, start, ends, first, second, (value_ptr, codes_ptr, more_ptr), C, C, CAP, LIMIT)


def convolve(
    x: Tensor,
    weight: Tensor,
    pad: Tensor,
    correction: Tensor,
    factor: Tensor,
    halves: Tensor | None,
    bias: Tensor | None,
    finish: Finish,
    geometry: Geometry,
    *,
    tiles: Tiles | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Value and codes after a convolution of x (N, C, H, W), channels last, with weight (K, R, S, C / groups)."""
    g = geometry
    pixels = x.shape[0] * g.out_height * g.out_width
    shape = (x.shape[0], g.out_channels, g.out_height, g.out_width)
    outputs = outputs_for(shape, x.device, finish)
    operands = (x, weight, pad, correction, factor, halves, bias, *finish_operands(finish), *outputs, pixels)
    moves = (*g.stride, *g.padding, *g.dilation)
    constants = ending(finish.cap)
    if g.is_depthwise:
        tiles = tiles or default_depthwise_tiles(g)
        _convolve_depthwise[(triton.cdiv(pixels, tiles.pixels), triton.cdiv(g.channels, tiles.outputs))](
            *operands, g.height, g.width, g.channels, g.out_height, g.out_width, g.rows, g.columns, *moves, **constants,
            BLOCK_P=tiles.pixels, BLOCK_C=tiles.outputs, num_warps=tiles.warps, enable_fp_fusion=False,
        )  # fmt: skip
        return outputs
    tiles = tiles or default_tiles(g, pixels)
    across = triton.cdiv(g.out_channels // g.groups, tiles.outputs)
    _convolve[(triton.cdiv(pixels, tiles.pixels) * across, g.groups)](
        *operands, *g[:8], *moves, g.groups, **constants, BLOCK_P=tiles.pixels, BLOCK_C=tiles.inputs,
        BLOCK_K=tiles.outputs, SLICES=tiles.slices, num_warps=tiles.warps, num_stages=tiles.stages,
        enable_fp_fusion=False,
    )  # fmt: skip
    return outputs
