"""The operators that integer engines call, each in one function, and what follows a product as one record."""

from typing import NamedTuple

from torch import Tensor

from bitdial.kernels.fixed_point_ops import fixed_point_conv2d, run_mean, run_powers
from bitdial.kernels.integer_ops import Outputs, missing_on, run_conv2d, run_finish
from bitdial.kernels.pool_ops import run_max_pool
from bitdial.kernels.switch_ops import switch_

__all__ = ["Outputs", "missing_on", "run_max_pool", "switch_"]


class Epilogue(NamedTuple):
    """What follows a product in the same kernel.

    norm_affine               (2, channels): multiplier and offset of a batch norm
    residual                  is added; it has the shape of the output
    relu_max                  the upper bound of a ReLU
    quantizer_a, quantizer_b  of the layers that read the result
    keep_value                whether the float value is needed beside the codes
    """

    norm_affine: Tensor | None = None
    residual: Tensor | None = None
    relu_max: float | None = None
    quantizer_a: Tensor | None = None
    quantizer_b: Tensor | None = None
    keep_value: bool = True


class Windows(NamedTuple):
    """How the filter of a convolution moves over its input: rows and columns each."""

    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int] = (0, 0)
    dilation: tuple[int, int] = (1, 1)
    groups: int = 1


class LayerOperands(NamedTuple):
    """What a quantised layer brings to its product; see `bitdial.kernels.integer_ops`."""

    integers: Tensor
    pad: Tensor
    correction: Tensor
    factor: Tensor
    doubled: Tensor | None
    bias: Tensor | None


class FixedPointOperands(NamedTuple):
    """What an unquantised layer brings to its product; see `bitdial.kernels.fixed_point_ops`."""

    integers: Tensor
    sample_scales: Tensor
    weight_power: Tensor
    bias: Tensor | None


def convolve(x: Tensor, layer: LayerOperands, windows: Windows, end: Epilogue) -> Outputs:
    """Value and codes behind a quantised layer, for the codes x of images."""
    return run_conv2d(
        x, layer.integers, layer.pad, layer.correction, layer.factor, layer.doubled, layer.bias, end.norm_affine,
        end.residual, end.quantizer_a, end.quantizer_b, list(windows.stride), list(windows.padding),
        list(windows.dilation), windows.groups, end.relu_max, end.keep_value,
    )  # fmt: skip


def convolve_fixed_point(x: Tensor, layer: FixedPointOperands, windows: Windows, end: Epilogue) -> Outputs:
    """Value and codes behind an unquantised layer, for the float32 images x."""
    return fixed_point_conv2d(
        x, layer.integers, layer.sample_scales, layer.weight_power, layer.bias, end.norm_affine, end.residual,
        end.quantizer_a, end.quantizer_b, list(windows.stride), list(windows.padding), end.relu_max, end.keep_value,
    )  # fmt: skip


def finish(x: Tensor, end: Epilogue) -> Outputs:
    """Value and codes behind the float32 x."""
    return run_finish(x, end.norm_affine, end.residual, end.quantizer_a, end.quantizer_b, end.relu_max, end.keep_value)


def sample_scales(x: Tensor, bits: int) -> Tensor:
    """1 / power and power (2, N) of the samples of the float32 x in fixed point."""
    return run_powers(x, bits)


def mean(x: Tensor, bits: int) -> Tensor:
    """The mean of each image of the float32 x in fixed point."""
    return run_mean(x, bits)
