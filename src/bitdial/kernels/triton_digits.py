"""The Triton kernels of first layers kept in float: sums of integers by their digits, on the int8 tensor cores.

An integer of 22 bits is three digits, each of which int8 holds: d0 + 2^8 d1 + 2^16 d2. So a sum of products of two such
integers is nine sums of products of digits, five where those of one power of two are taken together; int32 carries
them, and int64 what they make. It is the sum that `bitdial.kernels.triton_fixed_point` takes in float64, for images
of few channels: a pixel is four bytes of each digit here, and a row of the filter one run of them, filled up with
zeros, so that a 7x7 filter is 7 slices of 32.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from bitdial.kernels.integer_tiles import Geometry, Tiles, power_of_2
from bitdial.kernels.triton_finish import Finish, ending, finish_operands, outputs_for
from bitdial.kernels.triton_fixed_point import _finish_values

DIGITS = tl.constexpr(3)
CHANNELS = tl.constexpr(4)  # bytes of a pixel
FEWEST_TERMS, MOST_TERMS = 65, 256  # of which `bitdial.exact` sums numbers of 22 bits; of fewer terms they have more
LONGEST_ROW = 128  # bytes of a row of the filter
PIXELS = 256  # that a program cuts into digits
MOST_BLOCKS = 65535  # that a GPU takes of a sample
INDEXABLE = 2**31


@triton.jit
def _digits(  # type: ignore[no-untyped-def]
    x_ptr,
    inverse_ptr,
    y_ptr,
    H: tl.constexpr,
    W: tl.constexpr,
    C: tl.constexpr,
    PAD_H: tl.constexpr,
    PAD_W: tl.constexpr,
    LINES: tl.constexpr,
    LINE: tl.constexpr,
    PIXELS: tl.constexpr,
):
    """The digits (3, LINES, LINE, 4) of a sample (H, W, C) times its 1 / power, if it has one, with zeros around."""
    ROUNDER: tl.constexpr = 6755399441055744.0  # 1.5 * 2^52: added, it rounds half to even, to the low bits
    sample = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * PIXELS + tl.arange(0, PIXELS)
    row, column = (at // LINE - PAD_H)[:, None], (at % LINE - PAD_W)[:, None]
    c = tl.arange(0, CHANNELS)[None, :]
    inside = (row >= 0) & (row < H) & (column >= 0) & (column < W) & (c < C)
    x = tl.load(x_ptr + sample * (H * W * C) + (row * W + column) * C + c, mask=inside, other=0.0).to(tl.float64)
    if inverse_ptr is not None:
        x = x * tl.load(inverse_ptr + sample)
    # Each digit but the last is a byte less 128.
    integer = (x + ROUNDER).to(tl.int64, bitcast=True).to(tl.int32)
    digits = (integer + 0x8080) ^ 0x8080
    y_ptr += sample * (DIGITS * LINES * LINE * CHANNELS) + at[:, None] * CHANNELS + c
    live = (at < LINES * LINE)[:, None]
    for digit in tl.static_range(DIGITS):
        tl.store(y_ptr + digit * (LINES * LINE * CHANNELS), (digits >> 8 * digit).to(tl.int8), mask=live)


@triton.jit
def _convolve_digits(  # type: ignore[no-untyped-def]
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
    LINES: tl.constexpr,
    LINE: tl.constexpr,
    OH: tl.constexpr,
    OW: tl.constexpr,
    K: tl.constexpr,
    R: tl.constexpr,
    ROW: tl.constexpr,
    STRIDE_H: tl.constexpr,
    STRIDE_W: tl.constexpr,
    CAP: tl.constexpr,
    LIMIT: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_J: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """The convolution of digits x with digits w (K, 3, rows of the filter, ROW), and what follows it."""
    ROWS: tl.constexpr = BLOCK_J // ROW  # of the filter, in a step
    STEPS: tl.constexpr = (R + ROWS - 1) // ROWS
    IMAGE: tl.constexpr = LINES * LINE * CHANNELS  # bytes of a digit
    FILTER: tl.constexpr = STEPS * BLOCK_J
    p = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)
    k = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    live = p < pixels
    q = tl.where(live, p, 0)  # rows and columns that nobody stores compute something that may be read
    image = q // (OH * OW)
    j = tl.arange(0, BLOCK_J)
    window = (image * (DIGITS * LINES) + q // OW % OH * STRIDE_H) * (LINE * CHANNELS) + q % OW * (STRIDE_W * CHANNELS)
    x_ptr += window[:, None] + (j % ROW)[None, :]
    w_ptr += tl.where(k < K, k, 0)[None, :] * (DIGITS * FILTER) + j[:, None]
    sums0 = tl.zeros((BLOCK_P, BLOCK_K), dtype=tl.int32)
    sums1, sums2, sums3, sums4 = sums0, sums0, sums0, sums0
    for step in range(STEPS):
        row = step * ROWS + j // ROW
        line = tl.where(row < R, row, 0)[None, :] * (LINE * CHANNELS)  # beyond the last row weights are 0
        x0 = tl.load(x_ptr + line)
        x1 = tl.load(x_ptr + line + IMAGE)
        x2 = tl.load(x_ptr + line + 2 * IMAGE)
        w0 = tl.load(w_ptr + step * BLOCK_J)
        w1 = tl.load(w_ptr + step * BLOCK_J + FILTER)
        w2 = tl.load(w_ptr + step * BLOCK_J + 2 * FILTER)
        sums0 = tl.dot(x0, w0, sums0, out_dtype=tl.int32)
        sums1 = tl.dot(x0, w1, sums1, out_dtype=tl.int32)
        sums2 = tl.dot(x0, w2, sums2, out_dtype=tl.int32)
        sums1 = tl.dot(x1, w0, sums1, out_dtype=tl.int32)
        sums2 = tl.dot(x1, w1, sums2, out_dtype=tl.int32)
        sums3 = tl.dot(x1, w2, sums3, out_dtype=tl.int32)
        sums2 = tl.dot(x2, w0, sums2, out_dtype=tl.int32)
        sums3 = tl.dot(x2, w1, sums3, out_dtype=tl.int32)
        sums4 = tl.dot(x2, w2, sums4, out_dtype=tl.int32)
    low = sums0 + sums1.to(tl.int64) * 2**8
    sums = low + sums2.to(tl.int64) * 2**16 + sums3.to(tl.int64) * 2**24 + sums4.to(tl.int64) * 2**32
    power = tl.load(powers_ptr + images + image) * tl.load(weight_power_ptr)  # of two: exact
    y = (sums.to(tl.float64) * power[:, None]).to(tl.float32)
    _finish_values(
        y, p, k, live, K, bias_ptr, norm_ptr, other_ptr, first_ptr, second_ptr, value_ptr, codes_ptr, more_ptr, CAP,
        LIMIT,
    )  # fmt: skip


class Lines(NamedTuple):
    """How an image lies in memory: lines with zeros around, pixels of a line; bytes that a row of the filter spans."""

    lines: int
    pixels: int
    row: int


def lines_of(geometry: Geometry) -> Lines:
    """Lines as long as the last window reaches, a multiple of 16 bytes."""
    row = triton.next_power_of_2(max(geometry.columns * CHANNELS.value, 16))
    reach = (geometry.out_width - 1) * geometry.stride[1] + row // CHANNELS.value
    wide = max(geometry.width + 2 * geometry.padding[1], reach)
    return Lines(geometry.height + 2 * geometry.padding[0], triton.cdiv(wide, 4) * 4, row)


def serves(geometry: Geometry, samples: int) -> bool:
    """Whether these kernels can run such a layer, in fixed point of `bitdial.exact`."""
    terms = geometry.rows * geometry.columns * geometry.channels
    lines = lines_of(geometry)
    pixels = lines.lines * lines.pixels
    return (
        geometry.channels <= CHANNELS.value
        and FEWEST_TERMS <= terms <= MOST_TERMS
        and lines.row <= LONGEST_ROW
        and pixels <= MOST_BLOCKS * PIXELS
        and samples * pixels * DIGITS.value * CHANNELS.value < INDEXABLE
    )


def default_tiles(geometry: Geometry) -> Tiles:
    """Tiles of a convolution."""
    row = lines_of(geometry).row
    return Tiles(64, max(32, row), power_of_2(geometry.out_channels, 16, 64), 4, 3)


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
    lines = lines_of(g)
    rows = tiles.inputs // lines.row
    images = cut(x, powers, (g.height, g.width, g.channels), g.padding, (lines.lines, lines.pixels))
    filters = cut(weight, None, (*g[6:8], g.channels), (0, 0), (triton.cdiv(g.rows, rows) * rows, lines.row // 4))
    _convolve_digits[(triton.cdiv(pixels, tiles.pixels), triton.cdiv(g.out_channels, tiles.outputs))](
        images, filters, powers, weight_power, bias, *finish_operands(finish), *outputs, x.shape[0], pixels,
        lines.lines, lines.pixels, *g[3:7], lines.row, *g.stride, **ending(finish.cap), BLOCK_P=tiles.pixels,
        BLOCK_J=tiles.inputs, BLOCK_K=tiles.outputs, num_warps=tiles.warps, num_stages=tiles.stages,
        enable_fp_fusion=False,
    )  # fmt: skip
    return outputs


def cut(
    x: Tensor, inverse: Tensor | None, sizes: tuple[int, int, int], around: tuple[int, int], lines: tuple[int, int]
) -> Tensor:
    """The digits (N, 3, *lines, 4) of the samples of x, of `sizes` (H, W, C) in this order, with zeros `around`."""
    digits = torch.empty((x.shape[0], DIGITS.value, *lines, CHANNELS.value), dtype=torch.int8, device=x.device)
    _digits[(x.shape[0], triton.cdiv(lines[0] * lines[1], PIXELS))](
        x, inverse, digits, *sizes, *around, *lines, PIXELS=PIXELS, enable_fp_fusion=False
    )
    return digits
