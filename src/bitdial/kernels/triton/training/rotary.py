"""Triton kernel of rotary position embeddings: queries and keys of a token in one program.

The two halves of a head are the two coordinates that are turned. `cos` and `sin` may differ between the halves, as
numbers that are given may; backward is the transpose of what forward did, which for equal halves is the turn back.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _turn(  # type: ignore[no-untyped-def]
    x_ptr,
    y_ptr,
    cos_ptr,
    sin_ptr,
    head_stride,
    heads,
    HALF: tl.constexpr,
    BACK: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Turn all heads of the token that `x_ptr` begins; those of y lie one behind the other."""
    h = tl.arange(0, BLOCK_H)[:, None]
    d = tl.arange(0, BLOCK_D)[None, :]
    live = (h < heads) & (d < HALF)
    cos, other_cos = tl.load(cos_ptr + d, mask=d < HALF), tl.load(cos_ptr + HALF + d, mask=d < HALF)
    sin, other_sin = tl.load(sin_ptr + d, mask=d < HALF), tl.load(sin_ptr + HALF + d, mask=d < HALF)
    x = tl.load(x_ptr + h * head_stride + d, mask=live).to(tl.float32)
    other = tl.load(x_ptr + h * head_stride + HALF + d, mask=live).to(tl.float32)
    if BACK:
        y = x * cos + other * other_sin
        other_y = other * other_cos - x * sin
    else:
        y = x * cos - other * sin
        other_y = other * other_cos + x * other_sin
    tl.store(y_ptr + h * (2 * HALF) + d, y.to(y_ptr.dtype.element_ty), mask=live)
    tl.store(y_ptr + h * (2 * HALF) + HALF + d, other_y.to(y_ptr.dtype.element_ty), mask=live)


@triton.jit
def _rotate(  # type: ignore[no-untyped-def]
    q_ptr,
    k_ptr,
    cos_ptr,
    sin_ptr,
    new_q_ptr,
    new_k_ptr,
    q_row,
    q_head,
    q_token,
    k_row,
    k_head,
    k_token,
    angle_row,
    length,
    q_heads,
    k_heads,
    HALF: tl.constexpr,
    BACK: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64)
    row, token = place // length, place % length
    angle = row * angle_row + token * (2 * HALF)
    cos_ptr += angle
    sin_ptr += angle
    q_ptr += row * q_row + token * q_token
    k_ptr += row * k_row + token * k_token
    new_q_ptr += place * q_heads * (2 * HALF)
    new_k_ptr += place * k_heads * (2 * HALF)
    _turn(q_ptr, new_q_ptr, cos_ptr, sin_ptr, q_head, q_heads, HALF, BACK, BLOCK_Q, BLOCK_D)
    _turn(k_ptr, new_k_ptr, cos_ptr, sin_ptr, k_head, k_heads, HALF, BACK, BLOCK_K, BLOCK_D)


def rotate(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, types: tuple[torch.dtype, torch.dtype], *, back: bool = False
) -> tuple[Tensor, Tensor]:
    """`q` and `k` (rows, heads, length, size) turned, in `types`; heads of a token lie one behind the other in memory.

    The last axis of `q` and `k` has no gaps; `cos` and `sin` (1 or rows, length, size) are contiguous, in float32.
    """
    rows, _, length, size = q.shape
    new_q, new_k = (
        torch.empty((rows, length, x.shape[1], size), dtype=dtype, device=x.device).transpose(1, 2)
        for x, dtype in zip((q, k), types, strict=True)
    )
    wide, (q_heads, k_heads) = triton.next_power_of_2(size // 2), (q.shape[1], k.shape[1])
    _rotate[(rows * length,)](
        q, k, cos, sin, new_q, new_k, *q.stride()[:3], *k.stride()[:3], 0 if len(cos) == 1 else length * size, length,
        q_heads, k_heads, HALF=size // 2, BACK=back, BLOCK_Q=triton.next_power_of_2(q_heads),
        BLOCK_K=triton.next_power_of_2(k_heads), BLOCK_D=wide,
        num_warps=min(max(triton.next_power_of_2(q_heads) * wide // 256, 1), 8),
    )  # fmt: skip
    return new_q, new_k
