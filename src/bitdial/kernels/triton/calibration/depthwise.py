"""Triton kernels of depthwise convolutions of images with channels first, in float32.

Each channel has a filter of its own, so the cost is that of reading and writing. A tile is a run of one channel's
pixels, from image to image; neighbours' values come from the cache. The weight's gradient is summed tile by tile for
all taps of the filter, and the tiles in a fixed order.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from bitdial.kernels.conv_shape import ConvShape

PIXELS = 512  # of a tile
SUMMED, SUMMING_WARPS = 2048, 8  # of a tile of the weight's gradient


@triton.jit
def _pixels(count, C, H: tl.constexpr, W: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Of this program's tile: the plane of memory that a pixel is in, its row and column, and whether it is there."""
    p = tl.max_contiguous(tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), 1)  # neighbours to neighbouring threads
    return p // (H * W) * C + tl.program_id(1), p // W % H, p % W, p < count


@triton.jit
def _depthwise_forward(  # type: ignore[no-untyped-def]
    x_ptr,
    w_ptr,
    y_ptr,
    count,
    C,
    H: tl.constexpr,
    W: tl.constexpr,
    OH: tl.constexpr,
    OW: tl.constexpr,
    R: tl.constexpr,
    S: tl.constexpr,
    STRIDE: tl.constexpr,
    PAD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    plane, row, column, live = _pixels(count, C, OH, OW, BLOCK)
    filter_ptr = w_ptr + tl.program_id(1) * (R * S)
    top, left = row * STRIDE - PAD, column * STRIDE - PAD
    first = (plane * H + top) * W + left
    sums = tl.zeros((BLOCK,), dtype=tl.float32)
    for r in tl.static_range(R):
        for s in tl.static_range(S):
            inside = live & (top + r >= 0) & (top + r < H) & (left + s >= 0) & (left + s < W)
            x = tl.load(x_ptr + first + (r * W + s), mask=inside, other=0.0)
            sums += x * tl.load(filter_ptr + r * S + s)
    tl.store(y_ptr + (plane * OH + row) * OW + column, sums, mask=live)


@triton.jit
def _depthwise_input_gradient(  # type: ignore[no-untyped-def]
    g_ptr,
    w_ptr,
    dx_ptr,
    count,
    C,
    H: tl.constexpr,
    W: tl.constexpr,
    OH: tl.constexpr,
    OW: tl.constexpr,
    R: tl.constexpr,
    S: tl.constexpr,
    STRIDE: tl.constexpr,
    PAD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    plane, row, column, live = _pixels(count, C, H, W, BLOCK)
    filter_ptr = w_ptr + tl.program_id(1) * (R * S)
    down, along = row + PAD, column + PAD
    bottom, right = down // STRIDE, along // STRIDE  # the last output pixel that read this one, if the filter is there
    sums = tl.zeros((BLOCK,), dtype=tl.float32)
    for i in tl.static_range((R + STRIDE - 1) // STRIDE):
        for j in tl.static_range((S + STRIDE - 1) // STRIDE):
            out_row, out_column = bottom - i, right - j
            inside = live & (out_row >= 0) & (out_row < OH) & (out_column >= 0) & (out_column < OW)
            if STRIDE == 1:
                w = tl.load(filter_ptr + i * S + j)
            else:
                r, s = down % STRIDE + i * STRIDE, along % STRIDE + j * STRIDE
                inside = inside & (r < R) & (s < S)
                w = tl.load(filter_ptr + r * S + s, mask=inside, other=0.0)
            sums += tl.load(g_ptr + (plane * OH + out_row) * OW + out_column, mask=inside, other=0.0) * w
    tl.store(dx_ptr + (plane * H + row) * W + column, sums, mask=live)


@triton.jit
def _depthwise_weight_gradient(  # type: ignore[no-untyped-def]
    x_ptr,
    g_ptr,
    out_ptr,
    count,
    C,
    H: tl.constexpr,
    W: tl.constexpr,
    OH: tl.constexpr,
    OW: tl.constexpr,
    R: tl.constexpr,
    S: tl.constexpr,
    STRIDE: tl.constexpr,
    PAD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    plane, row, column, live = _pixels(count, C, OH, OW, BLOCK)
    g = tl.load(g_ptr + (plane * OH + row) * OW + column, mask=live, other=0.0)
    top, left = row * STRIDE - PAD, column * STRIDE - PAD
    first = (plane * H + top) * W + left
    own_ptr = out_ptr + (tl.program_id(0) * C + tl.program_id(1)) * (R * S)
    for r in tl.static_range(R):
        for s in tl.static_range(S):
            inside = live & (top + r >= 0) & (top + r < H) & (left + s >= 0) & (left + s < W)
            x = tl.load(x_ptr + first + (r * W + s), mask=inside, other=0.0)
            tl.store(own_ptr + r * S + s, tl.sum(x * g, axis=0))


def convolve(x: Tensor, weight: Tensor, shape: ConvShape) -> Tensor:
    """The depthwise convolution (N, C, OH, OW) of x (N, C, H, W) with weight (C, 1, R, S)."""
    y = torch.empty(shape.output(len(x)), dtype=x.dtype, device=x.device)
    count, grid, settings = _launch(shape, y, PIXELS)
    _depthwise_forward[grid](x, weight, y, count, shape.channels, **settings)
    return y


def input_gradient(grad: Tensor, weight: Tensor, shape: ConvShape) -> Tensor:
    """The gradient of x."""
    size = (len(grad), shape.channels, shape.height, shape.width)
    dx = torch.empty(size, dtype=grad.dtype, device=grad.device)
    count, grid, settings = _launch(shape, dx, PIXELS)
    _depthwise_input_gradient[grid](grad, weight, dx, count, shape.channels, **settings)
    return dx


def weight_gradient(x: Tensor, grad: Tensor, shape: ConvShape) -> Tensor:
    """The gradient of the weight."""
    count, grid, settings = _launch(shape, grad, SUMMED)
    size = (grid[0], shape.channels, 1, shape.rows, shape.columns)
    parts = torch.empty(size, dtype=torch.float32, device=x.device)
    _depthwise_weight_gradient[grid](x, grad, parts, count, shape.channels, num_warps=SUMMING_WARPS, **settings)
    return parts.sum(dim=0) if len(parts) > 1 else parts[0]


def _launch(shape: ConvShape, tiled: Tensor, most: int) -> tuple[int, tuple[int, int], dict[str, int]]:
    """Pixels of a channel of `tiled`, the grid and the constants, with tiles of `most` pixels."""
    count = tiled.numel() // shape.channels
    block = min(triton.next_power_of_2(count), most)
    settings = {
        "H": shape.height, "W": shape.width, "OH": shape.out_height, "OW": shape.out_width, "R": shape.rows,
        "S": shape.columns, "STRIDE": shape.stride[0], "PAD": shape.padding[0], "BLOCK": block,
    }  # fmt: skip
    return count, (triton.cdiv(count, block), shape.channels), settings
