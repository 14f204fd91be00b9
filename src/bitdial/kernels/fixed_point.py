"""Layers kept in float as a PyTorch operator on integer sums; see `bitdial.exact` for the arithmetic."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from bitdial.kernels.integer import (
    INDEXABLE,
    Outputs,
    channels_last,
    empty_outputs,
    filled,
    finish_by_torch,
    like,
    missing_on,
)
from bitdial.kernels.integer_sums import output_shape

NO_DILATION = [1, 1]


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
    if missing_on(x.device) is None and x.numel() and 0 < max(x.numel(), math.prod(sizes)) < INDEXABLE:
        from bitdial.kernels import triton_fixed_point as kernels
        from bitdial.kernels.integer_tiles import Geometry
        from bitdial.kernels.triton_finish import Finish

        x = channels_last(x)
        steps, zeros = ((s[0], s[1]) for s in (stride, padding))
        geometry = Geometry.of(x, weight, steps, zeros, (1, 1), 1)
        finish = Finish(norm, like(other, sizes), cap, first, second, keep)
        with torch.cuda.device_of(x):
            return filled(kernels.convolve(x, weight, powers, weight_power, bias, finish, geometry), x.device)
    inverse, power = powers.view(2, -1, 1, 1, 1)
    with torch.backends.cudnn.flags(enabled=False):  # it may choose transforms that are not exact
        sums = F.conv2d((x.double() * inverse).round_(), weight.permute(0, 3, 1, 2), None, stride, padding)
    y = channels_last((sums * power * weight_power).float())
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
