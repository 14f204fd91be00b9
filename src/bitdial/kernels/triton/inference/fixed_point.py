"""The Triton kernels of layers kept in float, by integer sums: fixed-point numbers in float64, on its tensor cores.

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

from bitdial.kernels.triton.inference.epilogue import (
    Finish,
    _finish_tile,
    _quantizer,
    ending,
    finish_operands,
    outputs_for,
)
from bitdial.kernels.triton.inference.tiles import PROCESSORS, Geometry, Tiles

BLOCK = 1024
DEEP, FEW_PIXELS = 256, 1024


@triton.jit
def _round(  # type: ignore[no-untyped-def]
    x_ptr,
    powers_ptr,
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
    y = (x.to(tl.float64) * tl.load(powers_ptr + sample) + ROUNDER) - ROUNDER
    tl.store(y_ptr + sample * SIZE + at, y.to(tl.float32), mask=at < SIZE)


@triton.jit
def _convolve_fixed_point(  # type: ignore[no-untyped-def]
    x_ptr,
    w_ptr,
    powers_ptr,
    weight_power_ptr,
    bias_ptr,
    norm_ptr,
    other_ptr,
    first_ptr,
    second_ptr,
    value_ptr,
    codes_ptr,
    more_ptr,
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
    CAP: tl.constexpr,
    LIMIT: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_J: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """The convolution of integers x, zeros around them included, and what follows it."""
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
    y = sums * tl.load(powers_ptr + images + image)[:, None] * tl.load(weight_power_ptr)
    y = y.to(tl.float32)
    channel = k[None, :]
    used = channel < K
    if bias_ptr is not None:
        y = y + tl.load(bias_ptr + channel, mask=used, other=0.0)
    first = first_ptr if first_ptr is None else _quantizer(first_ptr, CAP)
    second = second_ptr if second_ptr is None else _quantizer(second_ptr, CAP)
    multiplier, offset = y, y
    if norm_ptr is not None:
        multiplier = tl.load(norm_ptr + channel, mask=used, other=0.0)
        offset = tl.load(norm_ptr + K + channel, mask=used, other=0.0)
    _finish_tile(
        y, p[:, None] * K + channel, live[:, None] & used, norm_ptr, multiplier, offset, other_ptr, first, second,
        value_ptr, codes_ptr, more_ptr, CAP, LIMIT,
    )  # fmt: skip


def default_tiles(geometry: Geometry, pixels: int) -> Tiles:
    """Tiles of a convolution of so many output pixels.

    Those that were the quickest on an H200 for the first layer of a ResNet, in three sizes, and for its last, of which
    there is little to share among the processors: many terms, few pixels.
    """
    terms = geometry.rows * geometry.columns * geometry.channels
    if terms >= DEEP and pixels <= FEW_PIXELS:
        return Tiles(16, 128, 16, 2, 3)
    outputs = 32 if geometry.out_channels <= 32 else 64
    programs = triton.cdiv(pixels, 64) * triton.cdiv(geometry.out_channels, outputs)
    if programs < 2 * PROCESSORS:
        return Tiles(32, 16 if terms <= 16 else 32, outputs, 4, 2)
    return Tiles(64 if programs < 8 * PROCESSORS else 128, 16, outputs, 4, 3)


def convolve(
    x: Tensor,
    weight: Tensor,
    powers: Tensor,
    weight_power: Tensor,
    bias: Tensor | None,
    finish: Finish,
    geometry: Geometry,
    *,
    tiles: Tiles | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Value and codes after a convolution of x (N, C, H, W), channels last, with whole numbers weight (K, R, S, C)."""
    g = geometry
    pixels = x.shape[0] * g.out_height * g.out_width
    outputs = outputs_for((x.shape[0], g.out_channels, g.out_height, g.out_width), x.device, finish)
    tiles = tiles or default_tiles(g, pixels)
    wide = (g.height + 2 * g.padding[0], g.width + 2 * g.padding[1], g.channels)
    size = wide[0] * wide[1] * wide[2]
    integers = torch.empty((x.shape[0], size), dtype=torch.float32, device=x.device)
    _round[(x.shape[0], triton.cdiv(size, BLOCK))](
        x, powers, integers, g.height, g.width, g.channels, *g.padding, BLOCK=BLOCK, enable_fp_fusion=False
    )
    _convolve_fixed_point[(triton.cdiv(pixels, tiles.pixels), triton.cdiv(g.out_channels, tiles.outputs))](
        integers, weight, powers, weight_power, bias, *finish_operands(finish), *outputs, x.shape[0], pixels, *wide,
        *g[3:8], *g.stride, **ending(finish.cap), BLOCK_P=tiles.pixels, BLOCK_J=tiles.inputs, BLOCK_K=tiles.outputs,
        num_warps=tiles.warps, num_stages=tiles.stages, enable_fp_fusion=False,
    )  # fmt: skip
    return outputs
