"""Triton kernels of the root-mean-square norm: y = x / sqrt(mean(x^2) + eps) * gain, over the last axis.

The residual addition before a norm comes along: forward writes the sum besides its norm, backward adds the gradient
that the sum has from elsewhere. Arithmetic is in float32, whatever the types. The gain's gradient is summed a program's
rows at a time and then over programs, in a fixed order, so it repeats from run to run.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 2048  # elements that a program takes at a time, unless a row has more
PER_WARP = 512
PROGRAMS = 1056  # that share the rows of a backward pass: eight for each multiprocessor of an H200


@triton.jit
def _rms_forward(  # type: ignore[no-untyped-def]
    x_ptr,
    added_ptr,
    gain_ptr,
    total_ptr,
    y_ptr,
    inverse_ptr,
    rows,
    C,
    eps,
    ADD: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    c = tl.arange(0, BLOCK_C)
    at = row.to(tl.int64)[:, None] * C + c[None, :]
    live = (row < rows)[:, None] & (c < C)[None, :]
    x = tl.load(x_ptr + at, mask=live, other=0.0).to(tl.float32)
    if ADD:
        x += tl.load(added_ptr + at, mask=live, other=0.0).to(tl.float32)
        total = x.to(total_ptr.dtype.element_ty)
        tl.store(total_ptr + at, total, mask=live)
        x = total.to(tl.float32)
    gain = tl.load(gain_ptr + c, mask=c < C, other=0.0).to(tl.float32)
    inverse = tl.rsqrt(tl.sum(x * x, axis=1) / C + eps)
    tl.store(inverse_ptr + row, inverse, mask=row < rows)
    tl.store(y_ptr + at, (x * inverse[:, None] * gain[None, :]).to(y_ptr.dtype.element_ty), mask=live)


@triton.jit
def _rms_backward(  # type: ignore[no-untyped-def]
    g_ptr,
    total_g_ptr,
    x_ptr,
    gain_ptr,
    inverse_ptr,
    dx_ptr,
    dadded_ptr,
    parts_ptr,
    rows,
    share,
    C,
    JOIN: tl.constexpr,
    ADDED: tl.constexpr,
    GAIN: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    part = tl.program_id(0)
    c = tl.arange(0, BLOCK_C)
    gain = tl.load(gain_ptr + c, mask=c < C, other=0.0).to(tl.float32)
    sums = tl.zeros((BLOCK_R, BLOCK_C), dtype=tl.float32)
    for start in range(part * share, tl.minimum((part + 1) * share, rows), BLOCK_R):
        row = start + tl.arange(0, BLOCK_R)
        at = row.to(tl.int64)[:, None] * C + c[None, :]
        live = (row < rows)[:, None] & (c < C)[None, :]
        inverse = tl.load(inverse_ptr + row, mask=row < rows, other=0.0)[:, None]
        unit = tl.load(x_ptr + at, mask=live, other=0.0).to(tl.float32) * inverse
        g = tl.load(g_ptr + at, mask=live, other=0.0).to(tl.float32)
        if GAIN:
            sums += g * unit
        g *= gain[None, :]
        dx = (g - unit * (tl.sum(g * unit, axis=1) / C)[:, None]) * inverse
        if JOIN:
            dx += tl.load(total_g_ptr + at, mask=live, other=0.0).to(tl.float32)
        tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), mask=live)
        if ADDED:
            tl.store(dadded_ptr + at, dx.to(dadded_ptr.dtype.element_ty), mask=live)
    if GAIN:
        tl.store(parts_ptr + part.to(tl.int64) * C + c, tl.sum(sums, axis=0), mask=c < C)


def forward(
    x: Tensor, added: Tensor | None, gain: Tensor, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """The sum of `x` and `added` (`x` itself without), its norm in `dtype`, and 1 / root of each row (rows,)."""
    rows, columns = x.numel() // x.shape[-1], x.shape[-1]
    total = x if added is None else torch.empty_like(x, dtype=torch.promote_types(x.dtype, added.dtype))
    y = torch.empty_like(x, dtype=dtype)
    inverse = torch.empty(rows, dtype=torch.float32, device=x.device)
    blocks = _blocks(columns)
    _rms_forward[(triton.cdiv(rows, blocks["BLOCK_R"]),)](
        x, x if added is None else added, gain, total, y, inverse, rows, columns, eps, ADD=added is not None, **blocks
    )
    return total, y, inverse


def backward(
    grad: Tensor,
    total_grad: Tensor | None,
    total: Tensor,
    gain: Tensor,
    inverse: Tensor,
    *,
    types: tuple[torch.dtype, torch.dtype],
    learns: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Gradients of x and of what was added to it, in these two `types`, and that of the gain if it `learns`."""
    rows, columns = len(inverse), total.shape[-1]
    blocks = _blocks(columns)
    share = triton.cdiv(triton.cdiv(rows, blocks["BLOCK_R"]), PROGRAMS) * blocks["BLOCK_R"]
    programs = triton.cdiv(rows, share)
    dx = torch.empty_like(total, dtype=types[0])
    dadded = dx if types[0] == types[1] else torch.empty_like(total, dtype=types[1])
    parts = torch.empty((programs if learns else 0, columns), dtype=torch.float32, device=total.device)
    _rms_backward[(programs,)](
        grad, grad if total_grad is None else total_grad, total, gain, inverse, dx, dadded, parts, rows, share, columns,
        JOIN=total_grad is not None, ADDED=dadded is not dx, GAIN=learns, **blocks,
    )  # fmt: skip
    return dx, dadded, parts.sum(dim=0).to(gain.dtype) if learns else None


def _blocks(columns: int) -> dict[str, int]:
    """What a program takes at a time, and its warps."""
    wide = triton.next_power_of_2(columns)
    rows = max(TILE // wide, 1)
    return {"BLOCK_R": rows, "BLOCK_C": wide, "num_warps": max(rows * wide // PER_WARP, 4)}
