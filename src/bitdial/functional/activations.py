"""Activations: to codes, back to values, and fake-quantised with their gradients."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from bitdial.errors import ConfigError
from bitdial.functional.schemes import (
    ACTIVATION_KINDS,
    DYNAMIC,
    SIGNED_KINDS,
    apply,
    check_whole,
    check_widths,
    code_range,
)
from bitdial.functional.tokens import LEAST_TOKEN_SCALE, token_factor, token_scale, usable_clip_ratio


def integer_zero_point(zero_point: Tensor, bits: int) -> Tensor:
    """The learned zero-point as the forward pass uses it: rounded, inside the code range."""
    return zero_point.detach().round().clamp_(*code_range(bits, signed=False))


def activation_codes(
    x: Tensor, scale: Tensor, zero_point: Tensor | None, bounds: tuple[int, int] | tuple[Tensor, Tensor]
) -> Tensor:
    """clip(round(x / scale) + z), ties to even: whole numbers in the type of `x`; z is one already."""
    codes = (x / scale).round_()
    if zero_point is not None:
        codes.add_(zero_point)
    return codes.clamp_(*bounds)


class _FakeQuantizeActivation(torch.autograd.Function):
    """Eqs. 4-5 with q = clip(round(x / scale) + z) and value (q - z) * scale; z a whole number.

    With v = x / scale + z and [n, p] the code range:
        d out / d x     = 1 where n < v < p, else 0
        d out / d scale = round(x / scale) - x / scale where n < v < p, else bound - z
        d out / d z     = 0 where n < v < p, else -scale
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        scale: Tensor,
        zero_point: Tensor | None,
        bits: int,
        signed: bool,
        gradient_scale: float,
    ) -> Tensor:
        whole = None if zero_point is None else integer_zero_point(zero_point, bits)
        values = activation_codes(x, scale, whole, code_range(bits, signed=signed))
        if whole is not None:
            values.sub_(whole)
        values.mul_(scale)
        ctx.save_for_backward(x, scale, values, zero_point)
        ctx.bits, ctx.signed, ctx.gradient_scale = bits, signed, gradient_scale
        return values

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        x, scale, values, zero_point = ctx.saved_tensors
        position = x / scale
        if zero_point is not None:
            position.add_(integer_zero_point(zero_point, ctx.bits))
        least, most = code_range(ctx.bits, signed=ctx.signed)
        grad_x = torch.ops.aten.hardtanh_backward(grad, position, least, most)
        grad_scale = grad_zero = None
        if ctx.needs_input_grad[1]:
            # Inside: (value - x) / scale. Outside: value / scale, which is the clipped code less z. The difference is
            # taken before the sum: two sums of large terms would cancel and leave their rounding errors.
            total = (grad * values).addcmul_(grad_x, x, value=-1).sum()
            grad_scale = (total / scale.reshape(())).mul_(ctx.gradient_scale).reshape(scale.shape)
        if zero_point is not None and ctx.needs_input_grad[2]:
            outside = grad.sum() - grad_x.sum()
            grad_zero = (-outside * scale.reshape(())).mul_(ctx.gradient_scale).reshape(zero_point.shape)
        return grad_x, grad_scale, grad_zero, None, None, None


class _FakeQuantizeTokens(torch.autograd.Function):
    """A scale for each token: its largest magnitude m times the clip ratio r over the largest code.

    With v = x / scale and [n, p] the code range:
        d out / d x = 1 where n < v < p, else 0. What is clipped stands for a share of m, so its gradient goes to the
                      element whose magnitude m is; among several of them it is divided
        d out / d r = (out - x) / r where n < v < p, else out / r: LSQ's gradient, for scale is r times a constant
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, clip_ratio: Tensor, bits: int, gradient_scale: float) -> Tensor:
        scale = token_scale(x, token_factor(clip_ratio, bits))
        values = activation_codes(x, scale, None, code_range(bits)).mul_(scale)
        ctx.save_for_backward(x, clip_ratio, values)
        ctx.bits, ctx.gradient_scale = bits, gradient_scale
        return values

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        x, clip_ratio, values = ctx.saved_tensors
        position = x / token_scale(x, token_factor(clip_ratio, ctx.bits))
        inside = torch.ops.aten.hardtanh_backward(grad, position, *code_range(ctx.bits))
        grad_ratio = None
        if ctx.needs_input_grad[1]:
            total = (grad * values).addcmul_(inside, x, value=-1).sum()  # the difference before the sum, as above
            ratio = usable_clip_ratio(clip_ratio)
            grad_ratio = (total / ratio.reshape(())).mul_(ctx.gradient_scale).reshape(clip_ratio.shape)
        magnitude = x.abs()
        largest = magnitude.amax(dim=-1, keepdim=True)
        through_largest = ((grad - inside) * values).sum(dim=-1, keepdim=True) / largest.clamp_min(LEAST_TOKEN_SCALE)
        at_largest = (magnitude == largest).to(x.dtype)
        share = through_largest / at_largest.sum(dim=-1, keepdim=True)
        return inside + at_largest.mul_(x.sign()).mul_(share), grad_ratio, None, None


def fake_quantize_activation(
    x: Tensor,
    scale: Tensor,
    zero_point: Tensor | None = None,
    *,
    bits: int,
    kind: str,
    gradient_scale: float = 1.0,
) -> Tensor:
    """`x` as its `bits`-bit code says it; `scale` and `zero_point` are (1,), differentiable.

    For the kind 'dynamic', `scale` is the clip ratio, and each row of the last axis of `x` has a scale of its own.
    """
    check_activation(bits, kind, zero_point)
    if kind == DYNAMIC:
        return apply(_FakeQuantizeTokens, x, scale, bits, gradient_scale)
    return apply(_FakeQuantizeActivation, x, scale, zero_point, bits, kind == "signed", gradient_scale)


def quantize_activation(x: Tensor, scale: Tensor, zero_point: Tensor | None = None, *, bits: int, kind: str) -> Tensor:
    """Integer codes of `x`: int8 for a signed kind, uint8 otherwise. For 'dynamic', `scale` is the clip ratio."""
    check_activation(bits, kind, zero_point)
    whole = None if zero_point is None else integer_zero_point(zero_point, bits)
    signed = kind in SIGNED_KINDS
    scale = token_scale(x, token_factor(scale, bits)) if kind == DYNAMIC else scale
    codes = activation_codes(x, scale, whole, code_range(bits, signed=signed))
    return codes.to(torch.int8 if signed else torch.uint8)


def dequantize_activation(codes: Tensor, scale: Tensor, zero_point: Tensor | None = None, *, bits: int) -> Tensor:
    """Values of activation codes: (codes - z) * scale. Of 'dynamic' ones, `scale` is that of each token (..., 1)."""
    values = codes.to(scale.dtype, copy=True)
    if zero_point is not None:
        values.sub_(integer_zero_point(zero_point, bits))
    return values.mul_(scale)


def check_activation(bits: int, kind: str, zero_point: Tensor | None) -> None:
    """Raise ConfigError unless width, kind and zero-point go together."""
    check_whole(bits=bits)
    check_widths(bits, bits)
    if kind not in ACTIVATION_KINDS:
        raise ConfigError(f"activation kind {kind!r} is not known; choose one of {', '.join(ACTIVATION_KINDS)}")
    if (kind == "asymmetric") != (zero_point is not None):
        raise ConfigError(f"kind {kind!r}: a zero_point goes with 'asymmetric' and with no other kind")
