"""Numbers as readers see them, and the interval of an accuracy that is a count."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from bitdial.errors import ConfigError

T = TypeVar("T")

WIDTHS = (8, 7, 6, 5, 4, 3, 2)
Z = 1.959964  # 95 % of a normal distribution lie within so many standard deviations


@dataclass(frozen=True)
class Samples:
    """What an accuracy was measured on: Samples(500, "test images")."""

    count: int
    name: str

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ConfigError(f"an accuracy is measured on at least one sample, not on {self.count} {self.name}")

    def __str__(self) -> str:
        return f"{self.count:,} {self.name}"

    def interval(self, accuracy: float) -> tuple[float, float] | None:
        """The 95 % interval of `accuracy` (0 to 1); None if that is no count of right answers out of these samples."""
        right = round(accuracy * self.count)
        if not 0 <= right <= self.count or abs(accuracy * self.count - right) > 1e-3:
            return None
        return wilson(right, self.count)


def wilson(right: int, count: int) -> tuple[float, float]:
    """Wilson's 95 % interval for a share: `right` answers out of `count`. It stays within 0 and 1."""
    share, spread = right / count, Z * Z / count
    middle = (share + spread / 2) / (1 + spread)
    half = Z * math.sqrt(share * (1 - share) / count + spread / (4 * count)) / (1 + spread)
    return 0.0 if right == 0 else middle - half, 1.0 if right == count else middle + half


def by_bits(values: Mapping[Any, T]) -> dict[int, T]:
    """`values` by width as a number, descending; ConfigError if there are none or a key is not a width."""
    found = {int(key) if str(key).isdecimal() else key: value for key, value in values.items()}
    if not found or any(bits not in WIDTHS for bits in found):
        raise ConfigError(f"expected values by bit-width from 2 to 8, got the keys {list(values)}")
    return {bits: found[bits] for bits in sorted(found, reverse=True)}


def percent(value: float) -> str:
    """'98.6 %' for 0.986."""
    return f"{100 * value:.1f} %"


def interval_text(interval: tuple[float, float] | None) -> str:
    """'97.2 to 99.3 %', and a dash where there is none."""
    return "–" if interval is None else f"{100 * interval[0]:.1f} to {percent(interval[1])}"


def measured_text(accuracy: float, interval: tuple[float, float] | None) -> str:
    """'98.6 %, 95 % interval 97.2 to 99.3 %', for one point."""
    return percent(accuracy) + ("" if interval is None else f", 95 % interval {interval_text(interval)}")


def difference(value: float, level: float) -> str:
    """'−0.4 points' between two accuracies."""
    points = round(100 * (value - level), 1) + 0.0  # adding 0.0 makes a zero of a minus zero
    return f"{points:+.1f} points".replace("-", "−")


def width_name(bits: int) -> str:
    """'4 bits'."""
    return f"{bits} bits"


def counted(number: int, noun: str) -> str:
    """'1 file', '1,000 files'."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def format_bytes(count: float) -> str:
    """A number of bytes to read: '112.5 kB'; 1 kB is 1000 bytes."""
    units = {"bytes": 1.0, "kB": 1e3, "MB": 1e6, "GB": 1e9}
    unit, size = next(((unit, size) for unit, size in units.items() if count < 999.95 * size), ("GB", 1e9))
    return f"{count / size:.{0 if size == 1 else 1}f} {unit}"


def power_of_ten(value: float) -> str:
    """'10⁻³' as plain text, and '0'."""
    raised = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
    return "10" + f"{math.log10(value):.0f}".translate(raised) if value > 0 else "0"


def shortened(name: str, most: int = 40) -> str:
    """A layer's name with its middle left out where it is long; its end tells layers apart."""
    return name if len(name) <= most else f"{name[: most // 3]}…{name[-(most - most // 3 - 1) :]}"
