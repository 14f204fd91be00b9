"""Triton kernel of max pools of stored codes, channels last: a program has a tile of output pixels and channels."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from bitdial.kernels.conv_shape import ConvShape
from bitdial.kernels.triton.tiles import power_of_2

TILE = 2048  # codes of a program: 16 for each thread of four warps


@triton.jit
def _max_pool(  # type: ignore[no-untyped-def]
    x_ptr,
    out_ptr,
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
    BLOCK_P: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    p = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    live = (p < pixels)[:, None] & (c < C)[None, :]
    top, left = p // OW % OH * STRIDE_H - PAD_H, p % OW * STRIDE_W - PAD_W
    first = p // (OH * OW) * H
    largest = tl.full((BLOCK_P, BLOCK_C), -128, tl.int8)
    for r in range(R):
        for s in tl.static_range(S):
            row, column = top + r * DILATION_H, left + s * DILATION_W
            inside = (row >= 0) & (row < H) & (column >= 0) & (column < W)
            at = ((first + row) * W + column)[:, None] * C + c[None, :]
            x = tl.load(x_ptr + at, mask=live & inside[:, None], other=0)  # -128 would fill one byte of four only
            largest = tl.maximum(largest, tl.where(inside[:, None], x, -128))
    tl.store(out_ptr + p[:, None] * C + c[None, :], largest, mask=live)


def max_pool(x: Tensor, shape: ConvShape) -> Tensor:
    """The pool of x (N, C, H, W), which is channels last."""
    sizes = shape.output(x.shape[0])
    out = torch.empty(sizes, dtype=torch.int8, device=x.device, memory_format=torch.channels_last)
    images, channels, height, width = sizes
    pixels, across = images * height * width, power_of_2(channels, 16, 64)
    grid = (triton.cdiv(pixels, TILE // across), triton.cdiv(channels, across))
    _max_pool[grid](
        x, out, pixels, shape.height, shape.width, channels, height, width, shape.rows, shape.columns, *shape.stride,
        *shape.padding, *shape.dilation, BLOCK_P=TILE // across, BLOCK_C=across, num_warps=4,
    )  # fmt: skip
    return out
