"""What operators take of a layer beside its input."""

from typing import NamedTuple

from torch import Tensor

PAD_CODES = 4096  # how often `pad` holds the code of 0: programs on a GPU read it at different places


class IntegerOperands(NamedTuple):
    """A layer on integer codes, in the order of `bitdial::integer_conv2d`."""

    weight: Tensor  # (K, R, S, C / groups) int8
    pad: Tensor  # (PAD_CODES,) int8: the stored code of the value 0
    correction: Tensor  # (K,) int32: -pad times the sum of the filter's integers
    factor: Tensor  # (K,) float32: act_scale * weight_step
    doubled: Tensor | None  # (1,) int32: while it is 1 and not 0, integers are 2 * weight + 1; None: they never are
    bias: Tensor | None  # (K,) float32


class FixedPointOperands(NamedTuple):
    """An unquantised layer in fixed point, in the order of `bitdial::fixed_point_conv2d`; all but the bias float64."""

    weight: Tensor  # (K, R, S, C): whole numbers
    sample_scales: Tensor  # (2, N): 1 / power and power of two of each sample
    weight_power: Tensor  # (1,): the power of two of the weight
    bias: Tensor | None  # (K,) float32
