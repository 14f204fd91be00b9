"""The arithmetic: tensors in, tensors out, no state.

Every weight scheme here is one formula with different parts. A weight becomes a high-bit integer code by
a *first rounding*; a lower width is made from that code alone by a *second rounding*; the value of a code is

    value = (code + offset) * scale * 2**shift          shift = high - low

| scheme            | first rounding of W / scale | second rounding of code / 2**shift | offset | scale        |
|-------------------|-----------------------------|------------------------------------|--------|--------------|
| `double_rounding` | nearest                     | nearest (tie rule), then clipped   | 0      | learned      |
| `nested`          | floor                       | floor (an arithmetic shift)        | 1/2    | learned      |
| `truncate`        | nearest                     | floor                              | 0      | learned      |
| `adabits`         | floor, of tanh(W)           | floor                              | 0      | from weights |
| `lsq`             | nearest, at each width      | cannot be narrowed                 | 0      | one a width  |
| `dorefa`          | nearest, of tanh(W)         | cannot be narrowed                 | 1/2    | from weights |

`double_rounding` is the paper's Eqs. 1-3, `truncate` Bit-Mixer, `lsq` also MultiQuant and the paper's "Ours*",
`dorefa` Any-Precision, `adabits` the modified DoReFa of AdaBits, `nested` our centred truncation.

Integers reach training as floats that hold whole numbers and run time as int8. Both give the same code
because every step between the first division and the last multiplication is exact in float32.
Division is a true IEEE division (not a product with a reciprocal), so CPU, GPU and ONNX agree on it.
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from bitdial.errors import ConfigError, QuantizationError

Ties = Literal["even", "up"]
ActivationKind = Literal["unsigned", "signed", "asymmetric"]

ACTIVATION_KINDS: tuple[str, ...] = ("unsigned", "signed", "asymmetric")
TIE_RULES: tuple[str, ...] = ("even", "up")


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """What tells one weight scheme from another; see the table at the top of this file."""

    first: Literal["nearest", "floor", "nearest_half"]
    second: Literal["nearest", "floor"] | None
    offset: float
    scale: Literal["shared", "per_bits", "derived"]

    @property
    def narrows(self) -> bool:
        """Whether lower widths can be made from the stored high-bit integers."""
        return self.second is not None


SCHEMES: dict[str, Scheme] = {
    "double_rounding": Scheme(first="nearest", second="nearest", offset=0.0, scale="shared"),
    "nested": Scheme(first="floor", second="floor", offset=0.5, scale="shared"),
    "truncate": Scheme(first="nearest", second="floor", offset=0.0, scale="shared"),
    "adabits": Scheme(first="floor", second="floor", offset=0.0, scale="derived"),
    "lsq": Scheme(first="nearest", second=None, offset=0.0, scale="per_bits"),
    "dorefa": Scheme(first="nearest_half", second=None, offset=0.5, scale="derived"),
}


def scheme_of(name: str) -> Scheme:
    """The scheme called `name`; raises ConfigError with the known names otherwise."""
    if name not in SCHEMES:
        raise ConfigError(f"scheme={name!r} is not known; choose one of {', '.join(SCHEMES)}")
    return SCHEMES[name]


def code_range(bits: int, *, signed: bool = True) -> tuple[int, int]:
    """The smallest and largest code of `bits` bits."""
    return (-(1 << bits - 1), (1 << bits - 1) - 1) if signed else (0, (1 << bits) - 1)


def per_channel(values: Tensor, like: Tensor) -> Tensor:
    """View `values` (channels,) or (1,) so that it broadcasts over dimension 0 of `like`."""
    return values.view(-1, *(1,) * (like.dim() - 1))


def _check_widths(high: int, low: int) -> None:
    if not 2 <= low <= high <= 8:
        raise ConfigError(f"need 2 <= low <= high <= 8, got high={high}, low={low}")


# --- integers -----------------------------------------------------------------------------------


def narrow(codes: Tensor, *, high: int, low: int, scheme: str = "double_rounding", ties: str = "even") -> Tensor:
    """Make `low`-bit codes from stored `high`-bit integer codes; same shape and dtype.

    `double_rounding`: clip(round(codes / 2**shift)) with the tie rule `ties` (Eq. 2); the other narrowable
    schemes: codes >> shift. Always start from the stored codes: 8->6->4 is not 8->4.
    """
    _check_widths(high, low)
    rule = scheme_of(scheme)
    if not rule.narrows:
        raise ConfigError(
            f"scheme {scheme!r} cannot be narrowed from integers: each width is rounded from the float weight; "
            "use double_rounding, nested, truncate or adabits"
        )
    if ties not in TIE_RULES:
        raise ConfigError(f"ties={ties!r} is not known; choose 'even' or 'up'")
    if codes.is_floating_point() or codes.is_complex() or codes.dtype == torch.bool:
        raise ConfigError(f"codes must be an integer tensor, got {codes.dtype}")
    check_codes(codes, bits=high)
    shift = high - low
    if shift == 0:
        return codes.clone()
    if rule.second == "floor":
        return codes >> shift
    wide = codes.to(torch.int32)
    floor = wide >> shift
    half_up = 1 << shift - 1
    # Adding one less than a half rounds ties down; the low bit of the floor lifts them where it is odd.
    bias = half_up if ties == "up" else (floor & 1) + (half_up - 1)
    return ((wide + bias) >> shift).clamp_(max=code_range(low)[1]).to(codes.dtype)


def check_codes(codes: Tensor, *, bits: int, signed: bool = True) -> None:
    """Raise QuantizationError unless every code fits `bits` bits."""
    if codes.numel() == 0:
        return
    least, most = code_range(bits, signed=signed)
    found = codes.aminmax()
    if found.min < least or found.max > most:
        raise QuantizationError(
            f"codes span [{int(found.min)}, {int(found.max)}] but {bits}-bit codes lie in [{least}, {most}]"
        )


# --- weights ------------------------------------------------------------------------------------


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
    largest = largest.clamp_min(torch.finfo(weight.dtype).tiny)
    return largest / 2 ** (bits - 1) if scheme == "adabits" else largest * 2 / (2**bits - 1)


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
    _check_widths(bits, bits)
    if not bool(torch.isfinite(weight).all()):
        raise QuantizationError("the weight holds NaN or infinity")
    if not bool((scale > 0).all() & torch.isfinite(scale).all()):
        raise QuantizationError("a weight scale is not a positive finite number")
    rule = scheme_of(scheme)
    ratio = _source(weight, rule) / per_channel(scale, weight)
    return _first_rounding(ratio, rule, bits).to(torch.int8)


def dequantize(codes: Tensor, scale: Tensor, *, shift: int = 0, scheme: str = "double_rounding") -> Tensor:
    """Values of integer codes: (codes + offset) * (scale * 2**shift) (Eq. 3), in the scale's dtype."""
    values = codes.to(scale.dtype).add_(scheme_of(scheme).offset)
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
    _check_widths(high, low)
    rule = scheme_of(scheme)
    if not rule.narrows and high != low:
        raise ConfigError(f"scheme {scheme!r} has a scale for each width: pass high == low, got {high} and {low}")
    if rule.scale == "derived":
        return _apply(_FakeQuantizeTanh, weight, scale, high, low, rule)
    return _apply(_FakeQuantizeWeight, weight, scale, high, low, rule, ties, gradient_scale)


def _apply(function: type[torch.autograd.Function], *arguments: object) -> Tensor:
    result = function.apply(*arguments)
    assert isinstance(result, Tensor)
    return result


def lsq_gradient_scale(elements: int, bits: int, *, signed: bool) -> float:
    """LSQ's 1 / sqrt(N * Qp): N elements share the scale, Qp is the largest code."""
    return (max(elements, 1) * code_range(bits, signed=signed)[1]) ** -0.5


# --- activations --------------------------------------------------------------------------------


def integer_zero_point(zero_point: Tensor, bits: int) -> Tensor:
    """The learned zero-point as the forward pass uses it: rounded, inside the code range."""
    return zero_point.detach().round().clamp_(*code_range(bits, signed=False))


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
        least, most = code_range(bits, signed=signed)
        values = (x / scale).round_()
        if zero_point is None:
            values.clamp_(least, most)
        else:
            whole = integer_zero_point(zero_point, bits)
            values.add_(whole).clamp_(least, most).sub_(whole)
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
            # Inside: (value - x) / scale. Outside: value / scale, which is the clipped code less z.
            total = _dot(grad, values) - _dot(grad_x, x)
            grad_scale = (total / scale.reshape(())).mul_(ctx.gradient_scale).reshape(scale.shape)
        if zero_point is not None and ctx.needs_input_grad[2]:
            outside = grad.sum() - grad_x.sum()
            grad_zero = (-outside * scale.reshape(())).mul_(ctx.gradient_scale).reshape(zero_point.shape)
        return grad_x, grad_scale, grad_zero, None, None, None


def _dot(left: Tensor, right: Tensor) -> Tensor:
    return torch.dot(left.reshape(-1), right.reshape(-1))


def fake_quantize_activation(
    x: Tensor,
    scale: Tensor,
    zero_point: Tensor | None = None,
    *,
    bits: int,
    kind: str,
    gradient_scale: float = 1.0,
) -> Tensor:
    """`x` as its `bits`-bit code says it; `scale` and `zero_point` are (1,), differentiable."""
    _check_activation(bits, kind, zero_point)
    return _apply(_FakeQuantizeActivation, x, scale, zero_point, bits, kind == "signed", gradient_scale)


def quantize_activation(x: Tensor, scale: Tensor, zero_point: Tensor | None = None, *, bits: int, kind: str) -> Tensor:
    """Integer codes of `x`: int8 for a signed kind, uint8 otherwise."""
    _check_activation(bits, kind, zero_point)
    codes = (x / scale).round_()
    if zero_point is not None:
        codes.add_(integer_zero_point(zero_point, bits))
    signed = kind == "signed"
    return codes.clamp_(*code_range(bits, signed=signed)).to(torch.int8 if signed else torch.uint8)


def dequantize_activation(codes: Tensor, scale: Tensor, zero_point: Tensor | None = None, *, bits: int) -> Tensor:
    """Values of activation codes: (codes - z) * scale."""
    values = codes.to(scale.dtype)
    if zero_point is not None:
        values.sub_(integer_zero_point(zero_point, bits))
    return values.mul_(scale)


def _check_activation(bits: int, kind: str, zero_point: Tensor | None) -> None:
    _check_widths(bits, bits)
    if kind not in ACTIVATION_KINDS:
        raise ConfigError(f"activation kind {kind!r} is not known; choose one of {', '.join(ACTIVATION_KINDS)}")
    if (kind == "asymmetric") != (zero_point is not None):
        raise ConfigError(f"kind {kind!r}: a zero_point goes with 'asymmetric' and with no other kind")
