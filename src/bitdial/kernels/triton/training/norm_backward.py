"""Triton kernels of the backward pass of `norm.py`, which says how the two go together."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from bitdial.kernels.triton.training.norm import _codes, _tile, _value, pointers_of, tiling
from bitdial.kernels.triton.training.quantize import _act_factor, _clip, _nearest, _ratio
from bitdial.kernels.width_table import ActivationCodes

PROGRAMS = 528  # that share the sums: four for each multiprocessor of an H200


@triton.jit
def _gradient(  # type: ignore[no-untyped-def]
    g_ptr,
    gq_ptr,
    v,
    at,
    live,
    relu_max,
    scale,
    least,
    most,
    RELU: tl.constexpr,
    DIRECT: tl.constexpr,
    QUANTIZE: tl.constexpr,
):
    """The gradient that reaches the norm's output, and the terms of the scale's gradient."""
    g = tl.zeros_like(v)
    terms = tl.zeros_like(v)
    if DIRECT:
        g += tl.load(g_ptr + at, mask=live, other=0.0).to(tl.float32)
    if QUANTIZE:
        gq = tl.load(gq_ptr + at, mask=live, other=0.0).to(tl.float32)
        ratio = _ratio(v, scale, least, most)
        inside = (ratio > least) & (ratio < most)
        g += tl.where(inside, gq, 0.0)
        terms = gq * (_nearest(_clip(ratio, least, most)) - tl.where(inside, ratio, 0.0))
    if RELU:
        g = tl.where((v > 0.0) & (v < relu_max), g, 0.0)
    return g, terms


@triton.jit
def _backward_sums(  # type: ignore[no-untyped-def]
    g_ptr,
    gq_ptr,
    x_ptr,
    value_ptr,
    norm_affine_ptr,
    scale_ptr,
    table_ptr,
    choice_ptr,
    total_ptr,
    sums_ptr,
    scale_sums_ptr,
    rows,
    share,
    parts,
    relu_max,
    C,
    STORED: tl.constexpr,
    RELU: tl.constexpr,
    DIRECT: tl.constexpr,
    QUANTIZE: tl.constexpr,
    KEEP_TOTAL: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    part = tl.program_id(0)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    mean = tl.load(norm_affine_ptr + c, mask=c < C, other=0.0)[None, :]
    inverse = tl.load(norm_affine_ptr + C + c, mask=c < C, other=0.0)[None, :]
    slope = tl.load(norm_affine_ptr + 2 * C + c, mask=c < C, other=0.0)[None, :]
    shift = tl.load(norm_affine_ptr + 3 * C + c, mask=c < C, other=0.0)[None, :]
    scale, least, most = _codes(scale_ptr, table_ptr, choice_ptr, QUANTIZE)
    plain = tl.zeros((BLOCK_R, BLOCK_C), dtype=tl.float32)
    dotted = tl.zeros((BLOCK_R, BLOCK_C), dtype=tl.float32)
    scaled = tl.zeros((BLOCK_R, BLOCK_C), dtype=tl.float32)
    for start in range(part * share, tl.minimum((part + 1) * share, rows), BLOCK_R):
        r = start + tl.arange(0, BLOCK_R)
        at = r[:, None] * C + c[None, :]
        live = (r < rows)[:, None] & (c < C)[None, :]
        x = tl.load(x_ptr + at, mask=live, other=0.0).to(tl.float32)
        if STORED:
            v = tl.load(value_ptr + at, mask=live, other=0.0).to(tl.float32)
        else:
            v = _value(x, slope, shift, 0.0, relu_max, False, RELU).to(x_ptr.dtype.element_ty).to(tl.float32)
        g, terms = _gradient(g_ptr, gq_ptr, v, at, live, relu_max, scale, least, most, RELU, DIRECT, QUANTIZE)
        if KEEP_TOTAL:
            kept = g.to(total_ptr.dtype.element_ty)
            tl.store(total_ptr + at, kept, mask=live)
            g = kept.to(tl.float32)
        plain += g
        dotted += g * ((x - mean) * inverse)
        if QUANTIZE:
            scaled += terms
    tl.store(sums_ptr + c * parts + part, tl.sum(plain, axis=0), mask=c < C)
    tl.store(sums_ptr + (C + c) * parts + part, tl.sum(dotted, axis=0), mask=c < C)
    if QUANTIZE:
        tl.store(scale_sums_ptr + tl.program_id(1) * parts + part, tl.sum(scaled))


@triton.jit
def _join_sums(  # type: ignore[no-untyped-def]
    sums_ptr,
    scale_sums_ptr,
    norm_affine_ptr,
    table_ptr,
    choice_ptr,
    dgamma_ptr,
    dbeta_ptr,
    dscale_ptr,
    out_ptr,
    rows,
    parts,
    scale_parts,
    C,
    BLOCK: tl.constexpr,
):
    c = tl.program_id(0)
    if c < C:
        total = tl.zeros((BLOCK,), dtype=tl.float32)
        dotted = tl.zeros((BLOCK,), dtype=tl.float32)
        for start in range(0, parts, BLOCK):
            at = start + tl.arange(0, BLOCK)
            total += tl.load(sums_ptr + c * parts + at, mask=at < parts, other=0.0)
            dotted += tl.load(sums_ptr + (C + c) * parts + at, mask=at < parts, other=0.0)
        dbeta, dgamma = tl.sum(total), tl.sum(dotted)
        tl.store(dbeta_ptr + c, dbeta)
        tl.store(dgamma_ptr + c, dgamma)
        slope = tl.load(norm_affine_ptr + 2 * C + c)
        count = rows.to(tl.float32)
        tl.store(out_ptr + c, slope * (dbeta / count))
        tl.store(out_ptr + C + c, slope * tl.load(norm_affine_ptr + C + c) * (dgamma / count))
    else:  # one program more, if there is a scale
        terms = tl.zeros((BLOCK,), dtype=tl.float32)
        for start in range(0, scale_parts, BLOCK):
            at = start + tl.arange(0, BLOCK)
            terms += tl.load(scale_sums_ptr + at, mask=at < scale_parts, other=0.0)
        tl.store(dscale_ptr, tl.sum(terms) * _act_factor(table_ptr, choice_ptr))


@triton.jit
def _backward_apply(  # type: ignore[no-untyped-def]
    g_ptr,
    gq_ptr,
    x_ptr,
    norm_affine_ptr,
    scale_ptr,
    table_ptr,
    choice_ptr,
    sums_ptr,
    dx_ptr,
    rows,
    relu_max,
    C,
    RELU: tl.constexpr,
    DIRECT: tl.constexpr,
    QUANTIZE: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    c, at, live = _tile(rows, C, BLOCK_R, BLOCK_C)
    mean = tl.load(norm_affine_ptr + c, mask=c < C, other=0.0)[None, :]
    slope = tl.load(norm_affine_ptr + 2 * C + c, mask=c < C, other=0.0)[None, :]
    x = tl.load(x_ptr + at, mask=live, other=0.0).to(tl.float32)
    v = x
    if RELU or QUANTIZE:
        shift = tl.load(norm_affine_ptr + 3 * C + c, mask=c < C, other=0.0)[None, :]
        v = _value(x, slope, shift, 0.0, relu_max, False, RELU).to(x_ptr.dtype.element_ty).to(tl.float32)
    scale, least, most = _codes(scale_ptr, table_ptr, choice_ptr, QUANTIZE)
    g, _ = _gradient(g_ptr, gq_ptr, v, at, live, relu_max, scale, least, most, RELU, DIRECT, QUANTIZE)
    plain = tl.load(sums_ptr + c, mask=c < C, other=0.0)[None, :]
    tilted = tl.load(sums_ptr + C + c, mask=c < C, other=0.0)[None, :]
    dx = slope * g - plain - (x - mean) * tilted
    tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), mask=live)


# --- launches -------------------------------------------------------------------------------------


def backward(
    grad: Tensor | None,
    grad_quantized: Tensor | None,
    x: Tensor,
    value: Tensor | None,
    norm_affine: Tensor,
    codes: ActivationCodes | None,
    *,
    relu_max: float | None,
    keep_total: bool,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor, Tensor | None]:
    """Gradients of x, of the residual (if `keep_total`), of gamma, beta and the scale.

    `grad` is that of the value, `grad_quantized` that of its quantised form; `value` is what the forward pass kept,
    None to compute it again (only without a residual).
    """
    rows, channels, grid, blocks = tiling(x)
    quantize = codes is not None and grad_quantized is not None
    total = torch.empty_like(x) if keep_total else None
    share = triton.cdiv(grid[0], max(PROGRAMS // grid[1], 1)) * blocks["BLOCK_R"]
    parts = triton.cdiv(rows, share)
    sums = torch.empty((2, channels, parts), dtype=torch.float32, device=x.device)
    scale_sums = torch.empty(parts * grid[1] if quantize else 0, dtype=torch.float32, device=x.device)
    limit = 0.0 if relu_max is None else relu_max
    kind = {"RELU": relu_max is not None, "DIRECT": grad is not None, "QUANTIZE": quantize}
    sources = (x if grad is None else grad, grad_quantized if quantize else x)
    pointers = pointers_of(codes if quantize else None, norm_affine)
    _backward_sums[(parts, grid[1])](
        *sources, x, x if value is None else value, norm_affine, *pointers, x if total is None else total, sums,
        scale_sums, rows, share, parts, limit, STORED=value is not None, KEEP_TOTAL=keep_total, **kind, **blocks,
    )  # fmt: skip
    dgamma, dbeta, dscale, joined = (
        torch.empty(shape, dtype=torch.float32, device=x.device) for shape in (channels, channels, 1, (2, channels))
    )
    _join_sums[(channels + quantize,)](
        sums, scale_sums, norm_affine, *pointers[1:], dgamma, dbeta, dscale, joined, rows, parts, scale_sums.numel(),
        C=channels, BLOCK=min(triton.next_power_of_2(parts), 1024),
    )  # fmt: skip
    dx = torch.empty_like(x)
    if total is not None:
        sources, kind = (total, x), {"RELU": False, "DIRECT": True, "QUANTIZE": False}
    _backward_apply[grid](*sources, x, norm_affine, *pointers, joined, dx, rows, limit, **kind, **blocks)
    return dx, total, dgamma, dbeta, dscale if quantize else None
