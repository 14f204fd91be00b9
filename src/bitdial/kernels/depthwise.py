"""Depthwise convolutions of images with channels first in float32, as calibration learns them.

PyTorch's kernels for them, the gradients' above all, take many times what their bytes cost. On a GPU with Triton each
of the three is one pass. Training has kernels of its own (`training.py`): 16-bit, channels last, with a norm's moments.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from bitdial import functional as bf
from bitdial.kernels.conv_shape import ConvShape
from bitdial.kernels.dispatch import INDEXABLE, use_triton

MOST_CHANNELS = 2**16 - 1  # of a grid


class _Depthwise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, shape: ConvShape) -> Tensor:
        from bitdial.kernels.triton.calibration import depthwise as triton_depthwise

        weight = weight.contiguous()
        ctx.save_for_backward(x, weight)
        ctx.shape = shape
        return triton_depthwise.convolve(x, weight, shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        from bitdial.kernels.triton.calibration import depthwise as triton_depthwise

        x, weight = ctx.saved_tensors
        grad, shape = grads[0].contiguous(), ctx.shape
        dx = triton_depthwise.input_gradient(grad, weight, shape) if ctx.needs_input_grad[0] else None
        dweight = triton_depthwise.weight_gradient(x, grad, shape) if ctx.needs_input_grad[1] else None
        return dx, dweight, None


def fits(conv: nn.Module) -> bool:
    """Whether `convolve` serves this layer, of inputs that `can_convolve` takes: depthwise, nothing unusual."""
    if not isinstance(conv, nn.Conv2d):
        return False
    (rows, columns), (stride, other_stride), padding = conv.kernel_size, conv.stride, conv.padding
    return (
        1 < conv.groups == conv.in_channels == conv.out_channels <= MOST_CHANNELS
        and rows == columns in (3, 5)
        and stride == other_stride in (1, 2)
        and isinstance(padding, tuple)
        and padding[0] == padding[1] < rows
        and conv.dilation == (1, 1)
        and conv.padding_mode == "zeros"
        and conv.bias is None
    )


def can_convolve(x: Tensor, weight: Tensor, conv: Any) -> bool:
    """Whether the kernels run on x for a layer that `fits`: images in float32, channels first in memory."""
    alike = x.dtype == weight.dtype == torch.float32 and not torch.is_autocast_enabled(x.device.type)
    if not (alike and use_triton(x) and x.dim() == 4 and x.is_contiguous() and x.numel() > 0):
        return False
    around = 2 * conv.padding[0]  # the output may be larger than x by this
    return math.prod((*x.shape[:2], x.shape[2] + around, x.shape[3] + around)) < INDEXABLE


def convolve(x: Tensor, weight: Tensor, conv: nn.Conv2d) -> Tensor:
    """The convolution of x with `weight` as `conv` has it, differentiable. Only where it `fits` and `can_convolve`."""
    padding = conv.padding[0]
    assert isinstance(padding, int)
    (_, channels, height, width), (rows, columns), stride = x.shape, conv.kernel_size, conv.stride[0]
    image, filters, moves = (channels, height, width), (channels, rows, columns), ((stride, stride), (padding, padding))
    return bf.apply(_Depthwise, x, weight, ConvShape.of(image, filters, *moves, groups=channels))
