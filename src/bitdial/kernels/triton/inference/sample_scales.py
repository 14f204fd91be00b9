"""Triton kernels of fixed point: the power of two of each sample, and the mean of each of its images.

`functional.fixed_point` says it in PyTorch, in about twenty launches on a GPU; here it is two, one more for the mean.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096
MOST_PARTS = 1024  # that a sample is cut into
MEAN_PIXELS, MEAN_CHANNELS = 16, 64


@triton.jit
def _store_scales(largest, bits, scales_ptr, sample, samples):  # type: ignore[no-untyped-def]
    """1 / power and power of a sample whose largest number has the bit pattern `largest`; NaN if it is not finite."""
    wide = largest.to(tl.float32, bitcast=True).to(tl.float64)
    exponent = (wide.to(tl.int64, bitcast=True) >> 52) - 1022
    exponent = tl.where(wide > 0, exponent, 0) - bits
    tl.store(scales_ptr + sample, ((1023 - exponent) << 52).to(tl.float64, bitcast=True))
    power = ((1023 + exponent) << 52).to(tl.float64, bitcast=True)
    tl.store(scales_ptr + samples + sample, tl.where(wide < float("inf"), power, float("nan")))


@triton.jit
def _largest_of_parts(  # type: ignore[no-untyped-def]
    x_ptr,
    largest_ptr,
    scales_ptr,
    bits,
    size,
    share,
    BLOCK: tl.constexpr,
    ALONE: tl.constexpr,
):
    """The largest bit pattern of a number in a part of a sample, without its sign; a part ALONE gives the scales.

    Bit patterns of floats that are not negative have the order of the floats; NaN is the largest.
    """
    sample, part = tl.program_id(0), tl.program_id(1)
    x_ptr += sample.to(tl.int64) * size
    largest = tl.zeros((BLOCK,), dtype=tl.int32)
    for start in range(part * share, (part + 1) * share, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + at, mask=at < size, other=0.0)
        largest = tl.maximum(largest, x.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    if ALONE:
        _store_scales(tl.max(largest, axis=0), bits, scales_ptr, sample, tl.num_programs(0))
    else:
        tl.store(largest_ptr + sample * tl.num_programs(1) + part, tl.max(largest, axis=0))


@triton.jit
def _scales_of_parts(largest_ptr, scales_ptr, bits, parts, PARTS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The scales of a sample, from the largest numbers of its parts."""
    sample, part = tl.program_id(0), tl.arange(0, PARTS)
    largest = tl.load(largest_ptr + sample * parts + part, mask=part < parts, other=0)
    _store_scales(tl.max(largest, axis=0), bits, scales_ptr, sample, tl.num_programs(0))


@triton.jit
def _mean(  # type: ignore[no-untyped-def]
    x_ptr,
    scales_ptr,
    y_ptr,
    channels,
    PIXELS: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """The mean over the pixels of a sample, channels last, of some channels."""
    ROUNDER: tl.constexpr = 6755399441055744.0  # 1.5 * 2^52; what is too large for it is whole without it
    sample = tl.program_id(0)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    x_ptr += sample.to(tl.int64) * PIXELS * channels
    inverse, power = tl.load(scales_ptr + sample), tl.load(scales_ptr + tl.num_programs(0) + sample)
    sums = tl.zeros((BLOCK_P, BLOCK_C), dtype=tl.float64)
    for start in range(0, PIXELS, BLOCK_P):
        p = start + tl.arange(0, BLOCK_P)
        inside = (p < PIXELS)[:, None] & (c < channels)[None, :]
        x = tl.load(x_ptr + p[:, None] * channels + c[None, :], mask=inside, other=0.0)
        sums += (x.to(tl.float64) * inverse + ROUNDER) - ROUNDER
    y = tl.sum(sums, axis=0) / PIXELS * power
    tl.store(y_ptr + sample * channels + c, y.to(tl.float32), mask=c < channels)


def sample_powers(x: Tensor, bits: int) -> Tensor:
    """1 / power and power (2, N) of the samples of x (N, ...), each of which lies in one piece."""
    samples = x.shape[0]
    size = x.numel() // samples
    share = triton.cdiv(triton.cdiv(size, MOST_PARTS), BLOCK) * BLOCK
    parts = triton.cdiv(size, share)
    scales = torch.empty((2, samples), dtype=torch.float64, device=x.device)
    largest = torch.empty((samples, parts), dtype=torch.int32, device=x.device)
    _largest_of_parts[(samples, parts)](x, largest, scales, bits, size, share, BLOCK=BLOCK, ALONE=parts == 1)
    if parts > 1:
        _scales_of_parts[(samples,)](largest, scales, bits, parts, PARTS=triton.next_power_of_2(parts))
    return scales


def mean(x: Tensor, scales: Tensor) -> Tensor:
    """The mean (N, C, 1, 1) of each image of x (N, C, H, W), channels last, in fixed point of these scales (2, N)."""
    samples, channels, height, width = x.shape
    y = torch.empty((samples, channels, 1, 1), dtype=torch.float32, device=x.device)
    _mean[(samples, triton.cdiv(channels, MEAN_CHANNELS))](
        x, scales, y, channels, PIXELS=height * width, BLOCK_P=MEAN_PIXELS, BLOCK_C=MEAN_CHANNELS,
        enable_fp_fusion=False,
    )  # fmt: skip
    return y
