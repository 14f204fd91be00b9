"""The soft loss of distillation: T^2 * KL(target || student), whole or in chunks of rows.

Of a language model one row of logits has tens of thousands of numbers, and a step has thousands of rows. As plain
operations the loss would keep five float32 tensors of that size. In chunks it keeps the two it is given: both passes go
through the rows a chunk at a time, in float32, and the backward pass computes the probabilities again. On a GPU with
Triton a kernel does the same without chunks.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from bitdial.kernels.divergence import divergence, takes_divergence

LARGEST = 1 << 24  # logits of a chunk, 64 MiB in float32; no more than these are taken at once


def soft_loss(logits: Tensor, target_logits: Tensor, temperature: float) -> Tensor:
    """T^2 * KL(target || student), averaged over everything but the class dimension (the last)."""
    classes = logits.shape[-1]
    rows, target_rows = logits.reshape(-1, classes), target_logits.reshape(-1, classes)
    if rows.numel() <= LARGEST or len(rows) == 1:
        return soft_losses(rows, target_rows, temperature).mean()
    if takes_divergence(rows, target_rows):
        return divergence(rows, target_rows, temperature)
    mean: Tensor = _InChunks.apply(rows, target_rows.detach(), temperature, max(LARGEST // classes, 1))
    return mean


def soft_losses(logits: Tensor, target_logits: Tensor, temperature: float) -> Tensor:
    """T^2 * KL(target || student) of each row."""
    student = F.log_softmax(logits.float() / temperature, dim=1)
    target = F.log_softmax(target_logits.float() / temperature, dim=1)
    return F.kl_div(student, target, reduction="none", log_target=True).sum(dim=1) * temperature**2


class _InChunks(torch.autograd.Function):
    """The mean of `soft_losses` over the rows, `size` of them at a time; the gradient is that of the logits."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, temperature: float, size: int) -> Tensor:
        ctx.save_for_backward(logits, targets)
        ctx.temperature, ctx.size = temperature, size
        pairs = zip(logits.split(size), targets.split(size), strict=True)
        return torch.cat([soft_losses(rows, wanted, temperature) for rows, wanted in pairs]).mean()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, outer: Tensor) -> tuple[Tensor, None, None, None]:
        logits, targets = ctx.saved_tensors
        gradient = torch.empty_like(logits)
        factor = outer.float() * (ctx.temperature / len(logits))
        parts = (tensor.split(ctx.size) for tensor in (logits, targets, gradient))
        for rows, wanted, place in zip(*parts, strict=True):
            student = F.softmax(rows.float() / ctx.temperature, dim=1)
            target = F.softmax(wanted.float() / ctx.temperature, dim=1)
            place.copy_(student.sub_(target).mul_(factor))
        return gradient, None, None, None
