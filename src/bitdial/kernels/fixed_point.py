"""Unquantised layers, and global average pools, on integer sums in fixed point; see `live.engines.exact`.

Each sample is rounded to integers times a power of two of its own, which `run_sample_scales` gives.
"""

from torch import Tensor

from bitdial.kernels import ops
from bitdial.kernels.conv_shape import ConvShape
from bitdial.kernels.epilogue import Epilogue, Outputs
from bitdial.kernels.integer import in_parts
from bitdial.kernels.operands import FixedPointOperands
from bitdial.kernels.reference import fixed_point as in_torch


def run_fixed_point_conv2d(x: Tensor, operands: FixedPointOperands, shape: ConvShape, epilogue: Epilogue) -> Outputs:
    """The convolution of the float32 x (N, C, H, W), rounded to fixed point, and its epilogue."""
    assert shape.groups == 1, "no kernel serves groups"
    assert shape.dilation == (1, 1), "nor dilated filters"
    return ops.fixed_point_conv2d(x, *operands, shape.stride, shape.padding, *epilogue)


def run_sample_scales(x: Tensor, bits: int) -> Tensor:
    """1 / power and power (2, N), float64, of the samples of the float32 x (N, ...) in fixed point of so many bits."""
    return in_torch.sample_powers(x, bits) if in_parts(x) else ops.sample_powers(x, bits)


def run_mean(x: Tensor, bits: int) -> Tensor:
    """The mean (N, C, 1, 1) of each image of the float32 x (N, C, H, W), rounded to fixed point of so many bits."""
    scales = run_sample_scales(x, bits)
    return in_torch.fixed_point_mean(x, scales) if in_parts(x) else ops.fixed_point_mean(x, scales)
