"""The operators by Triton kernels: a function for each, of the operator's name; see `kernels/ops.py`.

What has nothing in it, and what 32 bits cannot index, is left to the reference.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from bitdial import functional as bf
from bitdial.kernels.conv_shape import ConvShape
from bitdial.kernels.epilogue import Epilogue, Outputs, arranged, channels_last, filled
from bitdial.kernels.operands import FixedPointOperands, IntegerOperands
from bitdial.kernels.reference import epilogue as epilogue_reference
from bitdial.kernels.reference import fixed_point as fixed_point_reference
from bitdial.kernels.reference import integer as integer_reference
from bitdial.kernels.reference import max_pool as max_pool_reference
from bitdial.kernels.reference import packed_linear as packed_linear_reference
from bitdial.kernels.repack import RepackRule, RepackTables
from bitdial.kernels.switch import SwitchTables
from bitdial.kernels.triton.inference import epilogue as epilogue_kernels
from bitdial.kernels.triton.inference import fixed_point, integer, max_pool, sample_scales, switch
from bitdial.kernels.triton.packed import linear, repack
from bitdial.kernels.width_table import SECOND

INDEXABLE = 2**31
LARGEST_SAMPLE = 65535 * 1024  # numbers that the kernel can round: blocks of 1,024, of which a GPU takes so many


def integer_conv2d(x: Tensor, operands: IntegerOperands, shape: ConvShape, epilogue: Epilogue) -> Outputs:
    """The convolution of codes, and its epilogue."""
    if not integer_reference.fits_int32(x, operands.weight, shape):
        return integer_reference.integer_conv2d(x, operands, shape, epilogue)
    epilogue = epilogue.arranged(shape.output(x.shape[0]))
    with torch.cuda.device_of(x):
        return filled(integer.convolve(channels_last(x), operands, shape, epilogue), x.device)


def integer_finish(x: Tensor, epilogue: Epilogue) -> Outputs:
    """The epilogue of the float32 x."""
    if not 0 < x.numel() < INDEXABLE:
        return epilogue_reference.integer_finish(x, epilogue)
    epilogue = epilogue.arranged(x.shape)
    with torch.cuda.device_of(x):
        return filled(epilogue_kernels.apply_epilogue(arranged(x), epilogue), x.device)


def fixed_point_conv2d(x: Tensor, operands: FixedPointOperands, shape: ConvShape, epilogue: Epilogue) -> Outputs:
    """The unquantised convolution in fixed point, and its epilogue."""
    surrounded = math.prod(size + 2 * zeros for size, zeros in zip(x.shape, (0, 0, *shape.padding), strict=True))
    fits = max(surrounded, math.prod(shape.output(x.shape[0]))) < INDEXABLE
    if not x.numel() or not fits or surrounded > LARGEST_SAMPLE * x.shape[0]:
        return fixed_point_reference.fixed_point_conv2d(x, operands, shape, epilogue)
    epilogue = epilogue.arranged(shape.output(x.shape[0]))
    with torch.cuda.device_of(x):
        return filled(fixed_point.convolve(channels_last(x), operands, shape, epilogue), x.device)


def sample_powers(x: Tensor, bits: int) -> Tensor:
    """1 / power and power (2, N) of the samples of x."""
    if not 0 < x.numel() < INDEXABLE:
        return fixed_point_reference.sample_powers(x, bits)
    if not (x.is_contiguous() or x.is_contiguous(memory_format=torch.channels_last)):
        x = x.contiguous()
    with torch.cuda.device_of(x):
        return sample_scales.sample_powers(x, bits)


def fixed_point_mean(x: Tensor, powers: Tensor) -> Tensor:
    """The mean of each image of x in fixed point."""
    if not 0 < x.numel() < INDEXABLE:
        return fixed_point_reference.fixed_point_mean(x, powers)
    with torch.cuda.device_of(x):
        return sample_scales.mean(channels_last(x), powers)


def max_pool_codes(x: Tensor, shape: ConvShape) -> Tensor:
    """The max pool of codes."""
    if not x.numel() or max(x.numel(), math.prod(shape.output(x.shape[0]))) >= INDEXABLE:
        return max_pool_reference.max_pool_codes(x, shape)
    with torch.cuda.device_of(x):
        return max_pool.max_pool(channels_last(x), shape)


def switch_(tables: SwitchTables) -> None:
    """The switch of a whole model."""
    with torch.cuda.device_of(tables.master):
        switch.switch(tables)


def repack_(tables: RepackTables, rule: RepackRule) -> None:
    """Packed words to other widths."""
    second = SECOND[bf.scheme_of(rule.scheme).second_rounding(rule.ties)]
    repack.repack(*tables, high=rule.high, widest=rule.widest, second=second)


def packed_linear(
    x: Tensor,
    words: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    fields: Sequence[int],
    bits: int,
    high: int,
    offset: float,
    group_scale: Tensor | None,
) -> Tensor:
    """A Linear layer that reads packed weights; float32 inputs, which only CPUs take, are the reference's."""
    if x.dtype not in linear.DTYPES:
        return packed_linear_reference.packed_linear(x, words, scale, bias, fields, bits, high, offset, group_scale)
    return linear.linear(
        x, words, scale, bias, linear.Reading(tuple(fields), bits, high, offset), group_scale=group_scale
    )
