"""Triton kernels of the weight quantizer where groups of inputs have a scale: a row of the weight in one program.

A group is short, so a program of its own would be mostly empty. The nearest scale of two levels is found on the way, as
`functional.granularity` has it, bit for bit; its gradient goes straight through to the learned scale.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from bitdial.functional.granularity import MOST_MULTIPLIER
from bitdial.kernels.triton.training.quantize import WEIGHT_NUMBERS, _nearest, _row, _weight_codes
from bitdial.kernels.width_table import WeightCodes

TILE = 2048  # weights that a program takes at a time
MOST = tl.constexpr(float(MOST_MULTIPLIER))
LEVELS = {"float": 0, "integer": 1, "half": 2}  # what kernels are told of `group_scales`


@triton.jit
def _row_scale(scale_ptr, groups, LEVELS: tl.constexpr, ALL: tl.constexpr):  # type: ignore[no-untyped-def]
    """The scale of the row that `scale_ptr` begins."""
    at = tl.arange(0, ALL)
    most = tl.max(tl.load(scale_ptr + at, mask=at < groups, other=0.0), axis=0)
    scale = tl.div_rn(most, MOST)
    if LEVELS == 2:
        kept = (scale.to(tl.int32, bitcast=True) + 65536) >> 17 << 17
        scale = kept.to(tl.float32, bitcast=True)
    return scale


@triton.jit
def _scales(scale_ptr, row_scale, group, live, LEVELS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The scales of some groups of a row, as they are used."""
    scale = tl.load(scale_ptr + group, mask=live, other=1.0)
    if LEVELS > 0:
        ratio = tl.div_rn(scale, tl.zeros_like(scale) + row_scale)
        ratio = tl.maximum(ratio, 1.0, propagate_nan=tl.PropagateNan.ALL)
        scale = _nearest(tl.minimum(ratio, MOST, propagate_nan=tl.PropagateNan.ALL)) * row_scale
    return scale


@triton.jit
def _group_forward(  # type: ignore[no-untyped-def]
    w_ptr,
    scale_ptr,
    table_ptr,
    choice_ptr,
    y_ptr,
    groups,
    length,
    FIRST_FLOOR: tl.constexpr,
    SECOND: tl.constexpr,
    LEVELS: tl.constexpr,
    ALL: tl.constexpr,
    GROUPS: tl.constexpr,
    LENGTH: tl.constexpr,
):
    channel = tl.program_id(0).to(tl.int64)
    row = _row(table_ptr, choice_ptr, WEIGHT_NUMBERS)
    up, offset = tl.load(row + 5), tl.load(row + 10)
    scale_ptr += channel * groups
    w_ptr += channel * groups * length
    y_ptr += channel * groups * length
    row_scale = _row_scale(scale_ptr, groups, LEVELS, ALL)
    within = tl.arange(0, LENGTH)
    for start in range(0, groups, GROUPS):
        group = start + tl.arange(0, GROUPS)
        live = (group < groups)[:, None] & (within < length)[None, :]
        at = group[:, None] * length + within[None, :]
        scale = _scales(scale_ptr, row_scale, group, group < groups, LEVELS)
        w = tl.load(w_ptr + at, mask=live, other=0.0)
        codes = _weight_codes(tl.div_rn(w, tl.zeros_like(w) + scale[:, None]), row, FIRST_FLOOR, SECOND)
        values = (codes + offset) * (scale * up)[:, None]
        tl.store(y_ptr + at, values.to(y_ptr.dtype.element_ty), mask=live)


@triton.jit
def _group_backward(  # type: ignore[no-untyped-def]
    g_ptr,
    w_ptr,
    scale_ptr,
    table_ptr,
    choice_ptr,
    dw_ptr,
    ds_ptr,
    groups,
    length,
    FIRST_FLOOR: tl.constexpr,
    SECOND: tl.constexpr,
    LEVELS: tl.constexpr,
    ALL: tl.constexpr,
    GROUPS: tl.constexpr,
    LENGTH: tl.constexpr,
):
    channel = tl.program_id(0).to(tl.int64)
    row = _row(table_ptr, choice_ptr, WEIGHT_NUMBERS)
    up, offset = tl.load(row + 5), tl.load(row + 10)
    low, high, factor = tl.load(row + 6), tl.load(row + 7), tl.load(row + 8)
    scale_ptr += channel * groups
    ds_ptr += channel * groups
    g_ptr += channel * groups * length
    w_ptr += channel * groups * length
    dw_ptr += channel * groups * length
    row_scale = _row_scale(scale_ptr, groups, LEVELS, ALL)
    within = tl.arange(0, LENGTH)
    for start in range(0, groups, GROUPS):
        group = start + tl.arange(0, GROUPS)
        live = (group < groups)[:, None] & (within < length)[None, :]
        at = group[:, None] * length + within[None, :]
        scale = _scales(scale_ptr, row_scale, group, group < groups, LEVELS)
        w = tl.load(w_ptr + at, mask=live, other=0.0)
        g = tl.load(g_ptr + at, mask=live, other=0.0).to(tl.float32)
        ratio = tl.div_rn(w, tl.zeros_like(w) + scale[:, None])
        codes = _weight_codes(ratio, row, FIRST_FLOOR, SECOND)
        inside = (ratio > low) & (ratio < high)
        tl.store(dw_ptr + at, tl.where(inside, g, 0.0), mask=live)
        terms = tl.where(live, g * ((codes + offset) * up - tl.where(inside, ratio, 0.0)), 0.0)
        tl.store(ds_ptr + group, tl.sum(terms, axis=1) * factor, mask=group < groups)


def group_forward(weight: Tensor, codes: WeightCodes, group_scales: str, dtype: torch.dtype) -> Tensor:
    """Fake-quantised `weight` (rows, inputs), contiguous, in `dtype`; the scale is (rows, groups)."""
    y = torch.empty_like(weight, dtype=dtype)
    scale, dial, first_floor, second = codes
    if weight.numel():
        _group_forward[(scale.shape[0],)](
            weight, scale, *dial, y, FIRST_FLOOR=first_floor, SECOND=second, LEVELS=LEVELS[group_scales],
            **_shape(weight, scale),
        )  # fmt: skip
    return y


def group_backward(grad: Tensor, weight: Tensor, codes: WeightCodes, group_scales: str) -> tuple[Tensor, Tensor]:
    """Gradients of the weight and of the learned scale; `grad` is contiguous."""
    dw, ds = torch.empty_like(weight), torch.empty_like(codes.scale)
    scale, dial, first_floor, second = codes
    if weight.numel():
        _group_backward[(scale.shape[0],)](
            grad, weight, scale, *dial, dw, ds, FIRST_FLOOR=first_floor, SECOND=second, LEVELS=LEVELS[group_scales],
            **_shape(weight, scale),
        )  # fmt: skip
    return dw, ds


def _shape(weight: Tensor, scale: Tensor) -> dict[str, int]:
    """The sizes of a row, and of what a program takes of it at a time."""
    groups, length = scale.shape[1], weight.numel() // scale.numel()
    wide = triton.next_power_of_2(length)
    every = triton.next_power_of_2(groups)
    return {
        "groups": groups, "length": length, "ALL": every, "GROUPS": min(every, max(TILE // wide, 1)), "LENGTH": wide,
    }  # fmt: skip
