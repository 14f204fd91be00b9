"""Layers kept in float, and global average pools, as PyTorch operators on integer sums; see `live.engines.exact`.

`fixed_point_conv2d` is a convolution (or linear layer: 1x1) and what follows it, `fixed_point_mean` the mean of each
image. Both take the power of two of each sample, which `sample_powers` gives.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from bitdial.functional.fixed_point import fixed_point_powers, mean_of_images
from bitdial.kernels.integer_ops import (
    INDEXABLE,
    Outputs,
    channels_last,
    empty_outputs,
    filled,
    finish_by_torch,
    in_parts,
    like,
    missing_on,
)
from bitdial.kernels.reference.integer_sums import output_shape

NO_DILATION = [1, 1]
LARGEST_SAMPLE = 65535 * 1024  # numbers that the kernel can round: blocks of 1,024, of which a GPU takes so many
CHUNK_NUMBERS = 1 << 18  # float64 numbers of windows at a time, 2 MB: they stay in a cache


@torch.library.custom_op("bitdial::fixed_point_conv2d", mutates_args=())
def fixed_point_conv2d(
    x: Tensor,
    weight: Tensor,
    powers: Tensor,
    weight_power: Tensor,
    bias: Tensor | None,
    norm: Tensor | None,
    other: Tensor | None,
    first: Tensor | None,
    second: Tensor | None,
    stride: list[int],
    padding: list[int],
    cap: float | None,
    keep: bool,
) -> Outputs:
    """The convolution of the float32 x (N, C, H, W), rounded to fixed point, and what follows it.

    `powers` (2, N) are 1 / power and power of each sample, `weight` (K, R, S, C) whole numbers, `weight_power` (1,)
    their power: all float64. The rest as for `integer_conv2d`.
    """
    sizes = output_shape(x, weight, stride, padding, NO_DILATION)
    surrounded = math.prod(size + 2 * zeros for size, zeros in zip(x.shape, (0, 0, *padding), strict=True))
    fits = 0 < max(surrounded, math.prod(sizes)) < INDEXABLE and surrounded <= LARGEST_SAMPLE * x.shape[0]
    if missing_on(x.device) is None and x.numel() and fits:
        from bitdial.kernels.triton.inference import fixed_point as kernels
        from bitdial.kernels.triton.inference.epilogue import Finish
        from bitdial.kernels.triton.inference.tiles import Geometry

        x = channels_last(x)
        steps, zeros = ((s[0], s[1]) for s in (stride, padding))
        geometry = Geometry.of(x, weight, steps, zeros, (1, 1), 1)
        finish = Finish(norm, like(other, sizes), cap, first, second, keep)
        with torch.cuda.device_of(x):
            return filled(kernels.convolve(x, weight, powers, weight_power, bias, finish, geometry), x.device)
    y = _values(x, weight, powers, weight_power, stride, padding, sizes)
    if bias is not None:
        y.add_(bias.view(-1, 1, 1))
    return finish_by_torch(y, norm, other, first, second, cap, keep)


@fixed_point_conv2d.register_fake
def _(
    x: Tensor,
    weight: Tensor,
    powers: Tensor,
    weight_power: Tensor,
    bias: Tensor | None,
    norm: Tensor | None,
    other: Tensor | None,
    first: Tensor | None,
    second: Tensor | None,
    stride: list[int],
    padding: list[int],
    cap: float | None,
    keep: bool,
) -> Outputs:
    return empty_outputs(output_shape(x, weight, stride, padding, NO_DILATION), x.device, first, second, keep)


@torch.library.custom_op("bitdial::sample_powers", mutates_args=())
def sample_powers(x: Tensor, bits: int) -> Tensor:
    """1 / power and power (2, N) of the samples of the float32 x (N, ...) in fixed point of so many bits."""
    if missing_on(x.device) is not None or not 0 < x.numel() < INDEXABLE:
        return _powers_by_torch(x, bits)
    from bitdial.kernels.triton.inference import sample_scales as kernels

    if not (x.is_contiguous() or x.is_contiguous(memory_format=torch.channels_last)):
        x = x.contiguous()
    with torch.cuda.device_of(x):
        return kernels.sample_powers(x, bits)


@sample_powers.register_fake
def _(x: Tensor, bits: int) -> Tensor:
    return x.new_empty((2, x.shape[0]), dtype=torch.float64)


@torch.library.custom_op("bitdial::fixed_point_mean", mutates_args=())
def fixed_point_mean(x: Tensor, powers: Tensor) -> Tensor:
    """The mean (N, C, 1, 1) of each image of the float32 x (N, C, H, W), rounded to fixed point of these powers."""
    if missing_on(x.device) is not None or not 0 < x.numel() < INDEXABLE:
        return _mean_by_torch(x, powers)
    from bitdial.kernels.triton.inference import sample_scales as kernels

    with torch.cuda.device_of(x):
        return kernels.mean(channels_last(x), powers)


@fixed_point_mean.register_fake
def _(x: Tensor, powers: Tensor) -> Tensor:
    return x.new_empty((*x.shape[:2], 1, 1))


def run_powers(x: Tensor, bits: int) -> Tensor:
    """`sample_powers`, or its parts for a compiler."""
    return _powers_by_torch(x, bits) if in_parts(x) else sample_powers(x, bits)


def run_mean(x: Tensor, bits: int) -> Tensor:
    """`fixed_point_mean` with the powers of x, or its parts for a compiler."""
    powers = run_powers(x, bits)
    return _mean_by_torch(x, powers) if in_parts(x) else fixed_point_mean(x, powers)


def _powers_by_torch(x: Tensor, bits: int) -> Tensor:
    return torch.stack(fixed_point_powers(x, bits, by_sample=True)).view(2, -1)


def _mean_by_torch(x: Tensor, powers: Tensor) -> Tensor:
    inverse, power = powers.view(2, -1, 1, 1, 1)
    return (mean_of_images((x.double() * inverse).round_()) * power).float()


def _values(
    x: Tensor,
    weight: Tensor,
    powers: Tensor,
    weight_power: Tensor,
    stride: list[int],
    padding: list[int],
    sizes: list[int],
) -> Tensor:
    """The sums as float32 numbers of shape `sizes`, channels last; chunk by chunk, a matrix product each.

    Input and weight are multiplied by their powers of two before, which changes no sum but its exponent.
    """
    samples, outputs, height, width = sizes
    (top, left), (_, rows, columns, channels) = padding, weight.shape
    inverse, power = powers.view(2, -1, 1, 1, 1)
    rounded = (x.double() * inverse).round_().permute(0, 2, 3, 1)
    rounded = F.pad(rounded, (0, 0, left, left, top, top)).contiguous().mul_(power)
    image, line, pixel, _ = rounded.stride()
    # A window is as many pieces of memory as the filter has rows.
    windows = rounded.as_strided(
        (samples, height, width, rows, columns * channels), (image, stride[0] * line, stride[1] * pixel, line, 1)
    )
    filters = weight.reshape(outputs, -1).t() * weight_power
    y = x.new_empty((samples, height, width, outputs))
    of_a_line = width * filters.shape[0]
    lines = max(1, min(height, CHUNK_NUMBERS // of_a_line)) if x.device.type == "cpu" else height
    together = max(1, CHUNK_NUMBERS // (height * of_a_line) if x.device.type == "cpu" else samples)
    held = rounded.new_empty((min(together, samples) * lines * width, filters.shape[0]))
    sums = rounded.new_empty((held.shape[0], outputs))
    for sample in range(0, samples, together):
        for first in range(0, height, lines):
            some = slice(sample, sample + together), slice(first, first + lines)
            part, target = windows[some], y[some]
            count = part[..., 0, 0].numel()
            held[:count].view(part.shape).copy_(part)
            torch.mm(held[:count], filters, out=sums[:count])
            target.copy_(sums[:count].view(target.shape))
    return y.permute(0, 3, 1, 2)
