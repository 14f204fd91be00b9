"""Triton kernels of the quantizers: one read, one write; scale gradients summed in the same pass.

They give the codes that `bitdial.functional` gives, bit for bit: the division is IEEE's (see `_ratio`), and rounding to
the nearest integer, ties to even, is the addition and subtraction of 1.5 * 2^23, which float32 rounds that way for
anything below 2^22. Clipping comes first, which changes nothing because the bounds are integers. Partial sums go to
memory and are added in a fixed order, so gradients repeat from run to run.
"""

import os

import torch
import triton
import triton.language as tl
from torch import Tensor

from bitdial.kernels.width_table import ActivationCodes, WeightCodes

BLOCK = 4096
ROW_BLOCK = 1024
SUMMED = 16384  # elements of the tile in which parts of a weight gradient are added up
FUSES = tl.constexpr(os.environ.get("TRITON_INTERPRET") != "1")  # the interpreter rounds twice in a multiply-add


@triton.jit
def _clip(v, least, most):  # type: ignore[no-untyped-def]
    v = tl.maximum(v, least, propagate_nan=tl.PropagateNan.ALL)
    return tl.minimum(v, most, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _nearest(v):  # type: ignore[no-untyped-def]
    return (v + 12582912.0) - 12582912.0


@triton.jit
def _quotient(x, scale):  # type: ignore[no-untyped-def]
    """x / scale, rounded as IEEE has it, unless it overflows.

    The GPU's own division leaves its fast path when x is 0, as half of the values behind a ReLU are. Markstein: with
    the reciprocal correctly rounded and a quotient within an ulp (the first correction sees to that), a fused
    correction of the quotient is the correctly rounded one. The minus goes with the scale, which is one number.
    """
    if FUSES:
        inverse, minus = tl.div_rn(1.0, scale), -scale
        ratio = x * inverse
        ratio = tl.fma(tl.fma(ratio, minus, x), inverse, ratio)
        return tl.fma(tl.fma(ratio, minus, x), inverse, ratio)
    else:
        return tl.div_rn(x, scale)


@triton.jit
def _ratio(x, scale, least, most):  # type: ignore[no-untyped-def]
    """x / scale, rounded as IEEE has it, wherever that lies between least - 1 and most + 1; beyond, a value beyond."""
    return _quotient(_clip(x, (least - 1.0) * scale, (most + 1.0) * scale), scale)


@triton.jit
def _row(table_ptr, choice_ptr, NUMBERS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Where the row of a dial begins that is in use."""
    return table_ptr + tl.load(choice_ptr) * NUMBERS


# --- activations ----------------------------------------------------------------------------------

ACT_NUMBERS = tl.constexpr(3)


@triton.jit
def _act_range(table_ptr, choice_ptr):  # type: ignore[no-untyped-def]
    row = _row(table_ptr, choice_ptr, ACT_NUMBERS)
    return tl.load(row), tl.load(row + 1)


@triton.jit
def _act_factor(table_ptr, choice_ptr):  # type: ignore[no-untyped-def]
    return tl.load(_row(table_ptr, choice_ptr, ACT_NUMBERS) + 2)


@triton.jit
def _act_forward(  # type: ignore[no-untyped-def]
    x_ptr,
    scale_ptr,
    table_ptr,
    choice_ptr,
    zero_ptr,
    y_ptr,
    count,
    HAS_ZERO: tl.constexpr,
    BLOCK: tl.constexpr,
):
    least, most = _act_range(table_ptr, choice_ptr)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = at < count
    scale = tl.load(scale_ptr)
    x = tl.load(x_ptr + at, mask=live, other=0.0).to(tl.float32)
    if HAS_ZERO:
        zero = tl.load(zero_ptr)
        least -= zero
        most -= zero
    q = _nearest(_clip(_ratio(x, scale, least, most), least, most))
    tl.store(y_ptr + at, (q * scale).to(y_ptr.dtype.element_ty), mask=live)


@triton.jit
def _act_backward(  # type: ignore[no-untyped-def]
    g_ptr,
    x_ptr,
    scale_ptr,
    table_ptr,
    choice_ptr,
    zero_ptr,
    dx_ptr,
    ds_ptr,
    dz_ptr,
    count,
    HAS_ZERO: tl.constexpr,
    BLOCK: tl.constexpr,
):
    least, most = _act_range(table_ptr, choice_ptr)
    factor = _act_factor(table_ptr, choice_ptr)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = at < count
    scale = tl.load(scale_ptr)
    g = tl.load(g_ptr + at, mask=live, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + at, mask=live, other=0.0).to(tl.float32)
    if HAS_ZERO:
        zero = tl.load(zero_ptr)
        v = _ratio(x, scale, least - zero, most - zero)
        q = _nearest(_clip(v, least - zero, most - zero))
        inside = (v + zero > least) & (v + zero < most)
    else:
        v = _ratio(x, scale, least, most)
        q = _nearest(_clip(v, least, most))
        inside = (v > least) & (v < most)
    dx = tl.where(inside, g, 0.0)
    tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), mask=live)
    tl.store(ds_ptr + tl.program_id(0), tl.sum(g * (q - tl.where(inside, v, 0.0))) * factor)
    if HAS_ZERO:
        tl.store(dz_ptr + tl.program_id(0), tl.sum((dx - g) * scale) * factor)


def act_forward(x: Tensor, codes: ActivationCodes, zero_point: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Fake-quantised `x` (dense in memory, any layout) in `dtype`; `zero_point` is a whole number (1,) or None."""
    y, count = torch.empty_like(x, dtype=dtype), x.numel()
    if count:
        _act_forward[(triton.cdiv(count, BLOCK),)](
            x, codes.scale, *codes.dial, codes.scale if zero_point is None else zero_point, y, count,
            HAS_ZERO=zero_point is not None, BLOCK=BLOCK,
        )  # fmt: skip
    return y


def act_backward(
    grad: Tensor, x: Tensor, codes: ActivationCodes, zero_point: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Gradients of x, scale (0-d) and zero-point (0-d); `grad` has the memory layout of `x`."""
    dx, count = torch.empty_like(x), x.numel()
    blocks = triton.cdiv(count, BLOCK)
    parts = torch.empty((1 if zero_point is None else 2, blocks), dtype=torch.float32, device=x.device)
    if count:
        _act_backward[(blocks,)](
            grad, x, codes.scale, *codes.dial, codes.scale if zero_point is None else zero_point, dx, parts[0],
            parts[-1], count, HAS_ZERO=zero_point is not None, BLOCK=BLOCK,
        )  # fmt: skip
    sums = parts.sum(dim=1)
    return dx, sums[0], None if zero_point is None else sums[1]


# --- weights --------------------------------------------------------------------------------------

WEIGHT_NUMBERS = tl.constexpr(11)


@triton.jit
def _weight_codes(ratio, row, FIRST_FLOOR: tl.constexpr, SECOND: tl.constexpr):  # type: ignore[no-untyped-def]
    """The low codes; at the highest width, where there is nothing to narrow, the second rounding changes nothing."""
    least_high, most_high = tl.load(row), tl.load(row + 1)
    least_low, most_low = tl.load(row + 2), tl.load(row + 3)
    down = tl.load(row + 4)
    if FIRST_FLOOR:
        codes = tl.floor(_clip(ratio, least_high, most_high + 0.5))
    else:
        codes = _nearest(_clip(ratio, least_high, most_high))
    codes = (codes + tl.load(row + 9)) * down
    if SECOND == 1:
        codes = _nearest(_clip(codes, least_low, most_low))
    elif SECOND == 2:
        codes = _clip(tl.floor(codes + 0.5), least_low, most_low)
    elif SECOND == 3:
        codes = tl.floor(codes)
    return codes


@triton.jit
def _weight_forward(  # type: ignore[no-untyped-def]
    w_ptr,
    scale_ptr,
    table_ptr,
    choice_ptr,
    y_ptr,
    length,
    FIRST_FLOOR: tl.constexpr,
    SECOND: tl.constexpr,
    BLOCK: tl.constexpr,
):
    channel = tl.program_id(0).to(tl.int64)
    row = _row(table_ptr, choice_ptr, WEIGHT_NUMBERS)
    up = tl.load(row + 5)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = at < length
    scale = tl.load(scale_ptr + channel)
    ratio = tl.div_rn(tl.load(w_ptr + channel * length + at, mask=live, other=0.0), scale)
    codes = _weight_codes(ratio, row, FIRST_FLOOR, SECOND)
    values = (codes + tl.load(row + 10)) * (scale * up)
    tl.store(y_ptr + channel * length + at, values.to(y_ptr.dtype.element_ty), mask=live)


@triton.jit
def _weight_backward(  # type: ignore[no-untyped-def]
    g_ptr,
    w_ptr,
    scale_ptr,
    table_ptr,
    choice_ptr,
    dw_ptr,
    ds_ptr,
    total,
    parts,
    length,
    chunks,
    FIRST_FLOOR: tl.constexpr,
    SECOND: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    channel = tl.program_id(0).to(tl.int64)
    row = _row(table_ptr, choice_ptr, WEIGHT_NUMBERS)
    up = tl.load(row + 5)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = at < length
    scale = tl.load(scale_ptr + channel)
    sums = tl.zeros((PARTS, BLOCK), dtype=tl.float32)
    for start in range(0, parts, PARTS):
        part = start + tl.arange(0, PARTS)
        some = (part < parts)[:, None] & live[None, :]
        offsets = part[:, None] * total + (channel * length + at)[None, :]
        sums += tl.load(g_ptr + offsets, mask=some, other=0.0).to(tl.float32)
    g = tl.sum(sums, axis=0)
    ratio = tl.div_rn(tl.load(w_ptr + channel * length + at, mask=live, other=0.0), scale)
    codes = _weight_codes(ratio, row, FIRST_FLOOR, SECOND)
    inside = (ratio > tl.load(row + 6)) & (ratio < tl.load(row + 7))
    dw = tl.where(inside, g, 0.0)
    tl.store(dw_ptr + channel * length + at, dw, mask=live)
    terms = tl.where(live, g * ((codes + tl.load(row + 10)) * up - tl.where(inside, ratio, 0.0)), 0.0)
    tl.store(ds_ptr + channel * chunks + tl.program_id(1), tl.sum(terms) * tl.load(row + 8))


def weight_forward(weight: Tensor, codes: WeightCodes, dtype: torch.dtype) -> Tensor:
    """Fake-quantised `weight` (dense, output channels outermost) in `dtype`; the scale is (channels,) or (1,)."""
    y = torch.empty_like(weight, dtype=dtype)
    scale, dial, first_floor, second = codes
    rows, length = scale.numel(), weight.numel() // scale.numel()
    if weight.numel():
        _weight_forward[(rows, triton.cdiv(length, ROW_BLOCK))](
            weight, scale, *dial, y, length, FIRST_FLOOR=first_floor, SECOND=second, BLOCK=ROW_BLOCK
        )
    return y


def weight_backward(grad: Tensor, weight: Tensor, codes: WeightCodes) -> tuple[Tensor, Tensor]:
    """Gradients of the weight and of the scale.

    `grad` is in the memory layout of `weight`, or parts of it one after the other, which are added up here.
    """
    dw = torch.empty_like(weight)
    scale, dial, first_floor, second = codes
    rows, length = scale.numel(), weight.numel() // scale.numel()
    block = min(triton.next_power_of_2(length), ROW_BLOCK)
    chunks, parts = triton.cdiv(length, block), grad.numel() // max(weight.numel(), 1)
    sums = torch.empty((rows, chunks), dtype=torch.float32, device=weight.device)
    if weight.numel():
        _weight_backward[(rows, chunks)](
            grad, weight, scale, *dial, dw, sums, weight.numel(), parts, length, chunks,
            FIRST_FLOOR=first_floor, SECOND=second, PARTS=min(triton.next_power_of_2(parts), SUMMED // block),
            BLOCK=block, num_warps=8 if parts > 1 else 4,
        )  # fmt: skip
    return dw, sums.reshape(rows) if chunks == 1 else sums.sum(dim=1)
