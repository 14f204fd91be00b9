"""The gate of a language model's MLP on a GPU: silu(gate) * up in one launch forward and one backward."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from bitdial import functional as bf
from bitdial.kernels.dispatch import use_triton


def takes_swiglu(gate: Tensor, up: Tensor) -> bool:
    """Whether the kernels serve these two."""
    alike = gate.shape == up.shape and gate.dtype == up.dtype and gate.device == up.device
    return alike and use_triton(gate) and gate.numel() > 0


class _Swiglu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        from bitdial.kernels.triton.training import swiglu as triton_swiglu

        gate, up = gate.contiguous(), up.contiguous()
        ctx.save_for_backward(gate, up)
        return triton_swiglu.forward(gate, up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        from bitdial.kernels.triton.training import swiglu as triton_swiglu

        return triton_swiglu.backward(grads[0].contiguous(), *ctx.saved_tensors)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up; only where `takes_swiglu`."""
    return bf.apply(_Swiglu, gate, up)
