"""The root-mean-square norm on a GPU, with the residual addition before it: one launch forward and one backward."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from bitdial.kernels.dispatch import use_triton

MOST_COLUMNS = 8192  # a program holds a row


def takes_norm(x: Tensor, gain: Tensor) -> bool:
    """Whether the kernels serve `x` with this gain."""
    fits = gain.shape == x.shape[-1:] and 0 < len(gain) <= MOST_COLUMNS and x.numel() > 0
    return fits and use_triton(x) and use_triton(gain) and x.device == gain.device


class _Norm(torch.autograd.Function):
    """The sum of x and what is added, and its norm; without something to add, x itself, whose gradients join here."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, added: Tensor | None, gain: Tensor, eps: float, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        from bitdial.kernels.triton.training import rms_norm as triton_norm

        x, given = x.contiguous(), None if added is None else added.contiguous()
        total, y, inverse = triton_norm.forward(x, given, gain.contiguous(), eps, dtype)
        ctx.save_for_backward(total, gain, inverse)
        ctx.types = x.dtype, x.dtype if given is None else given.dtype
        ctx.set_materialize_grads(False)
        return total, y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        from bitdial.kernels.triton.training import rms_norm as triton_norm

        total, gain, inverse = ctx.saved_tensors
        total_grad, grad = (None if g is None else g.contiguous() for g in grads)
        if grad is None:
            assert total_grad is not None
            dx, dadded, dgain = *(total_grad.to(dtype) for dtype in ctx.types), None
        else:
            dx, dadded, dgain = triton_norm.backward(
                grad, total_grad, total, gain.contiguous(), inverse, types=ctx.types, learns=ctx.needs_input_grad[2]
            )
        return dx, dadded if ctx.needs_input_grad[1] else None, dgain, None, None


def add_and_norm(
    x: Tensor, added: Tensor | None, gain: Tensor, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """`x` plus `added`, if that is not None, and the norm of it in `dtype`; only where `takes_norm`.

    Who needs `x` besides its norm takes it from here, too: then its gradients are added in the kernel.
    """
    found: tuple[Tensor, Tensor] = _Norm.apply(x, added, gain, eps, dtype)
    return found
