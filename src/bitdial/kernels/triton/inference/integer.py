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
loops, or in a layer of one step what follows its product; other widths do not pay for it. Without it nothing is chosen.

What follows the sums is in `triton_finish`.
"""

import triton
import triton.language as tl
from torch import Tensor

from bitdial.kernels.reference.integer_sums import PAD_CODES
from bitdial.kernels.triton.inference.epilogue import (
    Finish,
    _finish_tile,
    _quantizer,
    ending,
    finish_operands,
    outputs_for,
)
from bitdial.kernels.triton.inference.tiles import FEW_CHANNELS as FEW
from bitdial.kernels.triton.inference.tiles import (
    Geometry,
    Tiles,
    default_depthwise_tiles,
    default_tiles,
    most_programs,
    steps_of,
)

FEW_CHANNELS = tl.constexpr(FEW)
PAD_LINE = tl.constexpr(128)  # bytes that one pixel's padding is read from; as many channels are in a tile at most
PAD_LINES = tl.constexpr(PAD_CODES // 128)


@triton.jit
def _windows(  # type: ignore[no-untyped-def]
    p,
    pixels,
    H: tl.constexpr,
    W: tl.constexpr,
    C: tl.constexpr,
    OH: tl.constexpr,
    OW: tl.constexpr,
    STRIDE_H: tl.constexpr,
    STRIDE_W: tl.constexpr,
    PAD_H: tl.constexpr,
    PAD_W: tl.constexpr,
):
    """Where the windows of the output pixels p have their corners: in memory, in the image; and where they find zeros.

    The last is a place in `pad`. Neighbours along a row and along a column get different lines: their distance is odd.
    """
    q = tl.where(p < pixels, p, 0)  # rows that nobody stores compute something that may be read
    top = q // OW % OH * STRIDE_H - PAD_H
    left = q % OW * STRIDE_W - PAD_W
    window = ((q // (OH * OW) * H + top) * W + left) * C
    return window, top, left, (q + q // OW * (1 + OW % 2)) % PAD_LINES * PAD_LINE


@triton.jit
def _codes(  # type: ignore[no-untyped-def]
    step,
    x_ptr,
    pad_ptr,
    windows,
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
    """The codes (pixels, BLOCK_C) that one step multiplies."""
    CHUNKS: tl.constexpr = (RUN + BLOCK_C - 1) // BLOCK_C
    window, top, left, outside = windows
    c = step % CHUNKS * BLOCK_C + tl.arange(0, BLOCK_C)
    down, along = step // CHUNKS // TAPS * DILATION_H, step // CHUNKS % TAPS * DILATION_W
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
    if RUN % BLOCK_C == 0:
        return tl.load(at)
    else:
        return tl.load(at, mask=(c < RUN)[None, :], other=0)


@triton.jit
def _weights(step, filter_ptr, RUN: tl.constexpr, BLOCK_C: tl.constexpr):  # type: ignore[no-untyped-def]
    """The int8 weights (BLOCK_C, output channels) that one step multiplies, of filters that begin at `filter_ptr`."""
    CHUNKS: tl.constexpr = (RUN + BLOCK_C - 1) // BLOCK_C
    c = step % CHUNKS * BLOCK_C + tl.arange(0, BLOCK_C)
    at = (filter_ptr + step // CHUNKS * RUN)[None, :] + c[:, None]
    if RUN % BLOCK_C == 0:
        return tl.load(at)
    else:
        return tl.load(at, mask=(c < RUN)[:, None], other=0)


@triton.jit
def _channel_numbers(lines, channel, used, K: tl.constexpr):  # type: ignore[no-untyped-def]
    """Correction, factor, bias and norm of the channels (1, channels); of what is None, the factor once more."""
    correction_ptr, factor_ptr, bias_ptr, norm_ptr = lines
    factor = tl.load(factor_ptr + channel, mask=used, other=0.0)
    bias, multiplier, offset = factor, factor, factor
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + channel, mask=used, other=0.0)
    if norm_ptr is not None:
        multiplier = tl.load(norm_ptr + channel, mask=used, other=0.0)
        offset = tl.load(norm_ptr + K + channel, mask=used, other=0.0)
    return tl.load(correction_ptr + channel, mask=used, other=0), factor, bias, multiplier, offset


@triton.jit
def _finish_sums(  # type: ignore[no-untyped-def]
    sums,
    p,
    pixels,
    channel,
    used,
    lines,
    numbers,
    other_ptr,
    first,
    second,
    outs,
    K: tl.constexpr,
    CAP: tl.constexpr,
    LIMIT: tl.constexpr,
):
    """What follows the sums (pixels, channels) of the output pixels p, by the `numbers` that `lines` gave."""
    _, _, bias_ptr, norm_ptr = lines
    correction, factor, bias, multiplier, offset = numbers
    value_ptr, codes_ptr, more_ptr = outs
    y = (sums + correction).to(tl.float32) * factor
    if bias_ptr is not None:
        y = y + bias
    _finish_tile(
        y, p[:, None] * K + channel, (p < pixels)[:, None] & used, norm_ptr, multiplier, offset, other_ptr, first,
        second, value_ptr, codes_ptr, more_ptr, CAP, LIMIT,
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
    STAGES: tl.constexpr,
):
    CG: tl.constexpr = C // GROUPS
    KG: tl.constexpr = K // GROUPS
    # What lies in one piece at a tap: the group's channels; or, where these are few, those of a row of the filter.
    ROWS: tl.constexpr = CG < FEW_CHANNELS and GROUPS == 1 and DILATION_W == 1
    RUN: tl.constexpr = S * CG if ROWS else CG
    TAPS: tl.constexpr = 1 if ROWS else S
    STEPS: tl.constexpr = R * TAPS * ((RUN + BLOCK_C - 1) // BLOCK_C)
    ACROSS: tl.constexpr = (KG + BLOCK_K - 1) // BLOCK_K
    PADDED: tl.constexpr = PAD_H > 0 or PAD_W > 0
    tl.static_assert(BLOCK_C <= PAD_LINE or not PADDED)
    # Neighbours share the pixels and differ in the output channels: the pixels are the larger operand.
    group = tl.program_id(1)
    k = tl.program_id(0) % ACROSS * BLOCK_K + tl.arange(0, BLOCK_K)
    filter_ptr = w_ptr + (group * KG + tl.where(k < KG, k, 0)) * (R * S * CG)
    x_ptr += group * CG
    channel, used = (group * KG + k)[None, :], (k < KG)[None, :]
    first = first_ptr if first_ptr is None else _quantizer(first_ptr, CAP)
    second = second_ptr if second_ptr is None else _quantizer(second_ptr, CAP)
    halves = 0 if halves_ptr is None else tl.load(halves_ptr)
    lines = (correction_ptr, factor_ptr, bias_ptr, norm_ptr)
    outs = (value_ptr, codes_ptr, more_ptr)
    if STEPS == 1:
        # Little to multiply: a program keeps its weights and the numbers of their channels and takes tile after tile of
        # pixels, whose codes it fetches ahead. The product stands before the branch: with the same one on both sides,
        # ptxas 12.8 forgot half of its operands on one.
        w = _weights(0, filter_ptr, RUN, BLOCK_C)
        numbers = _channel_numbers(lines, channel, used, K)
        tiles, programs = tl.cdiv(pixels, BLOCK_P), tl.num_programs(0) // ACROSS
        for tile in tl.range(tl.program_id(0) // ACROSS, tiles, programs, num_stages=STAGES):
            p = tile * BLOCK_P + tl.arange(0, BLOCK_P)
            windows = _windows(p, pixels, H, W, C, OH, OW, STRIDE_H, STRIDE_W, PAD_H, PAD_W)
            x = _codes(
                0, x_ptr, pad_ptr, windows, H, W, C, DILATION_H, DILATION_W, PADDED, ROWS, RUN, TAPS, BLOCK_C
            )  # fmt: skip
            sums = tl.dot(x, w, out_dtype=tl.int32)
            if halves != 0:
                sums = 2 * sums + tl.sum(x.to(tl.int32), axis=1)[:, None]
            _finish_sums(
                sums, p, pixels, channel, used, lines, numbers, other_ptr, first, second, outs, K, CAP, LIMIT
            )  # fmt: skip
    else:
        p = tl.program_id(0) // ACROSS * BLOCK_P + tl.arange(0, BLOCK_P)
        windows = _windows(p, pixels, H, W, C, OH, OW, STRIDE_H, STRIDE_W, PAD_H, PAD_W)
        sums = tl.zeros((BLOCK_P, BLOCK_K), dtype=tl.int32)
        if halves != 0:  # the sums of 2 * w + 1
            ones = tl.full((BLOCK_C, 16), 1, tl.int8)
            totals = tl.zeros((BLOCK_P, 16), dtype=tl.int32)  # 16 times the same: the fewest that tensor cores take
            for step in range(STEPS * halves):  # STEPS; as a number that is not known before, see above
                x = _codes(
                    step, x_ptr, pad_ptr, windows, H, W, C, DILATION_H, DILATION_W, PADDED, ROWS, RUN, TAPS, BLOCK_C
                )  # fmt: skip
                sums = tl.dot(x, _weights(step, filter_ptr, RUN, BLOCK_C), sums, out_dtype=tl.int32)
                totals = tl.dot(x, ones, totals, out_dtype=tl.int32)
            sums = 2 * sums + tl.max(totals, axis=1)[:, None]
        else:
            for step in range(STEPS):
                x = _codes(
                    step, x_ptr, pad_ptr, windows, H, W, C, DILATION_H, DILATION_W, PADDED, ROWS, RUN, TAPS, BLOCK_C
                )  # fmt: skip
                sums = tl.dot(x, _weights(step, filter_ptr, RUN, BLOCK_C), sums, out_dtype=tl.int32)
        numbers = _channel_numbers(lines, channel, used, K)
        _finish_sums(sums, p, pixels, channel, used, lines, numbers, other_ptr, first, second, outs, K, CAP, LIMIT)


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
            w = tl.load(w_ptr + c * (R * S) + (r * S + s), mask=c < C, other=0).to(tl.int32)
            sums += x * (w * (1 + halves) + halves)[None, :]  # w or 2 * w + 1
    first = first_ptr if first_ptr is None else _quantizer(first_ptr, CAP)
    second = second_ptr if second_ptr is None else _quantizer(second_ptr, CAP)
    lines, outs = (correction_ptr, factor_ptr, bias_ptr, norm_ptr), (value_ptr, codes_ptr, more_ptr)
    numbers = _channel_numbers(lines, c[None, :], used, C)
    _finish_sums(sums, p, pixels, c[None, :], used, lines, numbers, other_ptr, first, second, outs, C, CAP, LIMIT)


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
    heavy = finish.other is not None or finish.keep
    tiles = tiles or default_tiles(g, pixels, heavy=heavy, centred=halves is not None)
    across = triton.cdiv(g.out_channels // g.groups, tiles.outputs)
    down = triton.cdiv(pixels, tiles.pixels)
    if steps_of(g, tiles.inputs) == 1:
        down = min(down, max(1, most_programs(tiles) // (across * g.groups)))
    _convolve[(down * across, g.groups)](
        *operands, *g[:8], *moves, g.groups, **constants, BLOCK_P=tiles.pixels, BLOCK_C=tiles.inputs,
        BLOCK_K=tiles.outputs, STAGES=tiles.stages, num_warps=tiles.warps, num_stages=tiles.stages,
        enable_fp_fusion=False,
    )  # fmt: skip
    return outputs
