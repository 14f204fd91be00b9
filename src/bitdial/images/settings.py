"""How an image becomes an input: its size, its normalisation, the order of its channels."""

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bitdial.config import Config, check_choice
from bitdial.errors import ConfigError
from bitdial.models.weights import WeightsMetadata, read_metadata

ORDERS = ("RGB", "BGR")
INTERPOLATIONS = ("bicubic", "bilinear", "lanczos", "nearest")
LARGEST = 1 << 14  # pixels of a side
STORED = "image_settings"  # the key of an artifact's metrics that has settings


@dataclass(frozen=True, kw_only=True)
class ImageSettings(Config):
    """From an image to an input, with the usual values of models trained on ImageNet.

    resize         an image whose shorter side is longer than so many pixels is made smaller, to that; None: none is
    crop           the square of so many pixels in the middle is the input. Images that are smaller are enlarged to it
                   (with resize=None that is an error)
    mean, std      by channel, in `order`: the input is (pixel of 0..255 - mean) / std
    order          of the channels: 'RGB' or 'BGR'
    interpolation  of a change of size: 'bicubic', 'bilinear', 'lanczos' or 'nearest'
    """

    resize: int | None = 256
    crop: int = 224
    mean: tuple[float, float, float] = (123.675, 116.28, 103.53)
    std: tuple[float, float, float] = (58.395, 57.12, 57.375)
    order: str = "RGB"
    interpolation: str = "bicubic"

    def __post_init__(self) -> None:
        for name in ("resize", "crop"):
            value = getattr(self, name)
            if not (value is None and name == "resize") and (type(value) is not int or not 0 < value <= LARGEST):
                raise ConfigError(f"{name}={value!r} must be a whole number of pixels up to {LARGEST}, such as 224")
        if self.resize is not None and self.resize < self.crop:
            raise ConfigError(
                f"resize={self.resize} makes images smaller than crop={self.crop}; give a resize of at least the crop, "
                "or None for none"
            )
        for name in ("mean", "std"):
            object.__setattr__(self, name, _three_numbers(name, getattr(self, name)))
        if min(self.std) <= 0:
            raise ConfigError(f"std={self.std!r} must be above 0: inputs are divided by it")
        check_choice("order", self.order, ORDERS)
        check_choice("interpolation", self.interpolation, INTERPOLATIONS)

    def to_dict(self) -> dict[str, Any]:
        """The settings as JSON values."""
        return {**super().to_dict(), "mean": list(self.mean), "std": list(self.std)}

    def inputs(self, pixels: Tensor) -> Tensor:
        """`pixels`, uint8 (batch, 3, height, width) in `order`, normalised: float32 on the same device."""
        mean, std = (torch.tensor(values, device=pixels.device).view(3, 1, 1) for values in (self.mean, self.std))
        return pixels.float().sub_(mean).div_(std)

    def __str__(self) -> str:
        size = "no resizing" if self.resize is None else f"shorter side to {self.resize} at most ({self.interpolation})"
        mean, std = (" ".join(f"{value:g}" for value in values) for values in (self.mean, self.std))
        return f"{size}, centre {self.crop} x {self.crop}, {self.order}, mean {mean}, std {std}"


def settings_of_weights(source: str | os.PathLike[str] | WeightsMetadata) -> ImageSettings | None:
    """The settings in the metadata of a safetensors file of weights; None if it says nothing of images.

    tools/imagenet_weights.py writes such files. What the metadata leaves out has its default.
    """
    metadata = source if isinstance(source, WeightsMetadata) else read_metadata(source)
    return _usable(metadata.images, f"{metadata.path}: what its metadata says of images")


def stored_settings(metrics: Mapping[str, Any], source: object) -> ImageSettings | None:
    """The settings in the metrics of an artifact; None if it has none. `source` names the file in errors."""
    return _usable(metrics.get(STORED), f"{source}: what it says of images")


def _usable(values: Any, what: str) -> ImageSettings | None:
    try:
        return None if values is None else ImageSettings.from_dict(values)
    except ConfigError as problem:
        raise ConfigError(f"{what} is not usable: {problem}") from problem


def settings_of_model(model: nn.Module) -> ImageSettings | None:
    """What is known of a model of timm, which carries it, or of torchvision, whose models resize bilinearly."""
    if type(model).__module__.startswith("torchvision."):
        return ImageSettings(interpolation="bilinear")
    share: Any
    match getattr(model, "pretrained_cfg", None):
        case {"mean": mean, "std": std, "input_size": (3, _, int(crop)), **others}:
            share, interpolation = others.get("crop_pct") or 0.875, others.get("interpolation")
            return ImageSettings(
                resize=max(math.floor(crop / share), crop),
                crop=crop,
                mean=tuple(255 * value for value in mean),
                std=tuple(255 * value for value in std),
                interpolation=interpolation if interpolation in INTERPOLATIONS else "bicubic",
            )
        case _:
            return None


def _three_numbers(name: str, values: Any) -> tuple[float, float, float]:
    right = isinstance(values, tuple | list) and len(values) == 3
    if not right or not all(type(value) in (int, float) and math.isfinite(value) for value in values):
        raise ConfigError(f"{name}={values!r} must be three numbers, one for each channel")
    red, green, blue = map(float, values)
    return red, green, blue
