"""Settings, as frozen dataclasses that check themselves and round-trip through plain dicts."""

import dataclasses
from collections.abc import Iterable
from typing import Any, Self

from bitdial.errors import ConfigError


class Config:
    """Strict conversion between a frozen dataclass and a dict of JSON values."""

    def to_dict(self) -> dict[str, Any]:
        """The settings as JSON values; `from_dict` gives an equal object back."""
        return dataclasses.asdict(self)  # type: ignore[call-overload]

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """Build from `to_dict`'s output; an unknown name is an error, one left out takes its default."""
        if not isinstance(values, dict):
            raise ConfigError(f"{cls.__name__}: expected a dict of settings, got {type(values).__name__}")
        known = {f.name for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
        if unknown := sorted(set(values) - known):
            raise ConfigError(f"{cls.__name__}: unknown settings {unknown}; known are {sorted(known)}")
        return cls(**values)


def check_types(owner: str, values: object, types: dict[str, type]) -> None:
    """Raise ConfigError unless each named attribute of `values` is None or of its type."""
    for name, kind in types.items():
        value = getattr(values, name)
        if value is not None and not isinstance(value, kind):
            raise ConfigError(f"{owner}.{name}={value!r} must be of type {kind.__name__}")


def check_choice(name: str, value: object, choices: Iterable[object]) -> None:
    """Raise ConfigError unless `value` is one of `choices`."""
    if value not in tuple(choices):
        raise ConfigError(f"{name}={value!r} is not known; choose one of {', '.join(map(repr, choices))}")


def check_bit_choices(bit_choices: Iterable[int]) -> tuple[int, ...]:
    """`bit_choices` as a tuple, checked: whole numbers from 2 to 8, each once, descending."""
    if isinstance(bit_choices, str | bytes) or not isinstance(bit_choices, Iterable):
        raise ConfigError(f"bit_choices={bit_choices!r} must be a sequence such as (8, 6, 4, 2)")
    bits = tuple(bit_choices)
    if not bits or any(type(b) is not int or not 2 <= b <= 8 for b in bits):
        raise ConfigError(f"bit_choices={bits!r} must hold whole numbers from 2 to 8, such as (8, 6, 4, 2)")
    if list(bits) != sorted(set(bits), reverse=True):
        raise ConfigError(f"bit_choices={bits!r} must be descending without repeats, such as (8, 6, 4, 2)")
    return bits
