"""The weight schemes, and the integers they share."""

from dataclasses import dataclass
from numbers import Integral
from typing import Literal

import torch
from torch import Tensor

from bitdial.errors import ConfigError, QuantizationError

ACTIVATION_KINDS: tuple[str, ...] = ("unsigned", "signed", "asymmetric")
TIE_RULES: tuple[str, ...] = ("even", "up")


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """What tells one weight scheme from another; see the table in `bitdial.functional`."""

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
    if not isinstance(name, str) or name not in SCHEMES:
        raise ConfigError(f"scheme={name!r} is not known; choose one of {', '.join(SCHEMES)}")
    return SCHEMES[name]


def code_range(bits: int, *, signed: bool = True) -> tuple[int, int]:
    """The smallest and largest code of `bits` bits."""
    return (-(1 << bits - 1), (1 << bits - 1) - 1) if signed else (0, (1 << bits) - 1)


def per_channel(values: Tensor, like: Tensor) -> Tensor:
    """View `values` (channels,) or (1,) so that it broadcasts over dimension 0 of `like`."""
    return values.view(-1, *(1,) * (like.dim() - 1))


def check_whole(**widths: object) -> None:
    """Raise ConfigError for a width, named by its argument, that is not a whole number."""
    for name, value in widths.items():
        if isinstance(value, bool) or not isinstance(value, Integral):
            raise ConfigError(f"{name}={value!r} must be a whole number of bits, such as 8")


def check_widths(high: int, low: int) -> None:
    """Raise ConfigError unless both are whole numbers and 2 <= low <= high <= 8."""
    check_whole(high=high, low=low)
    if not 2 <= low <= high <= 8:
        raise ConfigError(f"need 2 <= low <= high <= 8, got high={high}, low={low}")


def check_ties(ties: str) -> None:
    """Raise ConfigError unless `ties` is a known tie rule."""
    if ties not in TIE_RULES:
        raise ConfigError(f"ties={ties!r} is not known; choose 'even' or 'up'")


def narrow(codes: Tensor, *, high: int, low: int, scheme: str = "double_rounding", ties: str = "even") -> Tensor:
    """Make `low`-bit codes from stored `high`-bit integer codes; same shape and dtype.

    `double_rounding`: clip(round(codes / 2**shift)) with the tie rule `ties` (Eq. 2); the other narrowable
    schemes: codes >> shift. Always start from the stored codes: 8->6->4 is not 8->4.
    """
    check_widths(high, low)
    rule = scheme_of(scheme)
    if not rule.narrows:
        raise ConfigError(
            f"scheme {scheme!r} cannot be narrowed from integers: each width is rounded from the float weight; "
            "use double_rounding, nested, truncate or adabits"
        )
    check_ties(ties)
    if not isinstance(codes, Tensor):
        raise ConfigError(f"codes must be a torch tensor, got {type(codes).__name__}; torch.as_tensor(codes) makes one")
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


def lsq_gradient_scale(elements: int, bits: int, *, signed: bool) -> float:
    """LSQ's 1 / sqrt(N * Qp): N elements share the scale, Qp is the largest code."""
    return (max(elements, 1) * code_range(bits, signed=signed)[1]) ** -0.5


def apply(function: type[torch.autograd.Function], *arguments: object) -> Tensor:
    """`function.apply`, with the type of its result."""
    result = function.apply(*arguments)
    assert isinstance(result, Tensor)
    return result
