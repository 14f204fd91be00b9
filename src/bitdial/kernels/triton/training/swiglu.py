"""Triton kernels of the gate of a language model's MLP: silu(gate) * up; backward computes silu again."""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048


@triton.jit
def _swiglu_forward(gate_ptr, up_ptr, y_ptr, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = at < count
    gate = tl.load(gate_ptr + at, mask=live, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + at, mask=live, other=0.0).to(tl.float32)
    tl.store(y_ptr + at, (gate * tl.sigmoid(gate) * up).to(y_ptr.dtype.element_ty), mask=live)


@triton.jit
def _swiglu_backward(  # type: ignore[no-untyped-def]
    g_ptr,
    gate_ptr,
    up_ptr,
    dgate_ptr,
    dup_ptr,
    count,
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = at < count
    g = tl.load(g_ptr + at, mask=live, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + at, mask=live, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + at, mask=live, other=0.0).to(tl.float32)
    share = tl.sigmoid(gate)
    silu = gate * share
    dgate = g * up * (share + silu * (1.0 - share))
    tl.store(dgate_ptr + at, dgate.to(dgate_ptr.dtype.element_ty), mask=live)
    tl.store(dup_ptr + at, (g * silu).to(dup_ptr.dtype.element_ty), mask=live)


def forward(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, of contiguous tensors of one type."""
    y, count = torch.empty_like(gate), gate.numel()
    _swiglu_forward[(triton.cdiv(count, BLOCK),)](gate, up, y, count, BLOCK=BLOCK)
    return y


def backward(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of the gate and of what it is multiplied with."""
    dgate, dup, count = torch.empty_like(gate), torch.empty_like(up), gate.numel()
    _swiglu_backward[(triton.cdiv(count, BLOCK),)](grad, gate, up, dgate, dup, count, BLOCK=BLOCK)
    return dgate, dup
