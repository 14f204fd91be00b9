"""Float models by name: bitdial's own, torchvision's and timm's. Weights are a local file; nothing is downloaded."""

import importlib
import os
from collections.abc import Callable
from difflib import get_close_matches
from typing import Any

from torch import nn

from bitdial.errors import ConfigError, MissingDependencyError
from bitdial.models import MODELS, build_model
from bitdial.models.weights import WeightsMetadata, fill, read_weights

FORMS = "a model of bitdial (mobilenet_v2), torchvision:NAME, timm:NAME, or a .safetensors file that names its model"


def model_by_name(
    name: str, weights: str | os.PathLike[str] | None = None, *, classes: int | None = None
) -> tuple[nn.Module, str]:
    """A float model in eval mode, and its full name; `weights` is a safetensors file, without which values are random.

    `name` is that of one of our models, "torchvision:resnet50", "timm:mobilenetv3_large_100", or a safetensors file of
    weights whose metadata names one of our models. `classes` is for models with another number than the usual one.
    """
    if name.endswith(".safetensors"):
        if weights is not None:
            raise ConfigError(f"{name} and {weights} are both weights; name the model, or give one of them")
        weights = name
    found = None if weights is None else read_weights(weights)
    if name == weights:
        if found is None or found.metadata.model is None:
            raise ConfigError(f"{name} does not say which model its weights are of; name it, and give --weights {name}")
        name = found.metadata.model
    library, sign, inner = name.partition(":")
    if sign and library not in LIBRARIES:
        raise ConfigError(f"model {name!r} is not known; give {FORMS}")
    model = (
        LIBRARIES[library](inner, classes) if sign else _own(name, None if found is None else found.metadata, classes)
    )
    if found is not None:
        fill(model, found, name)
    return model.eval(), name


def _own(name: str, weights: WeightsMetadata | None, classes: int | None) -> nn.Module:
    """One of bitdial's models, with the arguments that the metadata of its weights gives."""
    if name not in MODELS:
        raise ConfigError(f"model {name!r} is not known{_guess(name, list(MODELS))}; give {FORMS}")
    if weights is not None and weights.model not in (None, name):
        raise ConfigError(f"{weights.path} has weights of {weights.model}, not of {name}; name that model")
    arguments: dict[str, Any] = {} if weights is None else dict(weights.arguments)
    if classes is not None:
        arguments["num_classes"] = classes
    return build_model(name, **arguments)


def _torchvision(name: str, classes: int | None) -> nn.Module:
    """A classifier of torchvision; its other models would download a backbone."""
    models = library("torchvision", "torchvision.models")
    known = models.list_models(module=models)
    if name not in known:
        raise ConfigError(f"torchvision has no classification model {name!r}{_guess(name, known)}")
    return models.get_model(name, weights=None, **({} if classes is None else {"num_classes": classes}))


def _timm(name: str, classes: int | None) -> nn.Module:
    timm = library("timm", "timm")
    if not timm.is_model(name):
        raise ConfigError(f"timm has no model {name!r}{_guess(name, timm.list_models())}")
    return timm.create_model(name, pretrained=False, **({} if classes is None else {"num_classes": classes}))


LIBRARIES: dict[str, Callable[[str, int | None], nn.Module]] = {"torchvision": _torchvision, "timm": _timm}


def library(package: str, module: str) -> Any:
    """A module of an optional `package`, imported; MissingDependencyError if it is not there or cannot be imported."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as problem:
        absent = (problem.name or package).partition(".")[0]
        text = f"{absent} is not installed, and the model needs it; install it with: pip install {absent}"
        raise MissingDependencyError(text, name=absent) from problem
    except Exception as problem:  # torchvision raises a RuntimeError where it is of another build than torch
        text = (
            f"{package} is installed, but cannot be imported: {problem}. timm and torchvision need a torchvision of "
            "the version and build (CPU or CUDA) of this torch"
        )
        raise MissingDependencyError(text, name=package) from problem


def _guess(name: str, known: list[str]) -> str:
    close = get_close_matches(name, known, n=1)
    return f", did you mean {close[0]}?" if close else ""
