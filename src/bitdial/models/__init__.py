"""Ready-made models by name: plain float networks to prepare, train and pack.

A model is known by its name and JSON-able keyword arguments, so a file can say how to rebuild it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable

from torch import nn

from bitdial.errors import ConfigError
from bitdial.models.cifar_resnet import cifar_resnet, resnet20, resnet56
from bitdial.models.detector import tiny_detector
from bitdial.models.efficientnet_lite import efficientnet_lite0
from bitdial.models.mobilenetv2 import mobilenet_v2
from bitdial.models.resnet import resnet18, resnet50
from bitdial.models.transformer import tiny_transformer

__all__ = ["MODELS", "build_model"]

MODELS: dict[str, Callable[..., nn.Module]] = {
    "cifar_resnet": cifar_resnet,
    "efficientnet_lite0": efficientnet_lite0,
    "mobilenet_v2": mobilenet_v2,
    "resnet18": resnet18,
    "resnet20": resnet20,
    "resnet50": resnet50,
    "resnet56": resnet56,
    "tiny_detector": tiny_detector,
    "tiny_transformer": tiny_transformer,
}


def build_model(name: str, **arguments: int | float | bool) -> nn.Module:
    """Return a new model, ``MODELS[name](**arguments)``, after checking name and arguments.

    Every argument has a default, and its value must be of the default's type; integers are sizes
    and must be at least 1. Raises ConfigError otherwise.
    """
    if name not in MODELS:
        raise ConfigError(f"model {name!r} is not known; choose one of: {', '.join(MODELS)}")
    builder = MODELS[name]
    defaults = {key: entry.default for key, entry in inspect.signature(builder).parameters.items()}
    for key, value in arguments.items():
        if key not in defaults:
            raise ConfigError(f"model {name!r} takes no argument {key!r}; choose among: {', '.join(defaults)}")
        problem = _problem(value, defaults[key])
        if problem:
            raise ConfigError(f"model {name!r}: {key}={value!r} {problem}")
    model = builder(**arguments)
    # Travels with copies of the model, so that a file saved from one can say how to rebuild it.
    model.architecture = {"name": name, "arguments": dict(arguments)}  # type: ignore[assignment]
    return model


def _problem(value: object, default: object) -> str:
    """Return what is wrong with ``value`` as an argument whose default is ``default``, or ''."""
    if isinstance(default, bool):
        return "" if isinstance(value, bool) else "is not a bool; pass True or False"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return "is not a number; pass one like the default " + repr(default)
    if isinstance(default, int) and (not isinstance(value, int) or value < 1):
        return "is not a size; pass an integer of at least 1"
    if not 0 <= value < float("inf"):
        return "is negative or not finite; pass a number of at least 0"
    return ""
