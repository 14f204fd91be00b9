"""Grouped convolutions whose second derivatives cost no more calls than one group's.

PyTorch differentiates a convolution once by one call, whatever its groups, but a second time by a loop over them:
hundreds of tiny convolutions for each depthwise layer that a product with a Hessian passes.

No loop is needed. A convolution is linear in its input x and in its weight w, so with a third operand y of its output's
shape there is one number that is linear in each of the three:

    T(x, w, y) = sum(y * conv(x, w))

Its derivative in y is the convolution, those in x and w are the two gradients of the convolution, and each of the three
is linear in the two operands that it still has. To differentiate one of them along a vector is to put that vector in
the place of the operand that is missing and to leave out another. So derivatives of any order are these three
functions again, and PyTorch has each of them for all groups at once.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

INPUT, WEIGHT, OUTPUT = range(3)  # the operands of the form, in this order

Operands = Sequence[Tensor | None]


class GroupsAtOnce(TorchFunctionMode):
    """Within this context, the convolutions of torch.nn.functional can be differentiated twice without such a loop.

    Their values are the same, up to the rounding of the bias. Transposed convolutions, those of complex numbers and
    those under autocast stay PyTorch's own.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (F.conv1d, F.conv2d, F.conv3d):
            return _convolve(func, *args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _convolve(
    plain: Any,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: str | int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
) -> Tensor:
    """What `plain`, one of PyTorch's convolutions, says of the same arguments."""
    if groups == 1 or not weight.is_floating_point() or torch.is_autocast_enabled(input.device.type):
        return plain(input, weight, bias, stride, padding, dilation, groups)
    kernel = weight.shape[2:]
    batch = input if input.dim() == weight.dim() else input.unsqueeze(0)
    dilation = _as_list(dilation)
    if padding == "same":
        batch, padding = _pad_to_even(batch, kernel, dilation)
    elif isinstance(padding, str):
        padding = 0
    geometry = (_as_list(stride), _as_list(padding), dilation, False, [0], groups)  # False: not transposed
    output = _derivative(geometry, OUTPUT, (batch, weight, None))
    if bias is not None:
        output = output + bias.reshape(-1, *(1 for _ in kernel))
    return output if batch.dim() == input.dim() else output.squeeze(0)


def _as_list(value: int | Sequence[int]) -> list[int]:
    """PyTorch takes a list of one number for every dimension."""
    return list(value) if isinstance(value, Sequence) else [value]


def _pad_to_even(batch: Tensor, kernel: Sequence[int], dilation: Sequence[int]) -> tuple[Tensor, list[int]]:
    """The padding that keeps the size; where it is odd, one zero of it is put at the end of `batch` already."""
    spread = dilation if len(dilation) == len(kernel) else list(dilation) * len(kernel)
    totals = [step * (taps - 1) for step, taps in zip(spread, kernel, strict=True)]
    if any(total % 2 for total in totals):
        batch = F.pad(batch, [end for total in reversed(totals) for end in (0, total % 2)])
    return batch, [total // 2 for total in totals]


class _Derivative(torch.autograd.Function):
    """The derivative of T in its operand number `missing`, which itself gives no more than its shape."""

    @staticmethod
    def forward(ctx: Any, geometry: tuple[Any, ...], missing: int, *operands: Tensor | None) -> Tensor:
        ctx.geometry, ctx.missing = geometry, missing
        ctx.save_for_backward(*operands)
        input, weight, output = operands
        if missing == OUTPUT:
            return torch.ops.aten.convolution.default(input, weight, None, *geometry)
        wanted = [missing == INPUT, missing == WEIGHT, False]
        gradients = torch.ops.aten.convolution_backward.default(output, input, weight, None, *geometry, wanted)
        return gradients[missing]

    @staticmethod
    def backward(ctx: Any, vector: Tensor) -> tuple[Tensor | None, ...]:
        operands = list(ctx.saved_tensors)
        operands[ctx.missing] = vector
        needed = ctx.needs_input_grad[2:]
        return None, None, *(_derivative(ctx.geometry, i, operands) if needed[i] else None for i in range(3))


def _derivative(geometry: tuple[Any, ...], missing: int, operands: Operands) -> Tensor:
    """The derivative of T in one operand, which can be differentiated in the two others."""
    given = [t.detach() if i == missing and t is not None else t for i, t in enumerate(operands)]
    return _Derivative.apply(geometry, missing, *given)
