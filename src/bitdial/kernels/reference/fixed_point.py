"""Unquantised layers and global average pools in fixed point, in plain PyTorch: whole numbers in float64."""

import torch
import torch.nn.functional as F
from torch import Tensor

from bitdial.functional.fixed_point import fixed_point_powers, mean_of_images
from bitdial.kernels.conv_shape import ConvShape
from bitdial.kernels.epilogue import Epilogue, Outputs
from bitdial.kernels.operands import FixedPointOperands
from bitdial.kernels.reference.epilogue import apply_epilogue

CHUNK_NUMBERS = 1 << 18  # float64 numbers of windows at a time, 2 MB: they stay in a cache


def fixed_point_conv2d(x: Tensor, operands: FixedPointOperands, shape: ConvShape, epilogue: Epilogue) -> Outputs:
    """The convolution of the float32 x (N, C, H, W), rounded to fixed point, and its epilogue."""
    y = _values(x, operands, shape)
    if operands.bias is not None:
        y.add_(operands.bias.view(-1, 1, 1))
    return apply_epilogue(y, epilogue)


def sample_powers(x: Tensor, bits: int) -> Tensor:
    """1 / power and power (2, N) of the samples of the float32 x (N, ...) in fixed point of so many bits."""
    return torch.stack(fixed_point_powers(x, bits, by_sample=True)).view(2, -1)


def fixed_point_mean(x: Tensor, sample_scales: Tensor) -> Tensor:
    """The mean (N, C, 1, 1) of each image of the float32 x (N, C, H, W), rounded to fixed point."""
    inverse, power = sample_scales.view(2, -1, 1, 1, 1)
    return (mean_of_images((x.double() * inverse).round_()) * power).float()


def _values(x: Tensor, operands: FixedPointOperands, shape: ConvShape) -> Tensor:
    """The sums as float32 numbers, channels last; chunk by chunk, a matrix product each.

    Input and weight are multiplied by their powers of two before, which changes no sum but its exponent.
    """
    samples, outputs, height, width = shape.output(x.shape[0])
    (top, left), stride = shape.padding, shape.stride
    inverse, power = operands.sample_scales.view(2, -1, 1, 1, 1)
    rounded = (x.double() * inverse).round_().permute(0, 2, 3, 1)
    rounded = F.pad(rounded, (0, 0, left, left, top, top)).contiguous().mul_(power)
    image, line, pixel, _ = rounded.stride()
    # A window is as many pieces of memory as the filter has rows.
    windows = rounded.as_strided(
        (samples, height, width, shape.rows, shape.columns * shape.channels),
        (image, stride[0] * line, stride[1] * pixel, line, 1),
    )
    filters = operands.weight.reshape(outputs, -1).t() * operands.weight_power
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
