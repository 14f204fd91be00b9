"""Drop a share of a tensor's elements at random, in favour of another tensor's: on a GPU with Triton in one pass.

What is drawn goes by a key in the device's memory, so that a recorded CUDA graph draws anew at each replay.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from bitdial import functional as bf
from bitdial.kernels.dispatch import INDEXABLE, use_triton
from bitdial.kernels.fake_quantize import dense, like


class Draws:
    """What tells the draws of many iterations apart: a seed, the iteration, and the number of the draw in it."""

    def __init__(self, generator: torch.Generator):
        seed = generator.initial_seed() % 2**63
        self.key = torch.tensor([seed, 0], dtype=torch.int64, device=generator.device)
        self.number = 0

    def next_iteration(self) -> None:
        """From here on others are drawn; also when a recording of this is replayed."""
        self.key[1:].add_(1)
        self.number = 0

    def next_number(self) -> int:
        """The number of the next draw of this iteration."""
        self.number += 1
        return self.number


class _Drop(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, plain: Tensor, key: Tensor, draw: int, most: int) -> Tensor:
        from bitdial.kernels.triton.calibration import dropping as triton_dropping

        value = dense(value)
        ctx.save_for_backward(key)  # looks whether the iteration has changed since
        ctx.draw, ctx.most, ctx.strides = draw, most, value.stride()
        return triton_dropping.forward(value, like(plain, value), key, draw, most)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        from bitdial.kernels.triton.calibration import dropping as triton_dropping

        (key,) = ctx.saved_tensors
        wants = ctx.needs_input_grad[0], ctx.needs_input_grad[1]
        grad = grads[0]
        if grad.stride() != ctx.strides:
            grad = torch.empty_strided(grad.shape, ctx.strides, dtype=grad.dtype, device=grad.device).copy_(grad)
        return *triton_dropping.backward(grad, key, ctx.draw, ctx.most, wants=wants), None, None, None


def can_drop(value: Tensor, plain: Tensor) -> bool:
    """Whether `drop` serves these two."""
    alike = value.shape == plain.shape and value.dtype == plain.dtype == torch.float32
    return alike and use_triton(value) and 0 < value.numel() < INDEXABLE


def drop(value: Tensor, plain: Tensor, draws: Draws, most: int) -> Tensor:
    """`value`, with elements of `plain` where a byte is at most `most`, differentiable. Only where `can_drop`."""
    return bf.apply(_Drop, value, plain, draws.key, draws.next_number(), most)
