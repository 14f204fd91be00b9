"""Triton kernels of layers on integer codes: convolutions (a linear layer is one of 1x1), and what follows a layer.

Everything is channels last. A convolution is a matrix product whose left rows are gathered while it runs: for each tap
of the filter, a tile of (pixels, input channels) against a tile of (input channels, output channels), int8 tensor
cores, int32 sums. Pixels outside the image are read from `pad`, a row that holds the code of the value 0, so no load
has a mask where the channels fill their tiles, and all of them are 16 bytes wide where there are 16 channels.

Codes are stored as int8: those of an unsigned kind less 128. With x the stored code and pad the stored code of 0, a
layer sums (x - pad) * w = x * w - pad * w, the second part of which is `correction`, a number for each output channel.
Weights that are 2 * w + 1 and do not fit int8 (`halves`: centred codes of 8 bits) take 2 * sum(x * w) + sum(x).

What follows the sum is float32 in the order of `bitdial.exact`, each operation rounded once: the kernels are compiled
without contraction to multiply-adds.
"""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from bitdial.kernels.triton_quantize import _clip, _nearest, _ratio

FINISH_BLOCK = 1024
PROCESSORS = 132  # of an H200; fewer programs leave some idle


class Geometry(NamedTuple):
    """Sizes of a convolution: of the input, the output and the filter, and how the filter moves."""

    height: int
    width: int
    channels: int
    out_height: int
    out_width: int
    out_channels: int
    rows: int
    columns: int
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]
    groups: int

    @classmethod
    def of(
        cls,
        x: Tensor,
        weight: Tensor,
        stride: tuple[int, int],
        padding: tuple[int, int],
        dilation: tuple[int, int],
        groups: int,
    ) -> "Geometry":
        """That of x (N, C, H, W) and weight (K, R, S, C / groups)."""
        _, c, h, w = x.shape
        k, r, s, _ = weight.shape
        oh, ow = (
            (size + 2 * padding[i] - dilation[i] * (taps - 1) - 1) // stride[i] + 1
            for i, (size, taps) in enumerate(((h, r), (w, s)))
        )
        return cls(h, w, c, oh, ow, k, r, s, stride, padding, dilation, groups)

    @property
    def is_depthwise(self) -> bool:
        """Whether each channel has a filter of its own."""
        return self.groups == self.channels == self.out_channels


class Finish(NamedTuple):
    """What follows a layer's sums: norm (2, channels), addition, ReLU, quantizers (see `bitdial.kernels.integer`)."""

    norm: Tensor | None
    other: Tensor | None
    cap: float | None
    first: Tensor | None
    second: Tensor | None
    keep: bool


class Tiles(NamedTuple):
    """How a kernel cuts its work: pixels, input channels, output channels; warps and pipeline stages."""

    pixels: int
    inputs: int
    outputs: int
    warps: int
    stages: int


@triton.jit
def _code(y, quantizer_ptr):  # type: ignore[no-untyped-def]
    """The stored int8 code of y."""
    scale, zero = tl.load(quantizer_ptr), tl.load(quantizer_ptr + 1)
    least, most = tl.load(quantizer_ptr + 2) - zero, tl.load(quantizer_ptr + 3) - zero
    whole = _nearest(_clip(_ratio(y, scale, least, most), least, most))
    return (whole + (zero - tl.load(quantizer_ptr + 4))).to(tl.int8)


@triton.jit
def _finish_tile(  # type: ignore[no-untyped-def]
    y,
    at,
    channel,
    live,
    norm_ptr,
    other_ptr,
    first_ptr,
    second_ptr,
    value_ptr,
    codes_ptr,
    more_ptr,
    K: tl.constexpr,
    CAP: tl.constexpr,
    LIMIT: tl.constexpr,
):
    """Norm, addition, ReLU and quantizers of the tile y, which lies at `at`; what is None is left out."""
    if norm_ptr is not None:
        used = channel < K
        y = y * tl.load(norm_ptr + channel, mask=used, other=0.0)
        y = y + tl.load(norm_ptr + K + channel, mask=used, other=0.0)
    if other_ptr is not None:
        y = y + tl.load(other_ptr + at, mask=live, other=0.0)
    if CAP:
        y = tl.maximum(y, 0.0)
    if LIMIT is not None:
        y = tl.minimum(y, LIMIT)
    if value_ptr is not None:
        tl.store(value_ptr + at, y, mask=live)
    if first_ptr is not None:
        tl.store(codes_ptr + at, _code(y, first_ptr), mask=live)
    if second_ptr is not None:
        tl.store(more_ptr + at, _code(y, second_ptr), mask=live)


@triton.jit
def _weights(w_ptr, at, used, EVEN: tl.constexpr):  # type: ignore[no-untyped-def]
    """A tile of int8 weights; the one place that knows how they are stored."""
    if EVEN:
        return tl.load(w_ptr + at)
    else:
        return tl.load(w_ptr + at, mask=used, other=0)


@triton.jit
def _convolve(  # type: ignore[no-untyped-def]
    x_ptr,
    w_ptr,
    pad_ptr,
    correction_ptr,
    factor_ptr,
    bias_ptr,
    norm_ptr,
    other_ptr,
    first_ptr,
    second_ptr,
    value_ptr,
    codes_ptr,
    more_ptr,
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
    DILATION_H: tl.constexpr,
    DILATION_W: tl.constexpr,
    GROUPS: tl.constexpr,
    HALVES: tl.constexpr,
    CAP: tl.constexpr,
    LIMIT: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    CG: tl.constexpr = C // GROUPS
    KG: tl.constexpr = K // GROUPS
    CHUNKS: tl.constexpr = (CG + BLOCK_C - 1) // BLOCK_C
    ACROSS: tl.constexpr = (KG + BLOCK_K - 1) // BLOCK_K
    EVEN: tl.constexpr = CG % BLOCK_C == 0
    PADDED: tl.constexpr = PAD_H > 0 or PAD_W > 0
    # Neighbours share the pixels and differ in the output channels: the pixels are the larger operand.
    group = tl.program_id(1)
    p = tl.program_id(0) // ACROSS * BLOCK_P + tl.arange(0, BLOCK_P)
    k = tl.program_id(0) % ACROSS * BLOCK_K + tl.arange(0, BLOCK_K)
    live = p < pixels
    q = tl.where(live, p, 0)  # rows that nobody stores compute something that may be read
    filter_at = (group * KG + tl.where(k < KG, k, 0)) * (R * S * CG)
    image = q // (OH * OW)
    top = q // OW % OH * STRIDE_H - PAD_H
    left = q % OW * STRIDE_W - PAD_W
    window = ((image * H + top) * W + left) * C + group * CG  # where the filter's corner lies
    sums = tl.zeros((BLOCK_P, BLOCK_K), dtype=tl.int32)
    totals = tl.zeros((BLOCK_P,), dtype=tl.int32)
    for step in range(R * S * CHUNKS):
        tap = step // CHUNKS
        c = step % CHUNKS * BLOCK_C + tl.arange(0, BLOCK_C)
        down, along = tap // S * DILATION_H, tap % S * DILATION_W
        at = x_ptr + (window + (down * W + along) * C)[:, None] + c[None, :]
        if PADDED:
            row, column = top + down, left + along
            inside = (row >= 0) & (row < H) & (column >= 0) & (column < W)
            at = tl.where(inside[:, None], at, pad_ptr + c[None, :])
        if EVEN:
            x = tl.load(at)
        else:
            x = tl.load(at, mask=(c < CG)[None, :], other=0)
        w = _weights(w_ptr, (filter_at + tap * CG)[None, :] + c[:, None], (c < CG)[:, None], EVEN)
        sums = tl.dot(x, w, sums, out_dtype=tl.int32)
        if HALVES:
            totals += tl.sum(x.to(tl.int32), axis=1)
    if HALVES:
        sums = 2 * sums + totals[:, None]
    channel = group * KG + k[None, :]
    used = k[None, :] < KG
    sums += tl.load(correction_ptr + channel, mask=used, other=0)
    y = sums.to(tl.float32) * tl.load(factor_ptr + channel, mask=used, other=0.0)
    if bias_ptr is not None:
        y = y + tl.load(bias_ptr + channel, mask=used, other=0.0)
    _finish_tile(
        y, p[:, None] * K + channel, channel, live[:, None] & used, norm_ptr, other_ptr, first_ptr, second_ptr,
        value_ptr, codes_ptr, more_ptr, K, CAP, LIMIT,
    )  # fmt: skip


@triton.jit
def _convolve_depthwise(  # type: ignore[no-untyped-def]
    x_ptr,
    w_ptr,
    pad_ptr,
    correction_ptr,
    factor_ptr,
    bias_ptr,
    norm_ptr,
    other_ptr,
    first_ptr,
    second_ptr,
    value_ptr,
    codes_ptr,
    more_ptr,
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
    HALVES: tl.constexpr,
    CAP: tl.constexpr,
    LIMIT: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """A channel of its own for each filter: no matrix product, the cost is that of reading and writing."""
    p = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    used = (c < C)[None, :]
    live = (p < pixels)[:, None] & used
    image = p // (OH * OW)
    top = p // OW % OH * STRIDE_H - PAD_H
    left = p % OW * STRIDE_W - PAD_W
    pad = tl.load(pad_ptr)
    sums = tl.zeros((BLOCK_P, BLOCK_C), dtype=tl.int32)
    for r in tl.static_range(R):
        for s in tl.static_range(S):
            row, column = top + r * DILATION_H, left + s * DILATION_W
            inside = (row >= 0) & (row < H) & (column >= 0) & (column < W)
            at = ((image * H + row) * W + column)[:, None] * C + c[None, :]
            x = tl.load(x_ptr + at, mask=live & inside[:, None], other=pad).to(tl.int32)
            w = _weights(w_ptr, c * (R * S) + (r * S + s), c < C, False).to(tl.int32)
            if HALVES:
                w = 2 * w + 1
            sums += x * w[None, :]
    channel = c[None, :]
    sums += tl.load(correction_ptr + channel, mask=used, other=0)
    y = sums.to(tl.float32) * tl.load(factor_ptr + channel, mask=used, other=0.0)
    if bias_ptr is not None:
        y = y + tl.load(bias_ptr + channel, mask=used, other=0.0)
    _finish_tile(
        y, p[:, None] * C + channel, channel, live, norm_ptr, other_ptr, first_ptr, second_ptr, value_ptr, codes_ptr,
        more_ptr, C, CAP, LIMIT,
    )  # fmt: skip


@triton.jit
def _finish(  # type: ignore[no-untyped-def]
    x_ptr,
    norm_ptr,
    other_ptr,
    first_ptr,
    second_ptr,
    value_ptr,
    codes_ptr,
    more_ptr,
    count,
    K: tl.constexpr,
    CAP: tl.constexpr,
    LIMIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = at < count
    y = tl.load(x_ptr + at, mask=live, other=0.0)
    _finish_tile(
        y, at, at % K, live, norm_ptr, other_ptr, first_ptr, second_ptr, value_ptr, codes_ptr, more_ptr, K, CAP, LIMIT
    )


def _power(value: int, least: int, most: int) -> int:
    return min(max(triton.next_power_of_2(value), least), most)


def default_tiles(geometry: Geometry, pixels: int) -> Tiles:
    """Tiles of a convolution of so many output pixels; a guess, not yet measured on a GPU."""
    inputs = _power(geometry.channels // geometry.groups, 32, 128)
    outputs = _power(geometry.out_channels // geometry.groups, 16, 128)
    rows = 64 if pixels <= 8192 else 128
    while outputs > 32 and triton.cdiv(pixels, rows) * triton.cdiv(geometry.out_channels, outputs) < PROCESSORS:
        outputs //= 2
    return Tiles(rows, inputs, outputs, 8 if rows * outputs > 8192 else 4, 4 if inputs < 128 else 3)


def default_depthwise_tiles(geometry: Geometry) -> Tiles:
    """Tiles of a depthwise convolution; a guess, not yet measured on a GPU."""
    channels = _power(geometry.channels, 16, 64)
    return Tiles(2048 // channels, channels, channels, 4, 1)


def convolve(
    x: Tensor,
    weight: Tensor,
    pad: Tensor,
    correction: Tensor,
    factor: Tensor,
    bias: Tensor | None,
    finish: Finish,
    geometry: Geometry,
    *,
    halves: bool,
    tiles: Tiles | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Value and codes after a convolution of x (N, C, H, W), channels last, with weight (K, R, S, C / groups)."""
    g = geometry
    pixels = x.shape[0] * g.out_height * g.out_width
    shape = (x.shape[0], g.out_channels, g.out_height, g.out_width)
    outputs = outputs_for(shape, x.device, finish)
    operands = (x, weight, pad, correction, factor, bias, *finish_operands(finish), *outputs, pixels)
    moves = (*g.stride, *g.padding, *g.dilation)
    constants = {"HALVES": halves, **ending(finish.cap)}
    if g.is_depthwise:
        tiles = tiles or default_depthwise_tiles(g)
        _convolve_depthwise[(triton.cdiv(pixels, tiles.pixels), triton.cdiv(g.channels, tiles.outputs))](
            *operands, g.height, g.width, g.channels, g.out_height, g.out_width, g.rows, g.columns, *moves, **constants,
            BLOCK_P=tiles.pixels, BLOCK_C=tiles.outputs, num_warps=tiles.warps, enable_fp_fusion=False,
        )  # fmt: skip
        return outputs
    tiles = tiles or default_tiles(g, pixels)
    across = triton.cdiv(g.out_channels // g.groups, tiles.outputs)
    _convolve[(triton.cdiv(pixels, tiles.pixels) * across, g.groups)](
        *operands, *g[:8], *moves, g.groups, **constants, BLOCK_P=tiles.pixels, BLOCK_C=tiles.inputs,
        BLOCK_K=tiles.outputs, num_warps=tiles.warps, num_stages=tiles.stages, enable_fp_fusion=False,
    )  # fmt: skip
    return outputs


def finish_value(x: Tensor, finish: Finish) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Value and codes after the float32 x, which is channels last (N, C, H, W) or contiguous (..., C)."""
    outputs = outputs_for(tuple(x.shape), x.device, finish)
    channels = x.shape[1] if x.dim() == 4 else x.shape[-1]
    _finish[(triton.cdiv(x.numel(), FINISH_BLOCK),)](
        x, *finish_operands(finish), *outputs, x.numel(), channels, **ending(finish.cap), BLOCK=FINISH_BLOCK,
        enable_fp_fusion=False,
    )  # fmt: skip
    return outputs


def finish_operands(finish: Finish) -> tuple[Tensor | None, ...]:
    """The tensors that the kernels read at the end of a tile, in their order."""
    return finish.norm, finish.other, finish.first, finish.second


def ending(cap: float | None) -> dict[str, object]:
    """The constants of a ReLU up to `cap`, or of none."""
    return {"CAP": cap is not None, "LIMIT": None if cap is None or math.isinf(cap) else cap}


def outputs_for(
    shape: tuple[int, ...], device: torch.device, finish: Finish
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Memory for what `finish` asks for: value, codes, more codes."""
    layout = torch.channels_last if len(shape) == 4 else torch.contiguous_format

    def made(wanted: bool, dtype: torch.dtype) -> Tensor | None:
        return torch.empty(shape, dtype=dtype, device=device, memory_format=layout) if wanted else None

    first, second = (made(quantizer is not None, torch.int8) for quantizer in (finish.first, finish.second))
    return made(finish.keep, torch.float32), first, second
