"""A batch norm by its kept statistics, whose weight and bias learn, with the ReLU behind it.

PyTorch's backward pass of such a norm takes many times what its bytes cost. On a GPU with Triton this is one pass
forward and one backward, in either memory layout of images.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from bitdial import functional as bf
from bitdial.kernels.dispatch import INDEXABLE, use_triton
from bitdial.kernels.fake_quantize import dense, like


class _KeptNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, var: Tensor, eps: float, relu_max: float | None
    ) -> Tensor:
        from bitdial.kernels.triton.calibration import kept_norm as triton_kept_norm

        x = dense(x)
        ctx.save_for_backward(x, weight, bias, mean, var)
        ctx.settings = eps, relu_max
        return triton_kept_norm.forward(x, (weight, bias, mean, var), eps, relu_max)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        from bitdial.kernels.triton.calibration import kept_norm as triton_kept_norm

        x, *line = ctx.saved_tensors
        wants = ctx.needs_input_grad[0], any(ctx.needs_input_grad[1:3])
        grad = like(grads[0], x)
        dx, learned = triton_kept_norm.backward(grad, x, tuple(line), *ctx.settings, wants=wants)
        dweight, dbias = (None, None) if learned is None else learned
        return dx, dweight, dbias, None, None, None, None


def can_normalize(norm: nn.Module, x: Tensor) -> bool:
    """Whether `normalize` serves this norm, which computes as PyTorch's: in eval mode, with all that one has."""
    line = [getattr(norm, name) for name in ("weight", "bias", "running_mean", "running_var")]
    return (
        not norm.training
        and use_triton(x)
        and 0 < x.numel() < INDEXABLE
        and all(part is not None and part.dtype == x.dtype == torch.float32 for part in line)
    )


def normalize(x: Tensor, norm: Any, relu_max: float | None) -> Tensor:
    """`norm` of x, clipped to [0, relu_max] unless that is None, differentiable. Only where `can_normalize`."""
    line = (norm.weight, norm.bias, norm.running_mean, norm.running_var)
    return bf.apply(_KeptNorm, x, *line, norm.eps, relu_max)
