"""A small detector with masks: a ResNet, a feature pyramid, one head for all of its levels, a mask branch.

It is built and called as torchvision's detectors are. `detector(images, targets)` returns a dict of losses in training
mode; `detector(images)` a dict of boxes, labels, scores and masks for each image in eval mode. Images (channels,
height, width) are floats, each of its own size. A target has `boxes` (n, 4), `labels` (n,) from 1 to num_classes, and
where there is a mask branch `masks` (n, height, width).

The head has one anchor for each pixel of a level, four pixels wide. Its layers are called once a level.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bitdial.errors import ConfigError
from bitdial.models.boxes import crop, paste, suppress
from bitdial.models.resnet import BasicBlock, initialize, make_stage

STRIDES = (4, 8, 16)
ANCHOR = 4.0  # the side of an anchor, in pixels of its level
CANDIDATES, MOST_OVERLAP = 200, 0.5
CROP = 7  # the side of what the mask branch reads; its masks have twice that
MOST_MASKS = 64  # objects of an image that the mask branch learns from
LARGEST = math.log(64.0)  # of a box, in anchors


class FrozenBatchNorm2d(nn.Module):
    """A batch norm that learns nothing: its weight, bias and statistics are buffers, as in torchvision."""

    weight: Tensor
    bias: Tensor
    running_mean: Tensor
    running_var: Tensor

    def __init__(self, num_features: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        for name, value in (("weight", 1.0), ("bias", 0.0), ("running_mean", 0.0), ("running_var", 1.0)):
            self.register_buffer(name, torch.full((num_features,), value))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise (N, num_features, H, W)."""
        scale = self.weight * (self.running_var + self.eps).rsqrt()
        shift = self.bias - self.running_mean * scale
        return x * scale.view(1, -1, 1, 1) + shift.view(1, -1, 1, 1)


class Pyramid(nn.Module):
    """A ResNet of three stages and the feature pyramid on them: levels of strides 4, 8 and 16, as many channels each."""

    def __init__(self, *, in_channels: int, width: int, blocks: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, width, 3, stride=2, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU()
        widths = (width, 2 * width, 4 * width)
        self.stages = nn.ModuleList(
            make_stage(BasicBlock, before, own, blocks, stride=2)
            for before, own in zip((width, *widths), widths, strict=False)
        )
        self.lateral = nn.ModuleList(nn.Conv2d(own, 2 * width, 1) for own in widths)
        self.output = nn.ModuleList(nn.Conv2d(2 * width, 2 * width, 3, padding=1) for _ in widths)

    def forward(self, x: Tensor) -> list[Tensor]:
        """Map images (N, in_channels, H, W) to the levels, the finest first."""
        x = self.relu(self.bn1(self.conv1(x)))
        levels = []
        for stage, lateral in zip(self.stages, self.lateral, strict=True):
            x = stage(x)
            levels.append(lateral(x))
        for place in (1, 0):
            above = F.interpolate(levels[place + 1], size=levels[place].shape[-2:], mode="nearest")
            levels[place] = levels[place] + above
        return [output(level) for output, level in zip(self.output, levels, strict=True)]


class Head(nn.Module):
    """Two shared convolutions and two predictors, on every level: class logits and box offsets of each anchor."""

    def __init__(self, channels: int, *, num_classes: int, norm: bool) -> None:
        super().__init__()
        layers = [
            [nn.Conv2d(channels, channels, 3, padding=1), *([nn.BatchNorm2d(channels)] if norm else []), nn.ReLU()]
            for _ in range(2)
        ]
        self.tower = nn.Sequential(*(part for layer in layers for part in layer))
        self.classes = nn.Conv2d(channels, num_classes, 3, padding=1)
        self.offsets = nn.Conv2d(channels, 4, 3, padding=1)

    def forward(self, levels: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Logits (N, anchors, num_classes) and offsets (N, anchors, 4), those of the finest level first."""
        towers = [self.tower(level) for level in levels]
        found = ([predictor(x).flatten(2) for x in towers] for predictor in (self.classes, self.offsets))
        logits, offsets = (torch.cat(parts, dim=2).transpose(1, 2) for parts in found)
        return logits, offsets


class MaskBranch(nn.Module):
    """From crops (n, channels, s, s) to the mask logits (n, num_classes, 2 s, 2 s) of their boxes."""

    def __init__(self, channels: int, *, num_classes: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)
        self.up = nn.ConvTranspose2d(channels, channels, 2, stride=2)
        self.masks = nn.Conv2d(channels, num_classes, 1)

    def forward(self, crops: Tensor) -> Tensor:
        """The logits of each class."""
        return self.masks(torch.relu(self.up(torch.relu(self.conv(crops)))))


class Anchors(NamedTuple):
    """The anchors of a batch: centres (anchors, 2), and the stride of each one's level (anchors, 1)."""

    centres: Tensor
    strides: Tensor

    def offsets_of(self, boxes: Tensor) -> Tensor:
        """What the head should say of `boxes` (anchors, 4)."""
        sides = (boxes[:, 2:] - boxes[:, :2]) / (ANCHOR * self.strides)
        moved = ((boxes[:, :2] + boxes[:, 2:]) / 2 - self.centres) / self.strides
        return torch.cat([moved, sides.log()], dim=1)

    def boxes_of(self, offsets: Tensor) -> Tensor:
        """The boxes that `offsets` (..., anchors, 4) mean."""
        centres = self.centres + offsets[..., :2] * self.strides
        halves = offsets[..., 2:].clamp(max=LARGEST).exp() * (ANCHOR * self.strides / 2)
        return torch.cat([centres - halves, centres + halves], dim=-1)

    def owners(self, boxes: Tensor) -> Tensor:
        """Which of `boxes` (n, 4) each anchor is to find: (anchors,), -1 for none. The smaller of two goes first.

        A box is for the level whose anchors are nearest to it in size: for those in the inner half of the box, and
        the one nearest to its centre.
        """
        if len(boxes) == 0:
            return torch.full((len(self.centres),), -1, device=self.centres.device)
        sides = boxes[:, 2:] - boxes[:, :2]
        sizes = sides.amax(dim=1)
        ratio = (sizes[:, None] / (ANCHOR * torch.tensor(STRIDES, device=boxes.device))).log().abs()
        level = torch.tensor(STRIDES, device=boxes.device)[ratio.argmin(dim=1)]
        apart = (self.centres[None] - (boxes[:, None, :2] + boxes[:, None, 2:]) / 2).abs()  # (n, anchors, 2)
        here = level[:, None] == self.strides[:, 0][None]
        distance = torch.where(here, apart.square().sum(dim=2), math.inf)
        inner = (apart < sides[:, None] / 4).all(dim=2) & here
        inner[torch.arange(len(boxes), device=boxes.device), distance.argmin(dim=1)] = True
        claims = torch.where(inner, sizes[:, None], math.inf)
        return torch.where(inner.any(dim=0), claims.argmin(dim=0), -1)


class Detector(nn.Module):
    """`backbone`, `head` and `mask_branch` (None without masks); see the module's own words."""

    mask_branch: MaskBranch | None

    def __init__(
        self,
        *,
        num_classes: int,
        in_channels: int,
        width: int,
        blocks: int,
        masks: bool,
        head_norm: bool,
        score_threshold: float,
        most_detections: int,
    ) -> None:
        super().__init__()
        self.num_classes, self.in_channels = num_classes, in_channels
        self.score_threshold, self.most_detections = score_threshold, most_detections
        self.backbone = Pyramid(in_channels=in_channels, width=width, blocks=blocks)
        self.head = Head(2 * width, num_classes=num_classes, norm=head_norm)
        self.mask_branch = MaskBranch(2 * width, num_classes=num_classes) if masks else None
        initialize(self)
        for predictor in (self.head.classes, self.head.offsets):
            nn.init.normal_(predictor.weight, std=0.01)
        nn.init.constant_(self.head.classes.bias, -math.log(99.0))  # type: ignore[arg-type]  # a score of 0.01

    def forward(
        self, images: Sequence[Tensor], targets: Sequence[Mapping[str, Tensor]] | None = None
    ) -> dict[str, Tensor] | list[dict[str, Tensor]]:
        """The losses in training mode, else what is found in each image."""
        check_images(images, self.in_channels)
        if self.training:
            check_targets(images, targets, self.num_classes, masks=self.mask_branch is not None)
        batch = padded(images)
        levels = self.backbone(batch)
        logits, offsets = self.head(levels)
        anchors = anchors_of(levels)
        if self.training:
            assert targets is not None
            return self._losses(levels, logits, offsets, anchors, targets)
        sizes = [(image.shape[1], image.shape[2]) for image in images]
        return self._found(levels, logits, offsets, anchors, sizes)

    def _losses(
        self,
        levels: list[Tensor],
        logits: Tensor,
        offsets: Tensor,
        anchors: Anchors,
        targets: Sequence[Mapping[str, Tensor]],
    ) -> dict[str, Tensor]:
        wanted, apart, count = torch.zeros_like(logits), [offsets.sum() * 0.0], 0
        for number, target in enumerate(targets):
            owners = anchors.owners(target["boxes"])
            mine = (owners >= 0).nonzero()[:, 0]
            wanted[number, mine, target["labels"][owners[mine]] - 1] = 1.0
            aims = Anchors(anchors.centres[mine], anchors.strides[mine]).offsets_of(target["boxes"][owners[mine]])
            apart.append(F.smooth_l1_loss(offsets[number, mine], aims, beta=0.1, reduction="sum"))
            count += len(mine)
        losses = {
            "loss_classes": focal_loss(logits, wanted) / max(count, 1),
            "loss_boxes": torch.stack(apart).sum() / max(count, 1),
        }
        if self.mask_branch is not None:
            losses["loss_masks"] = self._mask_loss(levels[0], targets)
        return losses

    def _mask_loss(self, finest: Tensor, targets: Sequence[Mapping[str, Tensor]]) -> Tensor:
        """The mask branch learns on the boxes of the targets."""
        some = [{key: value[:MOST_MASKS] for key, value in target.items()} for target in targets]
        logits, labels = self._mask_logits(finest, [each["boxes"] for each in some]), [each["labels"] for each in some]
        if len(logits) == 0:
            return logits.sum() * 0.0
        aims = [
            crop(each["masks"][:, None].to(logits), each["boxes"], torch.arange(len(each["boxes"])), 2 * CROP)
            for each in some
            if len(each["boxes"])
        ]
        own = logits[torch.arange(len(logits)), torch.cat(labels) - 1]
        return F.binary_cross_entropy_with_logits(own, torch.cat(aims)[:, 0])

    def _mask_logits(self, finest: Tensor, boxes: Sequence[Tensor]) -> Tensor:
        assert self.mask_branch is not None
        of = torch.cat([torch.full((len(each),), number) for number, each in enumerate(boxes)]).to(finest.device)
        return self.mask_branch(crop(finest, torch.cat(list(boxes)) / STRIDES[0], of, CROP))

    def _found(
        self, levels: list[Tensor], logits: Tensor, offsets: Tensor, anchors: Anchors, sizes: list[tuple[int, int]]
    ) -> list[dict[str, Tensor]]:
        found = []
        for scores, boxes, (height, width) in zip(logits.sigmoid(), anchors.boxes_of(offsets), sizes, strict=True):
            best, places = scores.flatten().topk(min(CANDIDATES, scores.numel()))
            places = places[best > self.score_threshold]
            best = best[best > self.score_threshold]
            limits = torch.tensor([width, height, width, height], dtype=boxes.dtype, device=boxes.device)
            some = torch.minimum(boxes[places // self.num_classes].clamp(min=0), limits)
            labels = places % self.num_classes + 1
            kept = suppress(some, best, labels, MOST_OVERLAP)[: self.most_detections]
            found.append({"boxes": some[kept], "labels": labels[kept], "scores": best[kept]})
        if self.mask_branch is not None:
            masks = self._mask_logits(levels[0], [each["boxes"] for each in found])
            labels = torch.cat([each["labels"] for each in found])
            own = masks[torch.arange(len(masks)), labels - 1].sigmoid()[:, None]
            for each, part, size in zip(found, own.split([len(each["boxes"]) for each in found]), sizes, strict=True):
                each["masks"] = paste(part, each["boxes"], size)
        return found


def focal_loss(logits: Tensor, wanted: Tensor) -> Tensor:
    """The sum of the focal loss, in which anchors that are easy count little: most of them see nothing."""
    losses = F.binary_cross_entropy_with_logits(logits, wanted, reduction="none")
    scores = logits.sigmoid()
    missed = scores + wanted - 2 * scores * wanted
    return ((0.75 - 0.5 * wanted) * missed.square() * losses).sum()


def anchors_of(levels: Sequence[Tensor]) -> Anchors:
    """An anchor in the middle of each pixel of `levels`, row by row."""
    centres, strides = [], []
    for level, stride in zip(levels, STRIDES, strict=True):
        height, width = level.shape[-2:]
        y, x = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
        centres.append((torch.stack([x, y], dim=2).reshape(-1, 2) + 0.5) * stride)
        strides.append(torch.full((height * width, 1), float(stride)))
    return Anchors(torch.cat(centres).to(levels[0]), torch.cat(strides).to(levels[0]))


def padded(images: Sequence[Tensor]) -> Tensor:
    """The images in one batch, with zeros to the right and below up to a multiple of the coarsest stride."""
    height, width = (
        -(-max(image.shape[dim] for image in images) // STRIDES[-1]) * STRIDES[-1] for dim in (1, 2)
    )
    return torch.stack([F.pad(x, (0, width - x.shape[2], 0, height - x.shape[1])) for x in images])


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


def freeze_norms(model: nn.Module) -> None:
    """Put a frozen norm of the same numbers in the place of every batch norm of `model`, in place."""
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if isinstance(child, nn.BatchNorm2d):
                frozen = FrozenBatchNorm2d(child.num_features, child.eps)
                frozen.load_state_dict({key: value for key, value in child.state_dict().items() if value.dim()})
                setattr(parent, name, frozen)


def tiny_detector(
    *,
    num_classes: int = 2,
    in_channels: int = 3,
    width: int = 16,
    blocks: int = 1,
    masks: bool = True,
    head_norm: bool = False,
    frozen_norms: bool = False,
    score_threshold: float = 0.05,
    most_detections: int = 100,
) -> nn.Module:
    """Return a detector of 0.2 million parameters at the default arguments, for images of 32 pixels and more.

    ``head_norm`` puts batch norms into the shared head, ``frozen_norms`` makes those of the backbone frozen ones.
    """
    detector = Detector(
        num_classes=num_classes,
        in_channels=in_channels,
        width=width,
        blocks=blocks,
        masks=masks,
        head_norm=head_norm,
        score_threshold=score_threshold,
        most_detections=most_detections,
    )
    if frozen_norms:
        freeze_norms(detector.backbone)
    return detector
