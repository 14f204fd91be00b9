"""Float detectors by name, for images with objects of so many classes: bitdial's own and torchvision's.

build_detector("tiny_detector", 1)
build_detector("torchvision:maskrcnn_resnet50_fpn", 1, weights="resnet50.safetensors")

A detector takes a list of images from 0 to 1. In training mode it takes their targets too and returns its losses, a
dict; in eval mode it returns what it found, a dict for each image. Classes count from 1.
"""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from bitdial.errors import ConfigError
from bitdial.images import settings_of_weights
from bitdial.models import MODELS, build_model
from bitdial.models.by_name import library
from bitdial.models.weights import WeightsFile, read_weights

TORCHVISION = "torchvision"
LARGEST_SIDE = 1333  # of an image in torchvision's detectors, in pixels
ANCHORS = (16, 32, 64, 128, 256)  # sides of the boxes that two-stage detectors start from, a level each
BODY = "backbone.body"  # where torchvision's detectors have the classifier that they are built on


def build_detector(
    name: str,
    classes: int,
    *,
    weights: Path | None = None,
    size: int = 640,
    max_detections: int = 100,
    seed: int = 0,
) -> nn.Module:
    """The float detector `name`, in eval mode; what `weights` do not give is drawn by `seed`.

    `weights` is a safetensors file of the classifier that torchvision's detectors are built on, as
    tools/imagenet_weights.py writes: the norms there are then frozen. Images are scaled until their shorter side has
    `size` pixels (torchvision's). Up to `max_detections` objects are found in an image.
    """
    library_name, sign, inner = name.partition(":")
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        if not sign:
            return _own(name, classes, weights, max_detections)
        if library_name != TORCHVISION:
            raise ConfigError(f"--model {name}: give a detector of bitdial (tiny_detector) or torchvision:NAME")
        return _torchvision(inner, classes, weights, size, max_detections).eval()


def _own(name: str, classes: int, weights: Path | None, max_detections: int) -> nn.Module:
    if not (name in MODELS and name.endswith("_detector")):
        own = ", ".join(known for known in MODELS if known.endswith("_detector"))
        raise ConfigError(f"--model {name} is no detector; give one of bitdial ({own}) or torchvision:NAME")
    if weights is not None:
        raise ConfigError(f"--weights {weights}: {name} starts from random values; leave it out")
    return build_model(name, num_classes=classes, most_detections=max_detections).eval()


def _torchvision(name: str, classes: int, weights: Path | None, size: int, max_detections: int) -> nn.Module:
    models: Any = library(TORCHVISION, "torchvision.models")
    known = models.list_models(module=models.detection)
    if name not in known:
        raise ConfigError(f"torchvision has no detector {name!r}; it has {', '.join(known)}")
    given: dict[str, Any] = {"num_classes": classes + 1, "min_size": size, "max_size": max(size, LARGEST_SIDE)}
    if name.startswith(("maskrcnn", "fasterrcnn")):
        anchors: Any = library(TORCHVISION, "torchvision.models.detection.anchor_utils")
        ratios = ((0.5, 1.0, 2.0),) * len(ANCHORS)
        given["box_detections_per_img"] = max_detections
        if "fpn" in name and "mobilenet" not in name:
            given["rpn_anchor_generator"] = anchors.AnchorGenerator(tuple((side,) for side in ANCHORS), ratios)
    elif name.startswith(("retinanet", "fcos", "ssd")):
        given["detections_per_img"] = max_detections
    content = None if weights is None else read_weights(weights)
    if content is not None:
        given |= _normalisation(content)
    model: nn.Module = models.get_model(name, weights=None, weights_backbone=None, **given)
    if content is not None:
        _fill_body(model, content)
    return model


def _normalisation(weights: WeightsFile) -> dict[str, Any]:
    """How images become inputs of the classifier, as torchvision's detectors say it: for pixels from 0 to 1."""
    settings = settings_of_weights(weights.metadata)
    if settings is None:
        raise ConfigError(
            f"{weights.metadata.path} does not say how images become inputs; tools/imagenet_weights.py does"
        )
    if settings.order != "RGB":
        raise ConfigError(f"{weights.metadata.path} is for images in the order {settings.order}; a detector takes RGB")
    scaled = {"image_mean": settings.mean, "image_std": settings.std}
    return {name: [value / 255 for value in values] for name, values in scaled.items()}


def _fill_body(model: nn.Module, weights: WeightsFile) -> None:
    """Put a classifier's weights where the detector has it, in place, with its strides and frozen norms."""
    path = weights.metadata.path
    try:
        body = model.get_submodule(BODY)
    except AttributeError as problem:
        raise ConfigError(
            f"{path}: {type(model).__name__} has no {BODY} to put them into; leave --weights out"
        ) from problem
    arguments = weights.metadata.arguments
    for module in body.modules():
        if arguments.get("stride_first") and {"conv1", "conv2", "conv3"} <= {n for n, _ in module.named_children()}:
            first: Any = module.get_submodule("conv1")
            second: Any = module.get_submodule("conv2")
            first.stride, second.stride = second.stride, first.stride
        if isinstance(module, nn.BatchNorm2d):
            module.eps = float(arguments.get("norm_eps", module.eps))
    own = body.state_dict()
    given = {key: value for key, value in weights.tensors.items() if key in own}
    lost = [key for key in own if key not in given and not key.endswith("num_batches_tracked")]
    odd = [key for key, value in given.items() if value.shape != own[key].shape]
    if lost or odd:
        raise ConfigError(f"{path} does not fit {BODY}: {(lost or odd)[0]} is missing or of another shape")
    body.load_state_dict(given, strict=False)
    _freeze_norms(body)


def _freeze_norms(body: nn.Module) -> None:
    """Put torchvision's frozen norms in the place of batch norms, in place: batches of a few images teach no statistics."""
    frozen: Any = library(TORCHVISION, "torchvision.ops").FrozenBatchNorm2d
    for parent in list(body.modules()):
        for name, norm in list(parent.named_children()):
            if isinstance(norm, nn.BatchNorm2d):
                made = frozen(norm.num_features, eps=norm.eps)
                made.load_state_dict(norm.state_dict())
                setattr(parent, name, made)
