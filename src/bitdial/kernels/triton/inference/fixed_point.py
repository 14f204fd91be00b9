"""The Triton kernels of unquantised layers, by integer sums: fixed-point numbers in float64, on its tensor cores.

`live.engines.exact` rounds the input of such a layer to integers times a power of two for each sample, and its weight
to integers times one power. Sums of their products stay below 2^53, so float64 carries them exactly in whatever order.
One kernel rounds the input, once for each number, and puts zeros around the image; the integers have 24 bits at most,
which float32 holds. The other multiplies. All taps and channels of a window are one run of numbers there, so that three
channels do not waste the tensor cores as they would tap by tap: 147 of a 7x7 filter are 5 slices of 32.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from bitdial.kernels.conv_shape import ConvShape
from bitdial.kernels.epilogue import Epilogue
from bitdial.kernels.operands import FixedPointOperands
from bitdial.kernels.triton.inference.epilogue import _epilogue_tile, _quantizer, epilogue_tensors, relu_constants
from bitdial.kernels.triton.inference.tiles import PROCESSORS
from bitdial.kernels.triton.tiles import Tiles

BLOCK = 1024
DEEP, FEW_PIXELS = 256, 1024


@triton.jit
def _round(  # type: ignore[no-untyped-def]
    x_ptr,
    scales_ptr,
    y_ptr,
    H: tl.constexpr,
    W: tl.constexpr,
    C: tl.constexpr,
    PAD_H: tl.constexpr,
    PAD_W: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The integers of a sample, channels last, with zeros around the image."""
    ROUNDER: tl.constexpr = 6755399441055744.0  # 1.5 * 2^52: added and subtracted, it rounds half to even
    WIDE: tl.constexpr = (W + 2 * PAD_W) * C
    SIZE: tl.constexpr = (H + 2 * PAD_H) * WIDE
    sample = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row, column = at // WIDE - PAD_H, at % WIDE - PAD_W * C
    inside = (row >= 0) & (row < H) & (column >= 0) & (column < W * C)
    x = tl.load(x_ptr + sample * (H * W * C) + row * (W * C) + column, mask=inside, other=0.0)
    y = (x.to(tl.float64) * tl.load(scales_ptr + sample) + ROUNDER) - ROUNDER
    tl.store(y_ptr + sample * SIZE + at, y.to(tl.float32), mask=at < SIZE)


@triton.jit
def _convolve_fixed_point(  # type: ignore[no-untyped-def]
    x_ptr,
    w_ptr,
    scales_ptr,
    weight_power_ptr,
    bias_ptr,
    norm_affine_ptr,
    residual_ptr,
    quantizer_a_ptr,
    quantizer_b_ptr,
    value_ptr,
    codes_a_ptr,
    codes_b_ptr,
    images,
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
    RELU: tl.constexpr,
    RELU_MAX: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_J: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """The convolution of integers x, zeros around them included, and its epilogue."""
    TERMS: tl.constexpr = R * S * C
    p = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)
    k = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    live = p < pixels
    q = tl.where(live, p, 0)  # rows that nobody stores compute something that may be read
    image = q // (OH * OW)
    window_ptr = x_ptr + ((image * H + q // OW % OH * STRIDE_H) * W + q % OW * STRIDE_W) * C
    sums = tl.zeros((BLOCK_P, BLOCK_K), dtype=tl.float64)
    for step in range((TERMS + BLOCK_J - 1) // BLOCK_J):
        j = step * BLOCK_J + tl.arange(0, BLOCK_J)
        term = tl.where(j < TERMS, j, 0)
        x = tl.load(window_ptr[:, None] + (term // (S * C) * (W * C) + term % (S * C))[None, :]).to(tl.float64)
        used = (j < TERMS)[:, None] & (k < K)[None, :]
        w = tl.load(w_ptr + k[None, :] * TERMS + j[:, None], mask=used, other=0.0).to(tl.float64)
        sums = tl.dot(x, w, sums, input_precision="ieee", out_dtype=tl.float64)
    y = sums * tl.load(scales_ptr + images + image)[:, None] * tl.load(weight_power_ptr)
    y = y.to(tl.float32)
    channel = k[None, :]
    used = channel < K
    if bias_ptr is not None:
        y = y + tl.load(bias_ptr + channel, mask=used, other=0.0)
    quantizer_a = quantizer_a_ptr if quantizer_a_ptr is None else _quantizer(quantizer_a_ptr, RELU)
    quantizer_b = quantizer_b_ptr if quantizer_b_ptr is None else _quantizer(quantizer_b_ptr, RELU)
    multiplier, offset = y, y
    if norm_affine_ptr is not None:
        multiplier = tl.load(norm_affine_ptr + channel, mask=used, other=0.0)
        offset = tl.load(norm_affine_ptr + K + channel, mask=used, other=0.0)
    _epilogue_tile(
        y, p[:, None] * K + channel, live[:, None] & used, norm_affine_ptr, multiplier, offset, residual_ptr,
        quantizer_a, quantizer_b, value_ptr, codes_a_ptr, codes_b_ptr, RELU, RELU_MAX,
    )  # fmt: skip


def default_tiles(shape: ConvShape, pixels: int) -> Tiles:
    """Tiles of a convolution of so many output pixels.

    Those that were the quickest on an H200 for the first layer of a ResNet, in three sizes, and for its last, of which
    there is little to share among the processors: many terms, few pixels.
    """
    terms = shape.rows * shape.columns * shape.channels
    if terms >= DEEP and pixels <= FEW_PIXELS:
        return Tiles(16, 128, 16, 2, 3)
    outputs = 32 if shape.out_channels <= 32 else 64
    programs = triton.cdiv(pixels, 64) * triton.cdiv(shape.out_channels, outputs)
    if programs < 2 * PROCESSORS:
        return Tiles(32, 16 if terms <= 16 else 32, outputs, 4, 2)
    return Tiles(64 if programs < 8 * PROCESSORS else 128, 16, outputs, 4, 3)


def convolve(
    x: Tensor, operands: FixedPointOperands, shape: ConvShape, epilogue: Epilogue, *, tiles: Tiles | None = None
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Value and codes after a convolution of x (N, C, H, W), channels last, with whole numbers weight (K, R, S, C)."""
    weight, scales, weight_power, bias = operands
    images, outputs, height, width = shape.output(x.shape[0])
    pixels = images * height * width
    results = epilogue.outputs((images, outputs, height, width), x.device)
    tiles = tiles or default_tiles(shape, pixels)
    wide = (shape.height + 2 * shape.padding[0], shape.width + 2 * shape.padding[1], shape.channels)
    size = wide[0] * wide[1] * wide[2]
    integers = torch.empty((images, size), dtype=torch.float32, device=x.device)
    _round[(images, triton.cdiv(size, BLOCK))](
        x, scales, integers, shape.height, shape.width, shape.channels, *shape.padding, BLOCK=BLOCK,
        enable_fp_fusion=False,
    )  # fmt: skip
    _convolve_fixed_point[(triton.cdiv(pixels, tiles.pixels), triton.cdiv(outputs, tiles.outputs))](
        integers, weight, scales, weight_power, bias, *epilogue_tensors(epilogue), *results, images, pixels, *wide,
        *shape[3:8], *shape.stride, **relu_constants(epilogue.relu_max), BLOCK_P=tiles.pixels, BLOCK_J=tiles.inputs,
        BLOCK_K=tiles.outputs, num_warps=tiles.warps, num_stages=tiles.stages, enable_fp_fusion=False,
    )  # fmt: skip
    return results
