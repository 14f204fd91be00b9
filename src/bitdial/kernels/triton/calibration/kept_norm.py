"""Triton kernels of a batch norm by kept statistics, with the ReLU behind it if there is one.

Memory is seen as (rows, channels), where RUN rows of a channel lie side by side: all pixels of an image, or one where
channels are last. Forward is one pass. Backward is one pass, too: it writes the gradient of x, and sums those of weight
and bias over its rows; a small kernel joins the sums, in a fixed order. The value is computed there again, by the same
operations, so that the ReLU is open where it was.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from bitdial.kernels.triton.training.quantize import _clip

ELEMENTS = 2048  # of a tile
MOST_CHANNELS = 64  # of a tile, where channels are last
PROGRAMS = 2112  # that share a backward pass: 16 for each multiprocessor of an H200


@triton.jit
def _place(r, c, C, RUN: tl.constexpr):  # type: ignore[no-untyped-def]
    """Where rows `r` of channels `c` lie."""
    return ((r // RUN)[:, None] * C + c[None, :]) * RUN + (r % RUN)[:, None]


@triton.jit
def _line(weight_ptr, bias_ptr, mean_ptr, var_ptr, c, C, eps):  # type: ignore[no-untyped-def]
    """Mean, slope and bias of channels `c`."""
    known = c < C
    var = tl.load(var_ptr + c, mask=known, other=1.0)
    slope = tl.div_rn(tl.load(weight_ptr + c, mask=known, other=0.0), tl.sqrt_rn(var + eps))
    mean = tl.load(mean_ptr + c, mask=known, other=0.0)
    return mean[None, :], slope[None, :], tl.load(bias_ptr + c, mask=known, other=0.0)[None, :]


@triton.jit
def _kept_norm_forward(  # type: ignore[no-untyped-def]
    x_ptr,
    weight_ptr,
    bias_ptr,
    mean_ptr,
    var_ptr,
    y_ptr,
    rows,
    eps,
    relu_max,
    C,
    RUN: tl.constexpr,
    RELU: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    r = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    mean, slope, bias = _line(weight_ptr, bias_ptr, mean_ptr, var_ptr, c, C, eps)
    at, live = _place(r, c, C, RUN), (r < rows)[:, None] & (c < C)[None, :]
    y = tl.fma(tl.load(x_ptr + at, mask=live, other=0.0) - mean, slope, bias)
    if RELU:
        y = _clip(y, 0.0, relu_max)
    tl.store(y_ptr + at, y, mask=live)


@triton.jit
def _kept_norm_backward(  # type: ignore[no-untyped-def]
    g_ptr,
    x_ptr,
    weight_ptr,
    bias_ptr,
    mean_ptr,
    var_ptr,
    dx_ptr,
    sums_ptr,
    rows,
    share,
    parts,
    eps,
    relu_max,
    C,
    RUN: tl.constexpr,
    RELU: tl.constexpr,
    INPUT: tl.constexpr,
    SUMS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    part = tl.program_id(0)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    mean, slope, bias = _line(weight_ptr, bias_ptr, mean_ptr, var_ptr, c, C, eps)
    plain = tl.zeros((BLOCK_R, BLOCK_C), dtype=tl.float32)
    dotted = tl.zeros((BLOCK_R, BLOCK_C), dtype=tl.float32)
    for start in range(part * share, tl.minimum((part + 1) * share, rows), BLOCK_R):
        r = start + tl.arange(0, BLOCK_R)
        at, live = _place(r, c, C, RUN), (r < rows)[:, None] & (c < C)[None, :]
        g = tl.load(g_ptr + at, mask=live, other=0.0)
        if RELU or SUMS:
            off = tl.load(x_ptr + at, mask=live, other=0.0) - mean
            if RELU:
                y = tl.fma(off, slope, bias)
                g = tl.where((y > 0.0) & (y < relu_max), g, 0.0)
            if SUMS:
                plain += g
                dotted += g * off
        if INPUT:
            tl.store(dx_ptr + at, g * slope, mask=live)
    if SUMS:
        tl.store(sums_ptr + c * parts + part, tl.sum(plain, axis=0), mask=c < C)
        tl.store(sums_ptr + (C + c) * parts + part, tl.sum(dotted, axis=0), mask=c < C)


@triton.jit
def _join_kept_norm(  # type: ignore[no-untyped-def]
    sums_ptr,
    var_ptr,
    out_ptr,
    parts,
    eps,
    C,
    BLOCK: tl.constexpr,
):
    c = tl.program_id(0)
    plain = tl.zeros((BLOCK,), dtype=tl.float32)
    dotted = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, parts, BLOCK):
        at = start + tl.arange(0, BLOCK)
        plain += tl.load(sums_ptr + c * parts + at, mask=at < parts, other=0.0)
        dotted += tl.load(sums_ptr + (C + c) * parts + at, mask=at < parts, other=0.0)
    tl.store(out_ptr + c, tl.div_rn(tl.sum(dotted), tl.sqrt_rn(tl.load(var_ptr + c) + eps)))
    tl.store(out_ptr + C + c, tl.sum(plain))


def _tiling(x: Tensor) -> tuple[int, int, dict[str, int]]:
    """Rows, channels and constants of a tile of `x`, which is dense."""
    channels = x.shape[1]
    rows, run = x.numel() // channels, math.prod(x.shape[2:]) if x.is_contiguous() else 1
    block_c = 1 if run > 1 else min(triton.next_power_of_2(channels), MOST_CHANNELS)
    block_r = min(triton.next_power_of_2(rows), ELEMENTS // block_c)
    return rows, channels, {"RUN": run, "BLOCK_R": block_r, "BLOCK_C": block_c}


def forward(x: Tensor, line: tuple[Tensor, ...], eps: float, relu_max: float | None) -> Tensor:
    """The norm of x by `line`, its weight, bias, mean and variance; clipped to [0, relu_max] unless that is None."""
    rows, channels, tile = _tiling(x)
    y = torch.empty_like(x)
    _kept_norm_forward[(triton.cdiv(rows, tile["BLOCK_R"]), triton.cdiv(channels, tile["BLOCK_C"]))](
        x, *line, y, rows, eps, relu_max or 0.0, channels, RELU=relu_max is not None, **tile
    )
    return y


def backward(
    grad: Tensor, x: Tensor, line: tuple[Tensor, ...], eps: float, relu_max: float | None, *, wants: tuple[bool, bool]
) -> tuple[Tensor | None, Tensor | None]:
    """The gradient of x, and those of weight and bias (2, channels); `wants` says which of the two are wanted."""
    rows, channels, tile = _tiling(x)
    across = triton.cdiv(channels, tile["BLOCK_C"])
    share = triton.cdiv(triton.cdiv(rows, tile["BLOCK_R"]), triton.cdiv(PROGRAMS, across)) * tile["BLOCK_R"]
    parts = triton.cdiv(rows, share)
    dx = torch.empty_like(x) if wants[0] else None
    sums = torch.empty((2, channels, parts), dtype=torch.float32, device=x.device) if wants[1] else None
    _kept_norm_backward[(parts, across)](
        grad, x, *line, x if dx is None else dx, x if sums is None else sums, rows, share, parts, eps,
        relu_max or 0.0, channels, RELU=relu_max is not None, INPUT=wants[0], SUMS=wants[1], **tile,
    )  # fmt: skip
    if sums is None:
        return dx, None
    joined = torch.empty((2, channels), dtype=torch.float32, device=x.device)
    block = min(triton.next_power_of_2(parts), ELEMENTS)
    _join_kept_norm[(channels,)](sums, line[3], joined, parts, eps, channels, BLOCK=block, num_warps=1)
    return dx, joined
