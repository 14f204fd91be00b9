"""Layers on integer codes: convolutions (a linear layer is one of 1x1) and epilogues, as models call them.

Results equal those of `live.engines.exact` bit for bit on every path: Triton kernels on a GPU, oneDNN's integer
products on the CPU where they are exact, else sums in float64. A compiler on the CPU sees the operator of the sums and
the rest in plain PyTorch, of which it makes one loop.
"""

import torch
from torch import Tensor

from bitdial.kernels import ops
from bitdial.kernels.conv_shape import ConvShape
from bitdial.kernels.epilogue import Epilogue, Outputs
from bitdial.kernels.operands import IntegerOperands
from bitdial.kernels.reference import epilogue as in_torch
from bitdial.kernels.reference.integer_sums import raised


def run_conv2d(x: Tensor, operands: IntegerOperands, shape: ConvShape, epilogue: Epilogue) -> Outputs:
    """The convolution of stored codes x (N, C, H, W), and its epilogue."""
    if in_parts(x):
        weight, pad, correction, factor, doubled, bias = operands
        sums = ops.integer_sums(raised(x), weight, pad, correction, doubled, *shape.moves)
        return in_torch.scale_sums(sums, factor, bias, epilogue)
    return ops.integer_conv2d(x, *operands, *shape.moves, *epilogue)


def run_epilogue(x: Tensor, epilogue: Epilogue) -> Outputs:
    """The epilogue of the float32 x; its norm is over the channels of (N, C, H, W) or (..., C)."""
    return in_torch.integer_finish(x, epilogue) if in_parts(x) else ops.integer_finish(x, *epilogue)


def in_parts(x: Tensor) -> bool:
    """Whether a compiler on the CPU is to see plain PyTorch instead of an operator."""
    return torch.compiler.is_compiling() and x.device.type == "cpu"
