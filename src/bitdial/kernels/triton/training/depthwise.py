"""Triton kernels of depthwise convolutions, channels last, float32 accumulation.

Each channel is convolved with a filter of its own, so there is no matrix product: nine multiply-adds a value, and the
cost is that of reading and writing. A tile is (pixels, channels); neighbours' values come from the cache. The moments
that a batch norm needs are taken from the tile while it is still in registers. The filter's memory is (C, R, S).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from bitdial.kernels.conv_shape import ConvShape
from bitdial.kernels.triton.training.conv import PIXELS

CHANNELS = 32  # of a tile
PARTS = 64  # that share a weight gradient, for each tile of channels and row of the filter


@triton.jit
def _forward(  # type: ignore[no-untyped-def]
    x_ptr,
    w_ptr,
    y_ptr,
    moments_ptr,
    pixels,
    tiles,
    C,
    H,
    W,
    OH,
    OW,
    R: tl.constexpr,
    S: tl.constexpr,
    STRIDE: tl.constexpr,
    PAD: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    tile = tl.program_id(0)
    p = tile * BLOCK_P + tl.arange(0, BLOCK_P)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    live = (p < pixels)[:, None] & (c < C)[None, :]
    image = p // (OH * OW)
    top = (p // OW) % OH * STRIDE - PAD
    left = p % OW * STRIDE - PAD
    sums = tl.zeros((BLOCK_P, BLOCK_C), dtype=tl.float32)
    for r in tl.static_range(R):
        for s in tl.static_range(S):
            row, column = top + r, left + s
            inside = (row >= 0) & (row < H) & (column >= 0) & (column < W)
            at = ((image * H + row) * W + column)[:, None] * C + c[None, :]
            x = tl.load(x_ptr + at, mask=live & inside[:, None], other=0.0).to(tl.float32)
            w = tl.load(w_ptr + c * (R * S) + r * S + s, mask=c < C, other=0.0).to(tl.float32)
            sums += x * w[None, :]
    y = sums.to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + p[:, None] * C + c[None, :], y, mask=live)
    values = tl.where(live, y.to(tl.float32), 0.0)
    mean = tl.sum(values, axis=0) / tl.minimum(pixels - tile * BLOCK_P, BLOCK_P).to(tl.float32)
    off = tl.where(live, values - mean[None, :], 0.0)
    tl.store(moments_ptr + c * tiles + tile, mean, mask=c < C)
    tl.store(moments_ptr + (C + c) * tiles + tile, tl.sum(off * off, axis=0), mask=c < C)


@triton.jit
def _input_gradient(  # type: ignore[no-untyped-def]
    g_ptr,
    w_ptr,
    dx_ptr,
    pixels,
    C,
    H,
    W,
    OH,
    OW,
    R: tl.constexpr,
    S: tl.constexpr,
    STRIDE: tl.constexpr,
    PAD: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    p = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    live = (p < pixels)[:, None] & (c < C)[None, :]
    image = p // (H * W)
    bottom = (p // W) % H + PAD
    right = p % W + PAD
    sums = tl.zeros((BLOCK_P, BLOCK_C), dtype=tl.float32)
    for r in tl.static_range(R):
        for s in tl.static_range(S):
            down, along = bottom - r, right - s  # STRIDE times the output pixel that this tap reached
            row, column = down // STRIDE, along // STRIDE
            reached = (down >= 0) & (along >= 0) & (row < OH) & (column < OW)
            reached = reached & (down % STRIDE == 0) & (along % STRIDE == 0)
            at = ((image * OH + row) * OW + column)[:, None] * C + c[None, :]
            g = tl.load(g_ptr + at, mask=live & reached[:, None], other=0.0).to(tl.float32)
            w = tl.load(w_ptr + c * (R * S) + r * S + s, mask=c < C, other=0.0).to(tl.float32)
            sums += g * w[None, :]
    tl.store(dx_ptr + p[:, None] * C + c[None, :], sums.to(dx_ptr.dtype.element_ty), mask=live)


@triton.jit
def _weight_gradient(  # type: ignore[no-untyped-def]
    x_ptr,
    g_ptr,
    out_ptr,
    pixels,
    share,
    C,
    H,
    W,
    OH,
    OW,
    R: tl.constexpr,
    S: tl.constexpr,
    STRIDE: tl.constexpr,
    PAD: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    part = tl.program_id(0)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    r = tl.program_id(2) // S
    s = tl.program_id(2) % S
    sums = tl.zeros((BLOCK_P, BLOCK_C), dtype=tl.float32)
    for start in range(part * share, tl.minimum((part + 1) * share, pixels), BLOCK_P):
        p = start + tl.arange(0, BLOCK_P)
        live = (p < pixels)[:, None] & (c < C)[None, :]
        row = (p // OW) % OH * STRIDE - PAD + r
        column = p % OW * STRIDE - PAD + s
        inside = (row >= 0) & (row < H) & (column >= 0) & (column < W)
        at = ((p // (OH * OW) * H + row) * W + column)[:, None] * C + c[None, :]
        x = tl.load(x_ptr + at, mask=live & inside[:, None], other=0.0).to(tl.float32)
        g = tl.load(g_ptr + p[:, None] * C + c[None, :], mask=live, other=0.0).to(tl.float32)
        sums += x * g
    tl.store(out_ptr + part * (C * R * S) + c * (R * S) + r * S + s, tl.sum(sums, axis=0), mask=c < C)


def convolve(x: Tensor, weight: Tensor, shape: ConvShape) -> tuple[Tensor, Tensor]:
    """The depthwise convolution (N, C, OH, OW) of x (N, C, H, W) with weight (C, 1, R, S), and its moments.

    Moments (2, C, tiles): mean, and sum of squared deviations from it, of each channel over each tile of PIXELS pixels.
    """
    n, c, oh, ow = shape.output(x.shape[0])
    pixels = n * oh * ow
    tiles = triton.cdiv(pixels, PIXELS)
    y = torch.empty((n, c, oh, ow), dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
    moments = torch.empty((2, c, tiles), dtype=torch.float32, device=x.device)
    _forward[(tiles, triton.cdiv(c, CHANNELS))](x, weight, y, moments, pixels, tiles, *_sizes(shape), **_taps(shape))
    return y, moments


def input_gradient(grad: Tensor, weight: Tensor, x: Tensor, shape: ConvShape) -> Tensor:
    """Gradient of the input x."""
    n, c, h, w = x.shape
    dx = torch.empty_like(x)
    _input_gradient[(triton.cdiv(n * h * w, PIXELS), triton.cdiv(c, CHANNELS))](
        grad, weight, dx, n * h * w, *_sizes(shape), **_taps(shape)
    )
    return dx


def weight_gradient(x: Tensor, grad: Tensor, shape: ConvShape) -> Tensor:
    """Gradient of the weight as parts (parts, C, R, S, 1) in float32, whose sum it is."""
    n, c, oh, ow = shape.output(x.shape[0])
    r, s = shape.rows, shape.columns
    pixels = n * oh * ow
    share = triton.cdiv(triton.cdiv(pixels, PIXELS), PARTS) * PIXELS
    parts = triton.cdiv(pixels, share)
    out = torch.empty((parts, c, r, s, 1), dtype=torch.float32, device=x.device)
    _weight_gradient[(parts, triton.cdiv(c, CHANNELS), r * s)](
        x, grad, out, pixels, share, *_sizes(shape), **_taps(shape)
    )
    return out


def _sizes(shape: ConvShape) -> tuple[int, ...]:
    return shape.channels, shape.height, shape.width, shape.out_height, shape.out_width


def _taps(shape: ConvShape) -> dict[str, int]:
    """The constants of all three kernels."""
    return {
        "R": shape.rows, "S": shape.columns, "STRIDE": shape.stride[0], "PAD": shape.padding[0],
        "BLOCK_P": PIXELS, "BLOCK_C": CHANNELS,
    }  # fmt: skip
