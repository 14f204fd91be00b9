"""Rotary position embeddings on a GPU: queries and keys in one launch forward and one backward."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from bitdial.kernels.dispatch import use_triton

MOST_VALUES = 8192  # of a token's queries: a program holds them


def takes_rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> bool:
    """Whether the kernel serves queries and keys (rows, heads, length, size) at angles (1 or rows, length, size)."""
    tensors = (q, k, cos, sin)
    if not all(use_triton(x) and x.device == q.device for x in tensors) or [x.dim() for x in tensors] != [4, 4, 3, 3]:
        return False
    rows, heads, length, size = q.shape
    return (
        k.shape == (rows, k.shape[1], length, size)
        and cos.shape == sin.shape
        and cos.shape in ((1, length, size), (rows, length, size))
        and size % 2 == 0
        and 0 < max(heads, k.shape[1]) * size <= MOST_VALUES
        and q.numel() > 0
        and k.numel() > 0
        and not (cos.requires_grad or sin.requires_grad)
    )


class _Rotation(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, types: tuple[torch.dtype, torch.dtype]
    ) -> tuple[Tensor, Tensor]:
        from bitdial.kernels.triton.training import rotary as triton_rotary

        cos, sin = cos.float().contiguous(), sin.float().contiguous()
        ctx.save_for_backward(cos, sin)
        ctx.types = q.dtype, k.dtype
        return triton_rotary.rotate(_rows_without_gaps(q), _rows_without_gaps(k), cos, sin, types)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        from bitdial.kernels.triton.training import rotary as triton_rotary

        (q, k), (cos, sin) = (_rows_without_gaps(grad) for grad in grads), ctx.saved_tensors
        return *triton_rotary.rotate(q, k, cos, sin, ctx.types, back=True), None, None, None


def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """`q` and `k` with the halves of each head turned by the angles of its place; only where `takes_rotary`.

    Under autocast they come in its type, into which attention would convert them.
    """
    kind = q.device.type
    if torch.is_autocast_enabled(kind):
        types = (torch.get_autocast_dtype(kind),) * 2
    else:
        types = torch.promote_types(q.dtype, cos.dtype), torch.promote_types(k.dtype, cos.dtype)
    found: tuple[Tensor, Tensor] = _Rotation.apply(q, k, cos, sin, types)
    return found


def _rows_without_gaps(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()
