"""Triton convolutions for networks with few channels, channels last, float32 accumulation.

cuDNN's kernels for 16 to 64 channels take several times what their bytes cost. Here a convolution is a matrix product
whose left side is read straight from the image: in channels-last memory the S * C values under one row of the filter
are contiguous, so a tile is (pixels, part of that run), and the padding is a bound on the position within the image's
row. The moments that a batch norm needs are taken from the tile while it is still in registers.

Sums are in a fixed order, so results repeat from run to run.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

PIXELS = 128  # of a tile of the convolution, but for 32 channels twice as many
PROGRAMS = 264  # that share a weight gradient: two for each multiprocessor of an H200


class Geometry(NamedTuple):
    """Sizes of a convolution: input and output height, width and channels, filter height and width."""

    height: int
    width: int
    channels: int
    out_height: int
    out_width: int
    out_channels: int
    rows: int
    columns: int
    stride: int
    padding: int


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


class Tiles(NamedTuple):
    """How a kernel cuts its work: pixels, run of the filter's row, output channels; warps and pipeline stages."""

    pixels: int
    run: int
    channels: int
    warps: int
    stages: int


def _power(value: int, least: int, most: int) -> int:
    return min(max(triton.next_power_of_2(value), least), most)


def tile_pixels(channels: int, out_channels: int) -> int:
    """The pixels of a tile of a convolution of so many channels to so many; measured on an H200."""
    return 2 * PIXELS if _power(channels, 16, 64) == _power(out_channels, 16, 64) == 32 else PIXELS


def forward_tiles(geometry: Geometry) -> Tiles:
    """Tiles of the convolution and of its input gradient; measured on an H200."""
    pixels = tile_pixels(geometry.channels, geometry.out_channels)
    return Tiles(pixels, _power(geometry.channels, 16, 64), _power(geometry.out_channels, 16, 64), 4, 3)


def gradient_tiles(geometry: Geometry) -> Tiles:
    """Tiles of the weight gradient; measured on an H200."""
    length = geometry.columns * geometry.channels
    run = 64 if length % 64 == 0 else _power(length, 16, 128)
    return Tiles(64, run, _power(geometry.out_channels, 16, 64), 4, 4)


def convolve(x: Tensor, weight: Tensor, stride: int, padding: int) -> tuple[Tensor, Tensor]:
    """The convolution (N, K, OH, OW) of x (N, C, H, W) with weight (K, C, R, S), all channels last, and its moments.

    Moments (2, K, tiles): mean, and sum of squared deviations from it, of each channel over each tile of pixels.
    """
    n, c, h, w = x.shape
    k, _, r, s = weight.shape
    oh, ow = (h + 2 * padding - r) // stride + 1, (w + 2 * padding - s) // stride + 1
    return _launch(x, weight, Geometry(h, w, c, oh, ow, k, r, s, stride, padding), n, flip=False)


def input_gradient(grad: Tensor, weight: Tensor, padding: int) -> Tensor:
    """Gradient of the input of a convolution of stride 1: the convolution of `grad` with the turned filter."""
    n, k, oh, ow = grad.shape
    _, c, r, s = weight.shape
    h, w = oh + r - 1 - 2 * padding, ow + s - 1 - 2 * padding
    geometry = Geometry(oh, ow, k, h, w, c, r, s, 1, r - 1 - padding)
    return _launch(grad, weight, geometry, n, flip=True)[0]


def _launch(x: Tensor, weight: Tensor, geometry: Geometry, images: int, *, flip: bool) -> tuple[Tensor, Tensor]:
    tiles = forward_tiles(geometry)
    pixels = images * geometry.out_height * geometry.out_width
    count, k = triton.cdiv(pixels, tiles.pixels), geometry.out_channels
    shape = (images, k, geometry.out_height, geometry.out_width)
    y = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
    moments = torch.empty((0 if flip else 2, k, count), dtype=torch.float32, device=x.device)
    _convolve[(count, triton.cdiv(k, tiles.channels))](
        x, weight, y, moments, pixels, count, *geometry, FLIP=flip, MOMENTS=not flip,
        BLOCK_P=tiles.pixels, BLOCK_J=tiles.run, BLOCK_K=tiles.channels, num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    return y, moments


def weight_gradient(x: Tensor, grad: Tensor, weight: Tensor, stride: int, padding: int) -> Tensor:
    """Gradient of `weight` as parts (parts, K, R, S, C) in float32, whose sum it is."""
    n, c, h, w = x.shape
    k, _, r, s = weight.shape
    _, _, oh, ow = grad.shape
    geometry = Geometry(h, w, c, oh, ow, k, r, s, stride, padding)
    tiles = gradient_tiles(geometry)
    pixels, across, deep = n * oh * ow, r * triton.cdiv(s * c, tiles.run), triton.cdiv(k, tiles.channels)
    blocks = triton.cdiv(pixels, tiles.pixels)
    share = triton.cdiv(blocks, max(PROGRAMS // (across * deep), 1)) * tiles.pixels
    parts = triton.cdiv(pixels, share)
    out = torch.empty((parts, k, r, s, c), dtype=torch.float32, device=x.device)
    _weight_gradient[(parts, across, deep)](
        x, grad, out, pixels, share, *geometry, BLOCK_P=tiles.pixels, BLOCK_J=tiles.run, BLOCK_K=tiles.channels,
        num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    return out
