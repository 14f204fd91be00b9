"""Triton convolutions for networks with few channels, channels last, float32 accumulation.

cuDNN's kernels for 16 to 64 channels take several times what their bytes cost. Here a convolution is a matrix product
whose left side is read straight from the image: in channels-last memory the S * C values under one row of the filter
are contiguous, so a tile is (pixels, part of that run), and the padding is a bound on the position within the image's
row. The moments that a batch norm needs are taken from the tile while it is still in registers.

Sums are in a fixed order, so results repeat from run to run.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from bitdial.kernels.conv_shape import ConvShape
from bitdial.kernels.triton.tiles import Tiles, power_of_2

PIXELS = 128  # of a tile of the convolution, but for 32 channels twice as many
PROGRAMS = 264  # that share a weight gradient: two for each multiprocessor of an H200


@triton.jit
def _convolve(  # type: ignore[no-untyped-def]
    x_ptr,
    w_ptr,
    y_ptr,
    moments_ptr,
    pixels,
    tiles,
    H: tl.constexpr,
    W: tl.constexpr,
    C: tl.constexpr,
    OH: tl.constexpr,
    OW: tl.constexpr,
    K: tl.constexpr,
    R: tl.constexpr,
    S: tl.constexpr,
    STRIDE: tl.constexpr,
    PAD: tl.constexpr,
    FLIP: tl.constexpr,
    MOMENTS: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_J: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    tile = tl.program_id(0)
    p = tile * BLOCK_P + tl.arange(0, BLOCK_P)
    k = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    live = p < pixels
    image = p // (OH * OW)
    top = (p // OW) % OH * STRIDE - PAD
    left = (p % OW * STRIDE - PAD) * C
    CHUNKS: tl.constexpr = (S * C + BLOCK_J - 1) // BLOCK_J
    sums = tl.zeros((BLOCK_P, BLOCK_K), dtype=tl.float32)
    for step in range(R * CHUNKS):
        r = step // CHUNKS
        j = step % CHUNKS * BLOCK_J + tl.arange(0, BLOCK_J)
        row = top + r
        column = left[:, None] + j[None, :]
        inside = (live & (row >= 0) & (row < H))[:, None] & (column >= 0) & (column < W * C) & (j < S * C)[None, :]
        x = tl.load(x_ptr + ((image * H + row) * (W * C))[:, None] + column, mask=inside, other=0.0)
        used = (j < S * C)[:, None] & (k < K)[None, :]
        if FLIP:  # the gradient of the input: filter turned by half a turn, its input and output channels exchanged
            at = (j % C * R + (R - 1 - r)) * S + (S - 1 - j // C)
            w = tl.load(w_ptr + at[:, None] * K + k[None, :], mask=used, other=0.0)
        else:
            w = tl.load(w_ptr + k[None, :] * (R * S * C) + (r * (S * C) + j)[:, None], mask=used, other=0.0)
        sums = tl.dot(x, w, sums, input_precision="ieee")
    y = sums.to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + p[:, None] * K + k[None, :], y, mask=live[:, None] & (k < K)[None, :])
    if MOMENTS:
        values = tl.where(live[:, None], y.to(tl.float32), 0.0)
        mean = tl.sum(values, axis=0) / tl.minimum(pixels - tile * BLOCK_P, BLOCK_P).to(tl.float32)
        off = tl.where(live[:, None], values - mean[None, :], 0.0)
        tl.store(moments_ptr + k * tiles + tile, mean, mask=k < K)
        tl.store(moments_ptr + (K + k) * tiles + tile, tl.sum(off * off, axis=0), mask=k < K)


@triton.jit
def _weight_gradient(  # type: ignore[no-untyped-def]
    x_ptr,
    g_ptr,
    out_ptr,
    pixels,
    share,
    H: tl.constexpr,
    W: tl.constexpr,
    C: tl.constexpr,
    OH: tl.constexpr,
    OW: tl.constexpr,
    K: tl.constexpr,
    R: tl.constexpr,
    S: tl.constexpr,
    STRIDE: tl.constexpr,
    PAD: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_J: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    split = tl.program_id(0)
    CHUNKS: tl.constexpr = (S * C + BLOCK_J - 1) // BLOCK_J
    r = tl.program_id(1) // CHUNKS
    j = tl.program_id(1) % CHUNKS * BLOCK_J + tl.arange(0, BLOCK_J)
    k = tl.program_id(2) * BLOCK_K + tl.arange(0, BLOCK_K)
    sums = tl.zeros((BLOCK_J, BLOCK_K), dtype=tl.float32)
    for start in range(0, share, BLOCK_P):
        p = split * share + start + tl.arange(0, BLOCK_P)
        live = p < pixels
        row = (p // OW) % OH * STRIDE - PAD + r
        column = ((p % OW * STRIDE - PAD) * C)[:, None] + j[None, :]
        inside = (live & (row >= 0) & (row < H))[:, None] & (column >= 0) & (column < W * C) & (j < S * C)[None, :]
        x = tl.load(x_ptr + ((p // (OH * OW) * H + row) * (W * C))[:, None] + column, mask=inside, other=0.0)
        g = tl.load(g_ptr + p[:, None] * K + k[None, :], mask=live[:, None] & (k < K)[None, :], other=0.0)
        sums = tl.dot(tl.trans(x), g, sums, input_precision="ieee")
    at = split * (K * R * S * C) + k[None, :] * (R * S * C) + (r * (S * C) + j)[:, None]
    tl.store(out_ptr + at, sums, mask=(j < S * C)[:, None] & (k < K)[None, :])


def tile_pixels(channels: int, out_channels: int) -> int:
    """The pixels of a tile of a convolution of so many channels to so many; measured on an H200."""
    return 2 * PIXELS if power_of_2(channels, 16, 64) == power_of_2(out_channels, 16, 64) == 32 else PIXELS


def forward_tiles(shape: ConvShape) -> Tiles:
    """Tiles of the convolution and of its input gradient; measured on an H200."""
    pixels = tile_pixels(shape.channels, shape.out_channels)
    return Tiles(pixels, power_of_2(shape.channels, 16, 64), power_of_2(shape.out_channels, 16, 64), 4, 3)


def gradient_tiles(shape: ConvShape) -> Tiles:
    """Tiles of the weight gradient; measured on an H200."""
    length = shape.columns * shape.channels
    run = 64 if length % 64 == 0 else power_of_2(length, 16, 128)
    return Tiles(64, run, power_of_2(shape.out_channels, 16, 64), 4, 4)


def convolve(x: Tensor, weight: Tensor, shape: ConvShape) -> tuple[Tensor, Tensor]:
    """The convolution (N, K, OH, OW) of x (N, C, H, W) with weight (K, C, R, S), all channels last, and its moments.

    Moments (2, K, tiles): mean, and sum of squared deviations from it, of each channel over each tile of pixels.
    """
    return _launch(x, weight, shape, flip=False)


def input_gradient(grad: Tensor, weight: Tensor, shape: ConvShape) -> Tensor:
    """Gradient of the input of a convolution of stride 1: the convolution of `grad` with the turned filter."""
    image = (shape.out_channels, shape.out_height, shape.out_width)
    filters = (shape.channels, shape.rows, shape.columns)
    padding = (shape.rows - 1 - shape.padding[0], shape.columns - 1 - shape.padding[1])
    return _launch(grad, weight, ConvShape.of(image, filters, (1, 1), padding), flip=True)[0]


def _launch(x: Tensor, weight: Tensor, shape: ConvShape, *, flip: bool) -> tuple[Tensor, Tensor]:
    tiles = forward_tiles(shape)
    n, k, oh, ow = shape.output(x.shape[0])
    pixels = n * oh * ow
    count = triton.cdiv(pixels, tiles.pixels)
    y = torch.empty((n, k, oh, ow), dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
    moments = torch.empty((0 if flip else 2, k, count), dtype=torch.float32, device=x.device)
    _convolve[(count, triton.cdiv(k, tiles.outputs))](
        x, weight, y, moments, pixels, count, *shape.sizes, shape.stride[0], shape.padding[0], FLIP=flip,
        MOMENTS=not flip, BLOCK_P=tiles.pixels, BLOCK_J=tiles.inputs, BLOCK_K=tiles.outputs, num_warps=tiles.warps,
        num_stages=tiles.stages,
    )  # fmt: skip
    return y, moments


def weight_gradient(x: Tensor, grad: Tensor, shape: ConvShape) -> Tensor:
    """Gradient of the weight as parts (parts, K, R, S, C) in float32, whose sum it is."""
    n, k, oh, ow = shape.output(x.shape[0])
    r, s, c = shape.rows, shape.columns, shape.channels
    tiles = gradient_tiles(shape)
    pixels, across, deep = n * oh * ow, r * triton.cdiv(s * c, tiles.inputs), triton.cdiv(k, tiles.outputs)
    blocks = triton.cdiv(pixels, tiles.pixels)
    share = triton.cdiv(blocks, max(PROGRAMS // (across * deep), 1)) * tiles.pixels
    parts = triton.cdiv(pixels, share)
    out = torch.empty((parts, k, r, s, c), dtype=torch.float32, device=x.device)
    _weight_gradient[(parts, across, deep)](
        x, grad, out, pixels, share, *shape.sizes, shape.stride[0], shape.padding[0], BLOCK_P=tiles.pixels,
        BLOCK_J=tiles.inputs, BLOCK_K=tiles.outputs, num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    return out
