"""Weights: to codes, back to values, and fake-quantised with their gradients."""

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from bitdial.errors import ConfigError, QuantizationError
from bitdial.functional.granularity import by_scale, spread, values_by_scale
from bitdial.functional.schemes import (
    Scheme,
    apply,
    check_phase,
    check_ties,
    check_whole,
    check_widths,
    code_range,
    scheme_of,
)


def derived_scale(weight: Tensor, *, bits: int, scheme: str, shape: tuple[int, ...]) -> Tensor:
    """The scale, of that shape, that `adabits` and `dorefa` compute from the weights instead of learning.

    With m = max|tanh W|: m / 2**(bits-1) for `adabits`, 2 m / (2**bits - 1) for `dorefa`.
    """
    source = scheme_of(scheme).source(weight).detach()
    largest = source.abs().reshape(math.prod(shape), -1).amax(dim=1).reshape(shape)
    largest = largest.clamp_min(torch.finfo(weight.dtype).tiny * 2**bits)  # the scale stays a normal number
    if scheme == "adabits":
        return largest / 2 ** (bits - 1)
    # A tensor, not a number: the GPU would multiply by the reciprocal of a number.
    return largest * 2 / torch.full_like(largest, 2**bits - 1)


def _first_rounding(ratio: Tensor, scheme: Scheme, bits: int) -> Tensor:
    """The stored codes, as whole numbers held in floats."""
    if scheme.first == "floor":
        codes = ratio.floor()
    elif scheme.first == "nearest":
        codes = ratio.round()
    else:
        codes = (ratio - 0.5).round_()
    if scheme.phase:
        codes.add_(scheme.phase)
    return codes.clamp_(*scheme.stored_range(bits))


def _second_rounding(codes: Tensor, scheme: Scheme, low: int, shift: int, ties: str) -> Tensor:
    """`narrow` on whole numbers held in floats, in place; exact because 2**-shift is a power of two."""
    if shift == 0:
        return codes
    codes.mul_(2.0**-shift)
    if scheme.second == "floor":
        return codes.floor_()
    rounded = codes.round_() if ties == "even" else codes.add_(0.5).floor_()
    return rounded.clamp_(*code_range(low))


def quantize(weight: Tensor, scale: Tensor, *, bits: int, scheme: str = "double_rounding") -> Tensor:
    """Integer codes (int8, the shape of `weight`) at `bits` bits: the first rounding (Eq. 1).

    `scale` is (1,), (rows,) or (rows, groups), positive. Raises where a weight or scale is not finite.
    """
    check_whole(bits=bits)
    check_widths(bits, bits)
    if not bool(torch.isfinite(weight).all()):
        raise QuantizationError("the weight holds NaN or infinity")
    if not bool((scale > 0).all() & torch.isfinite(scale).all()):
        raise QuantizationError("a weight scale is not a positive finite number")
    check_phase(scheme, bits)
    rule = scheme_of(scheme)
    rows, flat = by_scale(rule.source(weight), scale)
    return _first_rounding(rows / spread(flat, rows), rule, bits).to(torch.int8).reshape(weight.shape)


def dequantize(codes: Tensor, scale: Tensor, *, shift: int = 0, scheme: str = "double_rounding") -> Tensor:
    """Values of codes `shift` bits below the stored: (codes + offset) * (scale * 2**shift) (Eq. 3), in scale's dtype.

    `scale` is that of one step between stored codes: (1,), (rows,) or (rows, groups).
    """
    values = codes.to(scale.dtype, copy=True).add_(scheme_of(scheme).offset(shift))
    rows, flat = by_scale(values, scale * 2.0**shift)
    return rows.mul_(spread(flat, rows)).reshape(codes.shape)


def weight_of_codes(codes: Tensor, scale: Tensor, *, bits: int, scheme: str) -> Tensor:
    """A float weight whose stored codes at `bits` bits are `codes`, for training to go on from."""
    rule = scheme_of(scheme)
    if rule.first_is_floor:  # the middle of each cell, safe from rounding
        values = values_by_scale(codes.to(scale.dtype) + 0.5, scale)
    else:
        values = dequantize(codes, scale, scheme=scheme)
    if not rule.derives_scale:
        return values
    # adabits quantises tanh(W) and takes its scale from the largest, which must come out as it was; where that is 1,
    # tanh of anything above 9 gives it.
    levels = 2 ** (bits - 1)
    return (values.double() * (levels / (levels - 0.5))).clamp(-1 + 1e-8, 1 - 1e-8).atanh().float()


class _FakeQuantizeWeight(torch.autograd.Function):
    """Quantise and dequantise, with the straight-through gradients written out.

    With v = W / (scale 2**shift) and [n, p] the range in which v is not clipped:
        d out / d W     = 1 where n < v < p, else 0
        d out / d scale = 2**shift * (code + offset - v) where n < v < p, else 2**shift * (code + offset)
    The factor 2**shift is missing in the paper's appendix; it follows from Eq. 3.
    """

    @staticmethod
    def forward(
        ctx: Any,
        weight: Tensor,
        scale: Tensor,
        high: int,
        low: int,
        scheme: Scheme,
        ties: str,
        gradient_scale: float,
    ) -> Tensor:
        shift = high - low
        ratio = weight / spread(scale, weight)
        codes = _first_rounding(ratio, scheme, high)
        codes = _second_rounding(codes, scheme, low, shift, ties)
        if offset := scheme.offset(shift):
            codes.add_(offset)
        ctx.save_for_backward(ratio, codes)
        ctx.high, ctx.low, ctx.scheme, ctx.gradient_scale = high, low, scheme, gradient_scale
        ctx.channels = scale.numel()
        return codes * spread(scale * 2.0**shift, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        ratio, values = ctx.saved_tensors
        factor = 2.0 ** (ctx.high - ctx.low)
        least, most = unclipped_range(ctx.scheme, ctx.high, ctx.low)
        grad_weight = torch.ops.aten.hardtanh_backward(grad, ratio, least * factor, most * factor)
        grad_scale = None
        if ctx.needs_input_grad[1]:
            # sum of grad * (values - v * inside) * factor, with v = ratio / factor
            each = (grad * values).mul_(factor) - grad_weight * ratio
            grad_scale = each.reshape(ctx.channels, -1).sum(dim=1).mul_(ctx.gradient_scale)
        return grad_weight, grad_scale, None, None, None, None, None


def unclipped_range(scheme: Scheme, high: int, low: int) -> tuple[float, float]:
    """The open interval of v = W / (scale 2**shift) inside which nothing is clipped.

    Rounding to nearest clips beyond the outermost codes. A floor at `low` bits has cells up to one code
    further; `truncate` and `nested` clip where their first rounding, at `high` bits, does.
    """
    least, most = code_range(low)
    if scheme.first == "floor":
        return least, most + 1
    if scheme.second == "floor":
        return least, (code_range(high)[1] - scheme.phase) / 2.0 ** (high - low)
    return least, most


class _FakeQuantizeTanh(torch.autograd.Function):
    """The DoReFa family: the rounding is straight-through, max|tanh W| a constant, so d out / d W = 1 - tanh(W)^2."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, scale: Tensor, high: int, low: int, scheme: Scheme) -> Tensor:
        source = scheme.source(weight)
        shift = high - low
        codes = _first_rounding(source / spread(scale, weight), scheme, high)
        codes = _second_rounding(codes, scheme, low, shift, "even")
        ctx.save_for_backward(source)
        return codes.add_(scheme.offset(shift)).mul_(spread(scale * 2.0**shift, weight))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (source,) = ctx.saved_tensors
        return grads[0] * (1 - source * source), None, None, None, None


def check_fake_quantize(high: int, low: int, scheme: str, ties: str) -> None:
    """Raise ConfigError unless the widths, the scheme and the tie rule go together."""
    check_widths(high, low)
    check_ties(ties)
    check_phase(scheme, high)
    if not scheme_of(scheme).narrows and high != low:
        raise ConfigError(f"scheme {scheme!r} has a scale for each width: pass high == low, got {high} and {low}")


def fake_quantize(
    weight: Tensor,
    scale: Tensor,
    *,
    high: int,
    low: int,
    scheme: str = "double_rounding",
    ties: str = "even",
    gradient_scale: float = 1.0,
) -> Tensor:
    """`weight` as its `low`-bit code says it, made through the `high`-bit code; differentiable.

    Equal to dequantize(narrow(quantize(weight))). `scale` is (1,), (rows,) or (rows, groups); `gradient_scale`
    multiplies its gradient. For `lsq` and `dorefa`, high == low and `scale` belongs to that width.
    """
    check_fake_quantize(high, low, scheme, ties)
    rule = scheme_of(scheme)
    rows, flat = by_scale(weight, scale)
    if rule.derives_scale:
        values = apply(_FakeQuantizeTanh, rows, flat, high, low, rule)
    else:
        values = apply(_FakeQuantizeWeight, rows, flat, high, low, rule, ties, gradient_scale)
    return values if rows is weight else values.reshape(weight.shape)
