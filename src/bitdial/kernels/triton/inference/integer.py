"""Triton kernels of convolutions of integer codes (a linear layer is one of 1x1), with their epilogues.

Everything is channels last. A convolution is a matrix product whose left rows are gathered while it runs: for each tap
of the filter, a tile of (pixels, input channels) against a tile of (input channels, output channels), int8 tensor
cores, int32 sums. Pixels outside the image are read from `pad`, which holds the code of the value 0 over and over, so
no load has a mask where the channels fill their tiles, and all of them are 16 bytes wide where there are 16 channels.
(It holds it so often because all programs read there: one line of memory would be a bottleneck.) Where there are fewer
channels, as in an image, a whole row of the filter is one tap: its pixels lie in one piece.

Codes are stored as int8: those of an unsigned kind less 128. With x the stored code and pad the stored code of 0, a
layer sums (x - pad) * w = x * w - pad * w, the second part of which is `correction`, a number for each output channel.
Weights that are 2 * w + 1 and do not fit int8 (centred codes of 8 bits) take 2 * sum(x * w) + sum(x). Whether they do
is a number in memory, `doubled`, which the kernel reads: a recorded graph follows the dial. It chooses between two
loops, or in a layer of one step what follows its product; other widths do not pay for it. Without it nothing is chosen.
"""

import triton
import triton.language as tl
from torch import Tensor

from bitdial.kernels.conv_shape import ConvShape
from bitdial.kernels.epilogue import Epilogue
from bitdial.kernels.operands import PAD_CODES, IntegerOperands
from bitdial.kernels.triton.inference.epilogue import (
    _channel_numbers,
    _quantizer,
    _sums_epilogue,
    epilogue_tensors,
    relu_constants,
)
from bitdial.kernels.triton.inference.integer_depthwise import _convolve_depthwise
from bitdial.kernels.triton.inference.tiles import FEW_CHANNELS as FEW
from bitdial.kernels.triton.inference.tiles import default_depthwise_tiles, default_tiles, most_programs, steps_of
from bitdial.kernels.triton.tiles import Tiles

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
def _convolve(  # type: ignore[no-untyped-def]
    x_ptr,
    w_ptr,
    pad_ptr,
    correction_ptr,
    factor_ptr,
    doubled_ptr,
    bias_ptr,
    norm_affine_ptr,
    residual_ptr,
    quantizer_a_ptr,
    quantizer_b_ptr,
    value_ptr,
    codes_a_ptr,
    codes_b_ptr,
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
    RELU: tl.constexpr,
    RELU_MAX: tl.constexpr,
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
    quantizer_a = quantizer_a_ptr if quantizer_a_ptr is None else _quantizer(quantizer_a_ptr, RELU)
    quantizer_b = quantizer_b_ptr if quantizer_b_ptr is None else _quantizer(quantizer_b_ptr, RELU)
    doubled = 0 if doubled_ptr is None else tl.load(doubled_ptr)
    by_channel = (correction_ptr, factor_ptr, bias_ptr, norm_affine_ptr)
    outs = (value_ptr, codes_a_ptr, codes_b_ptr)
    if STEPS == 1:
        # Little to multiply: a program keeps its weights and the numbers of their channels and takes tile after tile of
        # pixels, whose codes it fetches ahead. The product stands before the branch: with the same one on both sides,
        # ptxas 12.8 forgot half of its operands on one.
        w = _weights(0, filter_ptr, RUN, BLOCK_C)
        numbers = _channel_numbers(by_channel, channel, used, K)
        tiles, programs = tl.cdiv(pixels, BLOCK_P), tl.num_programs(0) // ACROSS
        for tile in tl.range(tl.program_id(0) // ACROSS, tiles, programs, num_stages=STAGES):
            p = tile * BLOCK_P + tl.arange(0, BLOCK_P)
            windows = _windows(p, pixels, H, W, C, OH, OW, STRIDE_H, STRIDE_W, PAD_H, PAD_W)
            x = _codes(
                0, x_ptr, pad_ptr, windows, H, W, C, DILATION_H, DILATION_W, PADDED, ROWS, RUN, TAPS, BLOCK_C
            )  # fmt: skip
            sums = tl.dot(x, w, out_dtype=tl.int32)
            if doubled != 0:
                sums = 2 * sums + tl.sum(x.to(tl.int32), axis=1)[:, None]
            _sums_epilogue(
                sums, p, pixels, channel, used, by_channel, numbers, residual_ptr, quantizer_a, quantizer_b, outs, K,
                RELU, RELU_MAX,
            )  # fmt: skip
    else:
        p = tl.program_id(0) // ACROSS * BLOCK_P + tl.arange(0, BLOCK_P)
        windows = _windows(p, pixels, H, W, C, OH, OW, STRIDE_H, STRIDE_W, PAD_H, PAD_W)
        sums = tl.zeros((BLOCK_P, BLOCK_K), dtype=tl.int32)
        if doubled != 0:  # the sums of 2 * w + 1
            ones = tl.full((BLOCK_C, 16), 1, tl.int8)
            totals = tl.zeros((BLOCK_P, 16), dtype=tl.int32)  # 16 times the same: the fewest that tensor cores take
            for step in range(STEPS * doubled):  # STEPS; as a number that is not known before, see above
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
        numbers = _channel_numbers(by_channel, channel, used, K)
        _sums_epilogue(
            sums,
            p,
            pixels,
            channel,
            used,
            by_channel,
            numbers,
            residual_ptr,
            quantizer_a,
            quantizer_b,
            outs,
            K,
            RELU,
            RELU_MAX,
        )  # fmt: skip


def convolve(
    x: Tensor, operands: IntegerOperands, shape: ConvShape, epilogue: Epilogue, *, tiles: Tiles | None = None
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Value and codes after a convolution of x (N, C, H, W), channels last, with weight (K, R, S, C / groups)."""
    output = shape.output(x.shape[0])
    pixels = output[0] * output[2] * output[3]
    outputs = epilogue.outputs(output, x.device)
    arguments = (x, *operands, *epilogue_tensors(epilogue), *outputs, pixels)
    moves = (*shape.stride, *shape.padding, *shape.dilation)
    constants = relu_constants(epilogue.relu_max)
    if shape.is_depthwise:
        tiles = tiles or default_depthwise_tiles(shape)
        _convolve_depthwise[(triton.cdiv(pixels, tiles.pixels), triton.cdiv(shape.channels, tiles.outputs))](
            *arguments, *shape[:5], *shape[6:8], *moves, **constants, BLOCK_P=tiles.pixels, BLOCK_C=tiles.outputs,
            num_warps=tiles.warps, enable_fp_fusion=False,
        )  # fmt: skip
        return outputs
    heavy = epilogue.residual is not None or epilogue.keep_value
    tiles = tiles or default_tiles(shape, pixels, heavy_epilogue=heavy, doubled=operands.doubled is not None)
    across = triton.cdiv(shape.out_channels // shape.groups, tiles.outputs)
    down = triton.cdiv(pixels, tiles.pixels)
    if steps_of(shape, tiles.inputs) == 1:
        down = min(down, max(1, most_programs(tiles) // (across * shape.groups)))
    _convolve[(down * across, shape.groups)](
        *arguments, *shape.sizes, *moves, shape.groups, **constants, BLOCK_P=tiles.pixels, BLOCK_C=tiles.inputs,
        BLOCK_K=tiles.outputs, STAGES=tiles.stages, num_warps=tiles.warps, num_stages=tiles.stages,
        enable_fp_fusion=False,
    )  # fmt: skip
    return outputs
