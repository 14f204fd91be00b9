"""The Triton kernel of layers kept in float, by integer sums: fixed-point numbers in float64, on its tensor cores.

`bitdial.exact` rounds the input of such a layer to integers times a power of two for each sample, and its weight to
integers times one power. Sums of their products stay below 2^53, so float64 carries them exactly in whatever order. The
kernel rounds the input as it reads it. All taps and channels of a window are one run of numbers, so that three channels
do not waste the tensor cores as they would tap by tap: 147 of a 7x7 filter are 5 slices of 32.
"""

import triton
import triton.language as tl
from torch import Tensor

from bitdial.kernels.integer_tiles import Geometry, Tiles
from bitdial.kernels.triton_finish import Finish, _finish_tile, _quantizer, ending, finish_operands, outputs_for


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
    PAD_H: tl.constexpr,
    PAD_W: tl.constexpr,
    CAP: tl.constexpr,
    LIMIT: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_J: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    ROUNDER: tl.constexpr = 6755399441055744.0  # 1.5 * 2^52: added and subtracted, it rounds half to even
    TERMS: tl.constexpr = R * S * C
    p = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)
    k = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    live = p < pixels
    image = tl.where(live, p, 0) // (OH * OW)
    top = p // OW % OH * STRIDE_H - PAD_H
    left = (p % OW * STRIDE_W - PAD_W) * C
    inverse = tl.load(powers_ptr + image)[:, None]
    sums = tl.zeros((BLOCK_P, BLOCK_K), dtype=tl.float64)
    for step in range((TERMS + BLOCK_J - 1) // BLOCK_J):
        j = step * BLOCK_J + tl.arange(0, BLOCK_J)
        row = top[:, None] + (j // (S * C))[None, :]
        column = left[:, None] + (j % (S * C))[None, :]
        inside = live[:, None] & (j < TERMS)[None, :] & (row >= 0) & (row < H) & (column >= 0) & (column < W * C)
        x = tl.load(x_ptr + ((image * H)[:, None] + row) * (W * C) + column, mask=inside, other=0.0)
        x = (x.to(tl.float64) * inverse + ROUNDER) - ROUNDER
        used = (j < TERMS)[:, None] & (k < K)[None, :]
        w = tl.load(w_ptr + k[None, :] * TERMS + j[:, None], mask=used, other=0.0)
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


def default_tiles(geometry: Geometry) -> Tiles:
    """Tiles of a convolution; a guess, not yet measured on a GPU."""
    run = 16 if geometry.rows * geometry.columns * geometry.channels <= 16 else 32
    return Tiles(64, run, 32 if geometry.out_channels <= 32 else 64, 4, 3)


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
    tiles = tiles or default_tiles(g)
    _convolve_fixed_point[(triton.cdiv(pixels, tiles.pixels), triton.cdiv(g.out_channels, tiles.outputs))](
        x, weight, powers, weight_power, bias, *finish_operands(finish), *outputs, x.shape[0], pixels, *g[:8],
        *g.stride, *g.padding, **ending(finish.cap), BLOCK_P=tiles.pixels, BLOCK_J=tiles.inputs, BLOCK_K=tiles.outputs,
        num_warps=tiles.warps, num_stages=tiles.stages, enable_fp_fusion=False,
    )  # fmt: skip
    return outputs
