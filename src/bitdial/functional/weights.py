"""Weights: to codes, back to values, and fake-quantised with their gradients."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from bitdial.errors import ConfigError, QuantizationError
from bitdial.functional.schemes import (
    Scheme,
    apply,
    check_ties,
    check_whole,
    check_widths,
    code_range,
    per_channel,
    scheme_of,
)


def _source(weight: Tensor, scheme: Scheme) -> Tensor:
    """What is divided by the scale: the weight, or its tanh for the DoReFa family.

    tanh is taken in float64 and rounded once, so that every device gives the same float32.
    """
    return weight.double().tanh().to(weight.dtype) if scheme.scale == "derived" else weight


def derived_scale(weight: Tensor, *, bits: int, scheme: str, channels: int) -> Tensor:
    """The scale (channels,) that `adabits` and `dorefa` compute from the weights instead of learning.

    With m = max|tanh W|: m / 2**(bits-1) for `adabits`, 2 m / (2**bits - 1) for `dorefa`.
    """
    source = _source(weight, scheme_of(scheme)).detach()
    largest = source.abs().reshape(channels, -1).amax(dim=1)
    largest = largest.clamp_min(torch.finfo(weight.dtype).tiny * 2**bits)  # the scale stays a normal number
    if scheme == "adabits":
        return largest / 2 ** (bits - 1)
    # A tensor, not a number: the GPU would multiply by the reciprocal of a number.
    return largest * 2 / torch.full_like(largest, 2**bits - 1)


def _first_rounding(ratio: Tensor, scheme: Scheme, bits: int) -> Tensor:
    if scheme.first == "floor":
        codes = ratio.floor()
    elif scheme.first == "nearest":
        codes = ratio.round()
    else:
        codes = (ratio - 0.5).round_()
    return codes.clamp_(*code_range(bits))


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

    `scale` is (output channels,) or (1,), positive. Raises where a weight or scale is not finite.
    """
    check_whole(bits=bits)
    check_widths(bits, bits)
    if not bool(torch.isfinite(weight).all()):
        raise QuantizationError("the weight holds NaN or infinity")
    if not bool((scale > 0).all() & torch.isfinite(scale).all()):
        raise QuantizationError("a weight scale is not a positive finite number")
    rule = scheme_of(scheme)
    ratio = _source(weight, rule) / per_channel(scale, weight)
    return _first_rounding(ratio, rule, bits).to(torch.int8)


def dequantize(codes: Tensor, scale: Tensor, *, shift: int = 0, scheme: str = "double_rounding") -> Tensor:
    """Values of integer codes: (codes + offset) * (scale * 2**shift) (Eq. 3), in the scale's dtype."""
    values = codes.to(scale.dtype, copy=True).add_(scheme_of(scheme).offset)
    return values.mul_(per_channel(scale * 2.0**shift, codes))


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
        ratio = weight / per_channel(scale, weight)
        codes = _first_rounding(ratio, scheme, high)
        codes = _second_rounding(codes, scheme, low, shift, ties)
        if scheme.offset:
            codes.add_(scheme.offset)
        ctx.save_for_backward(ratio, codes)
        ctx.high, ctx.low, ctx.scheme, ctx.gradient_scale = high, low, scheme, gradient_scale
        ctx.channels = scale.numel()
        return codes * per_channel(scale * 2.0**shift, weight)

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
    further; `truncate` clips where its first rounding, at `high` bits, does.
    """
    least, most = code_range(low)
    if scheme.first == "floor":
        return least, most + 1
    if scheme.second == "floor":
        return least, code_range(high)[1] / 2.0 ** (high - low)
    return least, most


class _FakeQuantizeTanh(torch.autograd.Function):
    """The DoReFa family: the rounding is straight-through, max|tanh W| a constant, so d out / d W = 1 - tanh(W)^2."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, scale: Tensor, high: int, low: int, scheme: Scheme) -> Tensor:
        source = _source(weight, scheme)
        shift = high - low
        codes = _first_rounding(source / per_channel(scale, weight), scheme, high)
        codes = _second_rounding(codes, scheme, low, shift, "even")
        ctx.save_for_backward(source)
        return codes.add_(scheme.offset).mul_(per_channel(scale * 2.0**shift, weight))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (source,) = ctx.saved_tensors
        return grads[0] * (1 - source * source), None, None, None, None


def check_fake_quantize(high: int, low: int, scheme: str, ties: str) -> None:
    """Raise ConfigError unless the widths, the scheme and the tie rule go together."""
    check_widths(high, low)
    check_ties(ties)
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

    Equal to dequantize(narrow(quantize(weight))). `scale` is (output channels,) or (1,); `gradient_scale` multiplies
    its gradient. For `lsq` and `dorefa`, high == low and `scale` belongs to that width.
    """
    check_fake_quantize(high, low, scheme, ties)
    rule = scheme_of(scheme)
    if rule.scale == "derived":
        return apply(_FakeQuantizeTanh, weight, scale, high, low, rule)
    return apply(_FakeQuantizeWeight, weight, scale, high, low, rule, ties, gradient_scale)
