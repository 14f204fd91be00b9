"""What a detector is given: images and targets, looked at before they are used."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from bitdial.errors import ConfigError


def check_images(images: Any, channels: int) -> None:
    """ConfigError unless `images` are a list of float images of that many channels."""
    if not isinstance(images, list | tuple) or not images:
        what = f"a tensor of shape {tuple(images.shape)}" if isinstance(images, Tensor) else f"{images!r:.40}"
        raise ConfigError(f"a detector takes a list of images (channels, height, width), got {what}; give list(batch)")
    for number, image in enumerate(images):
        if not isinstance(image, Tensor) or image.dim() != 3 or not image.numel() or not image.is_floating_point():
            what = f"{image.dtype} {tuple(image.shape)}" if isinstance(image, Tensor) else type(image).__name__
            raise ConfigError(f"image {number} is {what}; give floats (channels, height, width), from 0 to 1")
        if image.shape[0] != channels:
            hint = ": image.expand(3, -1, -1) makes a grey one so" if len(image) == 1 and channels == 3 else ""
            raise ConfigError(f"image {number} has {len(image)} channels, and the detector takes {channels}{hint}")


def check_targets(images: Sequence[Tensor], targets: Any, classes: int, *, masks: bool) -> None:
    """ConfigError unless `targets` has boxes, labels and masks of every image, in their place and of some size."""
    if not isinstance(targets, list | tuple) or len(targets) != len(images):
        raise ConfigError(f"in training mode a detector takes a list of targets, one for each of {len(images)} images")
    for number, (image, target) in enumerate(zip(images, targets, strict=True)):
        count = len(target["boxes"])
        shapes = {"boxes": (count, 4), "labels": (count,), **({"masks": (count, *image.shape[1:])} if masks else {})}
        for key, shape in shapes.items():
            if key not in target or tuple(target[key].shape) != shape:
                found = tuple(target[key].shape) if key in target else "missing"
                raise ConfigError(f"target {number}: {key!r} is {found}, and of shape {shape} in an image as this one")
        if not bool((target["boxes"][:, 2:] > target["boxes"][:, :2]).all()):
            raise ConfigError(f"target {number} has a box without an area; boxes are (left, top, right, bottom)")
        if not bool(((target["labels"] >= 1) & (target["labels"] <= classes)).all()):
            raise ConfigError(f"target {number} has a label that is none of the classes 1 to {classes}")
