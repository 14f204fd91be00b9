"""The weight schemes, and the integers they share."""

from dataclasses import dataclass, replace
from numbers import Integral
from typing import Literal

import torch
from torch import Tensor

from bitdial.errors import ConfigError, QuantizationError

ACTIVATION_KINDS: tuple[str, ...] = ("unsigned", "signed", "asymmetric", "dynamic")
SIGNED_KINDS: tuple[str, ...] = ("signed", "dynamic")  # those whose codes are signed
DYNAMIC = "dynamic"  # a scale for each token; see `bitdial.functional.tokens`
TIE_RULES: tuple[str, ...] = ("even", "up")


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """What tells one weight scheme from another; see the table in `bitdial.functional`.

    Outside this package nobody looks at the first five fields: the properties say what follows from them.
    """

    first: Literal["nearest", "floor", "nearest_half"]
    second: Literal["nearest", "floor"] | None
    scale: Literal["shared", "per_bits", "derived"]
    middle: Literal["nowhere", "everywhere", "below"]  # at which widths a value is the middle of its cell
    phase: int = 0  # added to a code before it is stored: moves the cells of the lower widths

    @property
    def narrows(self) -> bool:
        """Whether lower widths can be made from the stored high-bit integers."""
        return self.second is not None

    @property
    def nests(self) -> bool:
        """Whether low codes are bit prefixes of the stored ones, so that one buffer serves every width."""
        return self.second == "floor"

    @property
    def shares_scale(self) -> bool:
        """Whether all widths learn one scale."""
        return self.scale == "shared"

    @property
    def has_scale_per_width(self) -> bool:
        """Whether each width learns a scale of its own."""
        return self.scale == "per_bits"

    @property
    def derives_scale(self) -> bool:
        """Whether the scale is computed from the weights, not learned."""
        return self.scale == "derived"

    @property
    def has_ties(self) -> bool:
        """Whether the tie rule of the second rounding matters."""
        return self.second == "nearest"

    @property
    def first_is_floor(self) -> bool:
        """Whether the first rounding goes down instead of to the nearest."""
        return self.first == "floor"

    def second_rounding(self, ties: str) -> str | None:
        """The second rounding by one name: 'nearest even', 'nearest up', 'floor', or None."""
        return f"nearest {ties}" if self.second == "nearest" else self.second

    def source(self, weight: Tensor) -> Tensor:
        """What is divided by the scale: the weight, or its tanh for the DoReFa family.

        tanh is taken in float64 and rounded once, so that every device gives the same float32.
        """
        return weight.double().tanh().to(weight.dtype) if self.derives_scale else weight

    def offset(self, shift: int) -> float:
        """What is added to a code that is `shift` bits below the stored ones; value = (code + offset) * step."""
        if self.middle == "everywhere" or (self.middle == "below" and shift):
            return 0.5 - self.phase * 2.0**-shift
        return float(-self.phase)

    def integers(self, shift: int) -> tuple[int, int]:
        """(factor, addend) of the weight integer: value = (factor * code + addend) * step / factor.

        `nested` counts in steps of the stored codes at every width.
        """
        if self.middle == "everywhere":
            return 2, 1
        if self.middle == "below":
            return 1 << shift, (1 << shift >> 1) - self.phase
        return 1, 0

    def fits_int8(self, bits: int) -> bool:
        """Whether the weight integers of `bits`-bit codes fit int8: all do but 2 * code + 1 at 8 bits."""
        return self.middle != "everywhere" or bits < 8

    def stored_range(self, bits: int) -> tuple[int, int]:
        """The smallest and largest code that is stored at `bits` bits."""
        least, most = code_range(bits)
        return least + self.phase, most


SCHEMES: dict[str, Scheme] = {
    "double_rounding": Scheme(first="nearest", second="nearest", scale="shared", middle="nowhere"),
    "nested": Scheme(first="nearest", second="floor", scale="shared", middle="below"),
    "centred": Scheme(first="floor", second="floor", scale="shared", middle="everywhere"),
    "truncate": Scheme(first="nearest", second="floor", scale="shared", middle="nowhere"),
    "adabits": Scheme(first="floor", second="floor", scale="derived", middle="nowhere"),
    "lsq": Scheme(first="nearest", second=None, scale="per_bits", middle="nowhere"),
    "dorefa": Scheme(first="nearest_half", second=None, scale="derived", middle="everywhere"),
}
# 'nested' with a phase, by how the phase is written; which of them fit depends on the highest width.
PHASED: dict[str, Scheme] = {f"nested+{phase}": replace(SCHEMES["nested"], phase=phase) for phase in range(1, 128)}


def scheme_of(name: str) -> Scheme:
    """The scheme called `name`, such as 'double_rounding', or 'nested+8' for a phase of 8.

    Raises ConfigError with the known names otherwise.
    """
    scheme = SCHEMES.get(name, PHASED.get(name)) if isinstance(name, str) else None
    if scheme is None:
        known = ", ".join(SCHEMES)
        raise ConfigError(f"scheme={name!r} is not known; choose one of {known}, or 'nested+8' for a phase of 8")
    return scheme


def check_phase(name: str, high: int) -> None:
    """Raise ConfigError unless the scheme's phase is below the largest `high`-bit code and all weight integers fit.

    That is, those of every width from `high` down to 2 are `high`-bit integers. A phase of 2^(shift - 1) puts a zero
    into the grid that is `shift` bits below the stored codes.
    """
    rule = scheme_of(name)
    if not rule.phase:
        return
    least, most = code_range(high)
    fits = rule.phase < most
    for shift in range(high - 1):
        factor, addend = rule.integers(shift)
        fits = fits and all(least <= factor * (code >> shift) + addend <= most for code in rule.stored_range(high))
    if not fits:
        some = f"powers of two up to {1 << high >> 3} do" if high > 2 else "use 'nested'"
        raise ConfigError(f"scheme={name!r}: a phase of {rule.phase} does not fit {high}-bit codes; {some}")


def code_range(bits: int, *, signed: bool = True) -> tuple[int, int]:
    """The smallest and largest code of `bits` bits."""
    return (-(1 << bits - 1), (1 << bits - 1) - 1) if signed else (0, (1 << bits) - 1)


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
            "use double_rounding, nested, centred, truncate or adabits"
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
    if rule.nests:
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
