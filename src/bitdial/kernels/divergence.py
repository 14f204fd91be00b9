"""The soft loss on a GPU: two launches where plain PyTorch has twenty for each chunk of rows."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from bitdial import functional as bf
from bitdial.kernels.dispatch import use_triton


def takes_divergence(logits: Tensor, targets: Tensor) -> bool:
    """Whether the kernels serve these rows of logits."""
    return use_triton(logits) and use_triton(targets) and logits.device == targets.device


class _Divergence(torch.autograd.Function):
    """The mean over the rows of T^2 * KL(target || student); the gradient is that of the logits."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, temperature: float) -> Tensor:
        from bitdial.kernels.triton.training import divergence as triton_divergence

        logits, targets = logits.contiguous(), targets.contiguous()
        losses, norms = triton_divergence.forward(logits, targets, temperature)
        ctx.save_for_backward(logits, targets, norms)
        ctx.temperature = temperature
        return losses.mean() * temperature**2

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        from bitdial.kernels.triton.training import divergence as triton_divergence

        logits, targets, norms = ctx.saved_tensors
        factor = grads[0].float() * (ctx.temperature / len(logits))
        return triton_divergence.backward(logits, targets, norms, factor, ctx.temperature), None, None


def divergence(logits: Tensor, targets: Tensor, temperature: float) -> Tensor:
    """The mean of T^2 * KL(target || student) over rows (rows, classes), in float32; only where `takes_divergence`."""
    return bf.apply(_Divergence, logits, targets.detach(), temperature)
