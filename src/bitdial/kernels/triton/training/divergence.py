"""Triton kernels of the soft loss on long rows of logits: KL(target || student) at a temperature, and its gradient.

A program takes a row, in blocks. Forward goes over it twice, for the two normalisers and for the sum: the second time
the row comes from the cache. Backward reads it once. Nothing is kept but the normalisers. `warmth` is 1 / temperature.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096


@triton.jit
def _joined(most, total, values):  # type: ignore[no-untyped-def]
    """The largest value so far and the sum of exp(value - largest), with those of a block; NaN gets into the sum."""
    found = tl.maximum(most, tl.max(values, axis=0))
    return found, total * tl.exp(most - found) + tl.sum(tl.exp(values - found), axis=0)


@triton.jit
def _divergence_forward(  # type: ignore[no-untyped-def]
    student_ptr,
    target_ptr,
    loss_ptr,
    norms_ptr,
    warmth,
    count,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    student_ptr += row * count
    target_ptr += row * count
    lowest = float("-inf")
    student_most, student_sum, target_most, target_sum = -3.0e38, 0.0, -3.0e38, 0.0
    for start in range(0, count, BLOCK):
        at = start + tl.arange(0, BLOCK)
        live = at < count
        student = tl.load(student_ptr + at, mask=live, other=lowest).to(tl.float32) * warmth
        target = tl.load(target_ptr + at, mask=live, other=lowest).to(tl.float32) * warmth
        student_most, student_sum = _joined(student_most, student_sum, student)
        target_most, target_sum = _joined(target_most, target_sum, target)
    student_norm = student_most + tl.log(student_sum)
    target_norm = target_most + tl.log(target_sum)
    total = 0.0
    for start in range(0, count, BLOCK):
        at = start + tl.arange(0, BLOCK)
        live = at < count
        student = tl.load(student_ptr + at, mask=live, other=0.0).to(tl.float32) * warmth - student_norm
        target = tl.load(target_ptr + at, mask=live, other=0.0).to(tl.float32) * warmth - target_norm
        total += tl.sum(tl.where(live, tl.exp(target) * (target - student), 0.0), axis=0)
    tl.store(loss_ptr + row, total)
    tl.store(norms_ptr + 2 * row, student_norm)
    tl.store(norms_ptr + 2 * row + 1, target_norm)


@triton.jit
def _divergence_backward(  # type: ignore[no-untyped-def]
    student_ptr,
    target_ptr,
    norms_ptr,
    factor_ptr,
    gradient_ptr,
    warmth,
    count,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = at < count
    place = row * count + at
    student = tl.load(student_ptr + place, mask=live, other=0.0).to(tl.float32) * warmth
    target = tl.load(target_ptr + place, mask=live, other=0.0).to(tl.float32) * warmth
    apart = tl.exp(student - tl.load(norms_ptr + 2 * row)) - tl.exp(target - tl.load(norms_ptr + 2 * row + 1))
    tl.store(gradient_ptr + place, (apart * tl.load(factor_ptr)).to(gradient_ptr.dtype.element_ty), mask=live)


def forward(student: Tensor, target: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """KL(target || student) of each row (rows,), and the normalisers of both (rows, 2), of logits (rows, classes)."""
    rows, count = student.shape
    losses = torch.empty(rows, dtype=torch.float32, device=student.device)
    norms = torch.empty((rows, 2), dtype=torch.float32, device=student.device)
    if student.numel():
        _divergence_forward[(rows,)](
            student, target, losses, norms, 1.0 / temperature, count, BLOCK=_block(count), num_warps=8
        )
    return losses, norms


def backward(student: Tensor, target: Tensor, norms: Tensor, factor: Tensor, temperature: float) -> Tensor:
    """The gradient of the student's logits: `factor`, a number on the device, times what probabilities differ by."""
    rows, count = student.shape
    gradient, block = torch.empty_like(student), _block(count)
    if student.numel():
        _divergence_backward[(rows, triton.cdiv(count, block))](
            student, target, norms, factor, gradient, 1.0 / temperature, count, BLOCK=block, num_warps=8
        )
    return gradient


def _block(count: int) -> int:
    return min(triton.next_power_of_2(count), BLOCK)
