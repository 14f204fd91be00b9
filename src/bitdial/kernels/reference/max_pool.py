"""Max pools of stored codes in plain PyTorch, which pools no int8."""

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from bitdial.kernels.conv_shape import ConvShape
from bitdial.kernels.epilogue import channels_last

LEAST = -128  # of the stored codes; what lies around the image counts as this


def max_pool_codes(x: Tensor, shape: ConvShape) -> Tensor:
    """The largest of each window: of its rows, and of these the largest column."""
    (top, left), pixels = shape.padding, x.permute(0, 2, 3, 1)
    pixels = F.pad(pixels, (0, 0, left, left, top, top), value=LEAST)
    rows = _largest(pixels, shape.rows, shape.stride[0], shape.dilation[0])
    columns = _largest(rows.transpose(1, 2), shape.columns, shape.stride[1], shape.dilation[1])
    return channels_last(columns.permute(0, 3, 2, 1))


def _largest(x: Tensor, taps: int, stride: int, dilation: int) -> Tensor:
    """The largest of the windows along dimension 1."""
    reach = x.shape[1] - dilation * (taps - 1)
    return functools.reduce(torch.maximum, (x[:, t * dilation :][:, :reach:stride] for t in range(taps)))
