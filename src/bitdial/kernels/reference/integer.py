"""Layers on integer codes in plain PyTorch; `integer_sums` says how the sums are taken."""

import math

from torch import Tensor

from bitdial.kernels.conv_shape import ConvShape
from bitdial.kernels.epilogue import Epilogue, Outputs, channels_last
from bitdial.kernels.operands import IntegerOperands
from bitdial.kernels.reference.epilogue import scale_sums
from bitdial.kernels.reference.integer_sums import exact_sums, float64_sums, lowered

MOST_TERMS = (2**31 - 1) // 255**2  # products of 8-bit numbers whose sum fits int32
INDEXABLE = 2**31


def integer_conv2d(x: Tensor, operands: IntegerOperands, shape: ConvShape, epilogue: Epilogue) -> Outputs:
    """The convolution of stored codes x (N, C, H, W), and its epilogue."""
    weight, pad, correction, factor, doubled, bias = operands
    if fits_int32(x, weight, shape):
        sums = exact_sums(x, weight, pad, correction, doubled, shape)
    else:
        sums = channels_last(float64_sums(x, weight, pad, doubled, shape).float())
    return scale_sums(sums, factor, bias, epilogue)


def integer_sums(
    x: Tensor, weight: Tensor, pad: Tensor, correction: Tensor, doubled: Tensor | None, shape: ConvShape
) -> Tensor:
    """The sums alone, as float32, each rounded once, channels last; x are raised codes, uint8."""
    if not x.numel() or math.prod(weight.shape[1:]) > MOST_TERMS:
        return channels_last(float64_sums(lowered(x), weight, pad, doubled, shape).float())
    return exact_sums(x, weight, pad, correction, doubled, shape)


def fits_int32(x: Tensor, weight: Tensor, shape: ConvShape) -> bool:
    """Whether 32 bits hold every sum and index everything; also that there is something to sum."""
    elements = max(x.numel(), math.prod(shape.output(x.shape[0])))
    return x.numel() > 0 and elements < INDEXABLE and math.prod(weight.shape[1:]) <= MOST_TERMS
