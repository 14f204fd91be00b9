"""Float detectors by name, for images with objects of so many classes: bitdial's own and torchvision's.

DetectorKind(name="tiny_detector", classes=1).build()
kind_with_weights(DetectorKind(name="torchvision:fcos_resnet50_fpn", classes=1), read_weights("resnet50.safetensors"))

A detector takes a list of images from 0 to 1. In training mode it takes their targets too and returns its losses, a
dict; in eval mode it returns what it found, a dict for each image. Classes count from 1.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from bitdial.config import Config
from bitdial.errors import ConfigError
from bitdial.images import settings_of_weights
from bitdial.models import MODELS, build_model
from bitdial.models.by_name import library
from bitdial.models.weights import WeightsFile

TORCHVISION = "torchvision"
LARGEST_SIDE = 1333  # of an image in torchvision's detectors, in pixels
ANCHORS = (16, 32, 64, 128, 256)  # sides of the boxes that two-stage detectors start from, a level each
BODY = "backbone.body"  # where torchvision's detectors have the classifier that they are built on
BLOCK = {"conv1", "conv2", "conv3"}  # of a bottleneck, which may have its stride on the first or the second
FORMS = "give a detector of bitdial (tiny_detector) or torchvision:NAME (torchvision:maskrcnn_resnet50_fpn)"


@dataclass(frozen=True, kw_only=True)
class DetectorKind(Config):
    """What it takes to build a detector anew: a file of bitdial's keeps it, for weights say none of it.

    size            images are scaled until their shorter side has so many pixels (torchvision's detectors)
    max_detections  up to so many objects are found in an image
    frozen          the norms of the classifier that it is built on are frozen, with this `norm_eps`
    stride_first    the classifier's stages have their stride on the first 1x1 convolution
    mean, std       of the inputs, for pixels from 0 to 1; None: torchvision's own
    """

    name: str
    classes: int
    size: int = 640
    max_detections: int = 100
    frozen: bool = False
    stride_first: bool = False
    norm_eps: float = 1e-5
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        for name in ("mean", "std"):
            if (values := getattr(self, name)) is not None:
                object.__setattr__(self, name, tuple(map(float, values)))

    def build(self, *, seed: int = 0) -> nn.Module:
        """The float detector, in eval mode, with values that `seed` decides."""
        library_name, sign, inner = self.name.partition(":")
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            if not sign:
                return self._own()
            if library_name != TORCHVISION:
                raise ConfigError(f"the model {self.name} is not known; {FORMS}")
            return self._torchvision(inner).eval()

    def _own(self) -> nn.Module:
        if not (self.name in MODELS and self.name.endswith("_detector")):
            raise ConfigError(f"the model {self.name} is no detector; {FORMS}")
        return build_model(self.name, num_classes=self.classes, most_detections=self.max_detections).eval()

    def _torchvision(self, name: str) -> nn.Module:
        models: Any = library(TORCHVISION, "torchvision.models")
        known = models.list_models(module=models.detection)
        if name not in known:
            raise ConfigError(f"torchvision has no detector {name!r}; it has {', '.join(known)}")
        model: Any = models.get_model(name, weights=None, weights_backbone=None, num_classes=self.classes + 1)
        self._adapt(model)
        if self.frozen:
            self._change_body(_body(model, self.name))
        return model

    def _adapt(self, model: Any) -> None:
        """Set the size and the kind of images, the anchors and the number of detections, in place."""
        heads = getattr(model, "roi_heads", model)
        if getattr(heads, "keypoint_roi_pool", None) is not None:
            raise ConfigError(f"{self.name} learns keypoints, and images with instance maps have none; {FORMS}")
        heads.detections_per_img = self.max_detections
        change = model.transform
        if change.fixed_size is None:
            change.min_size, change.max_size = (self.size,), max(self.size, LARGEST_SIDE)
        if self.mean is not None and self.std is not None:
            change.image_mean, change.image_std = list(self.mean), list(self.std)
        proposals = getattr(model, "rpn", None)
        if proposals is not None and len(proposals.anchor_generator.sizes) == len(ANCHORS):
            anchors: Any = library(TORCHVISION, "torchvision.models.detection.anchor_utils")
            sides, ratios = tuple((side,) for side in ANCHORS), ((0.5, 1.0, 2.0),) * len(ANCHORS)
            proposals.anchor_generator = anchors.AnchorGenerator(sides, ratios)

    def _change_body(self, body: nn.Module) -> None:
        """Make the classifier inside a detector what the weights are of, in place."""
        for module in body.modules():
            if self.stride_first and {name for name, _ in module.named_children()} >= BLOCK:
                first: Any = module.get_submodule("conv1")
                second: Any = module.get_submodule("conv2")
                first.stride, second.stride = second.stride, first.stride
        _freeze_norms(body, self.norm_eps)


def kind_with_weights(kind: DetectorKind, weights: WeightsFile) -> DetectorKind:
    """`kind`, built on the classifier whose weights these are, as tools/imagenet_weights.py writes them."""
    path = weights.metadata.path
    if not kind.name.startswith(f"{TORCHVISION}:"):
        raise ConfigError(f"--weights {path}: {kind.name} starts from random values; leave it out")
    settings = settings_of_weights(weights.metadata)
    if settings is None:
        raise ConfigError(f"{path} does not say how images become inputs; tools/imagenet_weights.py says it")
    if settings.order != "RGB":
        raise ConfigError(f"{path} is for images in the order {settings.order}, and a detector takes RGB")
    arguments = weights.metadata.arguments
    return replace(
        kind,
        frozen=True,
        stride_first=bool(arguments.get("stride_first", False)),
        norm_eps=float(arguments.get("norm_eps", kind.norm_eps)),
        mean=tuple(value / 255 for value in settings.mean),
        std=tuple(value / 255 for value in settings.std),
    )


def fill_body(model: nn.Module, weights: WeightsFile) -> None:
    """Put a classifier's weights where the detector has it, in place; the classifier's own head has no place."""
    path = weights.metadata.path
    body = _body(model, str(path))
    own = body.state_dict()
    given = {key: value for key, value in weights.tensors.items() if key in own}
    lost = [key for key in own if key not in given and not key.endswith("num_batches_tracked")]
    odd = [key for key, value in given.items() if value.shape != own[key].shape]
    if lost or odd:
        raise ConfigError(f"{path} does not fit {BODY}: {(lost or odd)[0]} is missing or of another shape")
    body.load_state_dict(given, strict=False)


def _body(model: nn.Module, source: str) -> nn.Module:
    try:
        return model.get_submodule(BODY)
    except AttributeError as problem:
        raise ConfigError(f"{source}: {type(model).__name__} has no {BODY}; leave --weights out") from problem


def _freeze_norms(body: nn.Module, eps: float) -> None:
    """Put torchvision's frozen norms in the place of batch norms, in place: a few images teach no statistics."""
    frozen: Any = library(TORCHVISION, "torchvision.ops").FrozenBatchNorm2d
    for parent in list(body.modules()):
        for name, norm in list(parent.named_children()):
            if isinstance(norm, nn.BatchNorm2d):
                setattr(parent, name, frozen(norm.num_features, eps=eps))
