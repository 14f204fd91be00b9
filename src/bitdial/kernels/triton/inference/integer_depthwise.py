"""Triton kernel of depthwise convolutions of integer codes, channels last, with their epilogue.

A channel of its own for each filter: no matrix product, the cost is that of reading and writing.
"""

import triton
import triton.language as tl

from bitdial.kernels.triton.inference.epilogue import _channel_numbers, _quantizer, _sums_epilogue


@triton.jit
def _convolve_depthwise(  # type: ignore[no-untyped-def]
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
    R: tl.constexpr,
    S: tl.constexpr,
    STRIDE_H: tl.constexpr,
    STRIDE_W: tl.constexpr,
    PAD_H: tl.constexpr,
    PAD_W: tl.constexpr,
    DILATION_H: tl.constexpr,
    DILATION_W: tl.constexpr,
    RELU: tl.constexpr,
    RELU_MAX: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    p = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    used = (c < C)[None, :]
    live = (p < pixels)[:, None] & used
    image = p // (OH * OW)
    top = p // OW % OH * STRIDE_H - PAD_H
    left = p % OW * STRIDE_W - PAD_W
    pad = tl.load(pad_ptr)
    doubled = 0 if doubled_ptr is None else tl.load(doubled_ptr)
    sums = tl.zeros((BLOCK_P, BLOCK_C), dtype=tl.int32)
    for r in tl.static_range(R):
        for s in tl.static_range(S):
            row, column = top + r * DILATION_H, left + s * DILATION_W
            inside = (row >= 0) & (row < H) & (column >= 0) & (column < W)
            at = ((image * H + row) * W + column)[:, None] * C + c[None, :]
            x = tl.load(x_ptr + at, mask=live & inside[:, None], other=pad).to(tl.int32)
            w = tl.load(w_ptr + c * (R * S) + (r * S + s), mask=c < C, other=0).to(tl.int32)
            sums += x * (w * (1 + doubled) + doubled)[None, :]  # w or 2 * w + 1
    quantizer_a = quantizer_a_ptr if quantizer_a_ptr is None else _quantizer(quantizer_a_ptr, RELU)
    quantizer_b = quantizer_b_ptr if quantizer_b_ptr is None else _quantizer(quantizer_b_ptr, RELU)
    by_channel = (correction_ptr, factor_ptr, bias_ptr, norm_affine_ptr)
    outs = (value_ptr, codes_a_ptr, codes_b_ptr)
    numbers = _channel_numbers(by_channel, c[None, :], used, C)
    _sums_epilogue(
        sums,
        p,
        pixels,
        c[None, :],
        used,
        by_channel,
        numbers,
        residual_ptr,
        quantizer_a,
        quantizer_b,
        outs,
        C,
        RELU,
        RELU_MAX,
    )
