"""Max pools of stored codes, as a PyTorch operator with its schema, its fake and its reference.

A quantizer never turns a larger value into a smaller code, so the largest code of a window is the code of its largest
value: where nobody needs the value, a pool reads and writes a byte a number instead of four.
"""

import functools
import math

import torch
import torch.nn.functional as F
from torch import Tensor

from bitdial.errors import QuantizationError
from bitdial.kernels.integer_ops import INDEXABLE, channels_last, missing_on

LEAST = -128  # of the stored codes; what lies around the image counts as this


@torch.library.custom_op("bitdial::max_pool_codes", mutates_args=())
def max_pool_codes(x: Tensor, kernel: list[int], stride: list[int], padding: list[int], dilation: list[int]) -> Tensor:
    """The largest of the int8 codes x (N, C, H, W) in each window, channels last; LEAST in one without a pixel.

    As `F.max_pool2d`, the numbers for rows and columns: a Triton kernel on a GPU, plain PyTorch elsewhere.
    """
    sizes = pooled_shape(x, kernel, stride, padding, dilation)
    elements = max(x.numel(), math.prod(sizes))
    if missing_on(x.device) is not None or not x.numel() or elements >= INDEXABLE:
        return max_pool_by_torch(x, kernel, stride, padding, dilation)
    from bitdial.kernels.triton.inference import pool as triton_pool

    with torch.cuda.device_of(x):
        return triton_pool.max_pool(channels_last(x), sizes, kernel, stride, padding, dilation)


@max_pool_codes.register_fake
def _(x: Tensor, kernel: list[int], stride: list[int], padding: list[int], dilation: list[int]) -> Tensor:
    sizes = pooled_shape(x, kernel, stride, padding, dilation)
    return torch.empty(sizes, dtype=torch.int8, device=x.device, memory_format=torch.channels_last)


def run_max_pool(x: Tensor, kernel: list[int], stride: list[int], padding: list[int], dilation: list[int]) -> Tensor:
    """`max_pool_codes` of images or of one image (C, H, W)."""
    if x.dim() == 3:
        return max_pool_codes(x[None], kernel, stride, padding, dilation)[0]
    return max_pool_codes(x, kernel, stride, padding, dilation)


def pooled_shape(x: Tensor, kernel: list[int], stride: list[int], padding: list[int], dilation: list[int]) -> list[int]:
    """Sizes of the pool's output; QuantizationError unless x is images that are no smaller than a window."""
    if x.dim() != 4:
        raise QuantizationError(f"a max pool: its input is {tuple(x.shape)}, expected images")
    sizes = [(x.shape[2 + i] + 2 * padding[i] - dilation[i] * (kernel[i] - 1) - 1) // stride[i] + 1 for i in range(2)]
    if min(sizes) < 1:
        raise QuantizationError(f"a max pool: its input {tuple(x.shape)} is smaller than its window {tuple(kernel)}")
    return [*x.shape[:2], *sizes]


def max_pool_by_torch(
    x: Tensor, kernel: list[int], stride: list[int], padding: list[int], dilation: list[int]
) -> Tensor:
    """The reference: the largest of a window's rows, and of these the largest column. PyTorch pools no int8."""
    (top, left), pixels = padding, x.permute(0, 2, 3, 1)
    pixels = F.pad(pixels, (0, 0, left, left, top, top), value=LEAST)
    rows = _largest(pixels, kernel[0], stride[0], dilation[0])
    columns = _largest(rows.transpose(1, 2), kernel[1], stride[1], dilation[1])
    return channels_last(columns.permute(0, 3, 2, 1))


def _largest(x: Tensor, taps: int, stride: int, dilation: int) -> Tensor:
    """The largest of the windows along dimension 1."""
    reach = x.shape[1] - dilation * (taps - 1)
    return functools.reduce(torch.maximum, (x[:, t * dilation :][:, :reach:stride] for t in range(taps)))
