"""The Hessian trace per layer: what `hessian_trace` found, as numbers to keep and to hand on."""

import math
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Self

from bitdial.config import Config
from bitdial.errors import ConfigError
from bitdial.files.atomic import read_json, write_json


class _Stored(Config):
    """A Config whose stored form must be whole."""

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """Build from `to_dict`'s output; an unknown or a missing name is an error."""
        names = [f.name for f in fields(cls)]  # type: ignore[arg-type]  # its children are dataclasses
        if isinstance(values, dict) and (missing := [name for name in names if name not in values]):
            raise ConfigError(f"{cls.__name__}: {missing[0]!r} is missing")
        return super().from_dict(values)


@dataclass(frozen=True, kw_only=True)
class LayerSensitivity(_Stored):
    """What `hessian_trace` found of one layer.

    trace       the estimate of its Hessian's trace; it can be negative, as the Hessian of a network is not convex
    error       the standard error of `trace`: two in three estimates lie within it, 19 in 20 within twice
    parameters  how many weights the layer has
    samples     how many random vectors the estimate is the mean of
    """

    trace: float
    error: float
    parameters: int
    samples: int

    def __post_init__(self) -> None:
        for name in ("trace", "error"):
            value = getattr(self, name)
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not number or not abs(value) <= sys.float_info.max or (name == "error" and value < 0):
                sign = " of at least 0" if name == "error" else ""
                raise ConfigError(f"LayerSensitivity.{name} must be a finite number{sign}, got {_shown(value)}")
            object.__setattr__(self, name, float(value))
        for name, least in (("parameters", 1), ("samples", 2)):
            check_count(f"LayerSensitivity.{name}", getattr(self, name), least)

    @property
    def normalized(self) -> float:
        """The trace per weight of the layer."""
        return self.trace / self.parameters


@dataclass(frozen=True, kw_only=True)
class Sensitivity(_Stored):
    """What `hessian_trace` found on `images` samples: a LayerSensitivity for each layer, by the names of a BitPlan.

    `save` and `load` keep it as a JSON file; `bitdial.save(model, path, sensitivity=...)` keeps it in the artifact.
    """

    layers: dict[str, LayerSensitivity]
    images: int

    def __post_init__(self) -> None:
        if not isinstance(self.layers, dict) or not self.layers or not all(isinstance(n, str) for n in self.layers):
            raise ConfigError("Sensitivity.layers must map layer names to their sensitivity, and name at least one")
        found = {}
        for name, entry in self.layers.items():
            try:
                found[name] = entry if isinstance(entry, LayerSensitivity) else LayerSensitivity.from_dict(entry)
            except ConfigError as problem:
                raise ConfigError(f"layer {name!r}: {problem}") from problem
        object.__setattr__(self, "layers", found)
        check_count("Sensitivity.images", self.images, 1)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it to `path` as JSON, atomically; BitdialError if that fails."""
        write_json(path, self.to_dict())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Sensitivity":
        """Read what `save` wrote; ConfigError names the file and what is wrong with it."""
        values = read_json(path)
        try:
            return cls.from_dict(values)
        except ConfigError as problem:
            raise ConfigError(f"{path} is not what Sensitivity.save writes: {problem}") from problem


def check_count(name: str, value: object, least: int) -> None:
    """Raise ConfigError unless `value` is a whole number of at least `least`."""
    if type(value) is not int or not least <= value < 1 << 63:
        raise ConfigError(f"{name} must be a whole number of at least {least}, got {_shown(value)}")


def _shown(value: object) -> str:
    """A number as it is; of anything else, which may be hostile, the type."""
    return repr(value)[:40] if isinstance(value, int | float) else type(value).__name__


def sensitivity_of(given: Sensitivity | Mapping[str, float], layers: Sequence[str]) -> dict[str, float]:
    """A finite number for each of `layers`, and for no other: as `given`, or the measured trace per weight."""
    if isinstance(given, Sensitivity):
        given = {name: entry.normalized for name, entry in given.layers.items()}
    if not isinstance(given, Mapping):
        raise ConfigError(
            f"sensitivity is a {type(given).__name__}; give what hessian_trace returns, or {{layer: number}}"
        )
    if unknown := [name for name in given if name not in layers]:
        raise ConfigError(
            f"the sensitivities name {unknown[0]!r}, which is not a quantised layer of the model; "
            f"those are {', '.join(map(repr, layers[:5]))}{' ...' if len(layers) > 5 else ''}"
        )
    for name in layers:
        if name not in given:
            raise ConfigError(f"layer {name!r} has no sensitivity; give one for every quantised layer")
        value = given[name]
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ConfigError(
                f"layer {name!r}: its sensitivity is {value}; it must be a finite number: measure it again"
            )
    return {name: float(given[name]) for name in layers}
