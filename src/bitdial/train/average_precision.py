"""COCO's average precision of detectors, for boxes and masks, as a measure. The only file that imports pycocotools.

evaluate(live, batches, [8, 4, 2], measure=detection_metrics)
"""

import io
from collections.abc import Iterable, Mapping, Sequence
from contextlib import redirect_stdout
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from bitdial.errors import ConfigError, MissingDependencyError, QuantizationError, TrainingError
from bitdial.prepare.labels import pairs
from bitdial.prepare.model_call import call, evaluating

KINDS = {"box": "bbox", "mask": "segm"}  # ours to COCO's
LEVEL = 0.5  # the probability from which a pixel belongs to a mask
_NEEDED = ("boxes", "labels", "scores")


def detection_metrics(
    model: nn.Module, batches: Iterable[tuple[Any, Any]], *, max_detections: int = 100, masks: bool | None = None
) -> dict[str, float]:
    """COCO's average precision of a detector: {"box_ap", "box_ap50", "box_ap75"}, and the same with "mask" for masks.

    A batch is (images, targets). In eval mode the model takes the images, a list of tensors, and gives a dict for each
    with `boxes` (n, 4: left, top, right, bottom), `labels`, `scores` and, of detectors with masks, `masks` (n, 1,
    height, width), probabilities. A target is a dict with `boxes`, `labels` and, for masks, `masks` (n, height, width)
    or `instances` (height, width), a map of the objects 1 to n. `ap` is the mean over the IoU thresholds 0.50 to 0.95
    and over the classes that occur; it is NaN where no image has an object. Of each image and class the
    `max_detections` with the highest scores count (COCO's 100; images with more objects want more). `masks` says
    whether masks are compared; None compares them where detections and targets have them.
    """
    if type(max_detections) is not int or max_detections < 1:
        raise ConfigError(f"max_detections={max_detections!r} must be a whole number of at least 1")
    coco = _Coco(max_detections, masks)
    with evaluating(model):
        for inputs, targets in pairs(batches):
            found = call(model, inputs)
            _check_counts(found, targets)
            for detections, target in zip(found, targets, strict=True):
                coco.add(detections, target)
    if coco.images == 0:
        raise TrainingError("there is nothing to evaluate on: no batch was given, or none has an image")
    return {name: value for kind in coco.kinds for name, value in coco.precision(kind).items()}


def _check_counts(found: Any, targets: Any) -> None:
    if not isinstance(found, Sequence) or not all(isinstance(one, Mapping) for one in found):
        raise TrainingError(
            f"the model returned a {type(found).__name__}, not a dict of detections for each image; detection_metrics "
            "is for detectors in eval mode"
        )
    if not isinstance(targets, Sequence) or len(targets) != len(found):
        raise TrainingError(f"{len(found)} images have {len(targets)} targets; give a list with one dict for each")


class _Coco:
    """What was found and what is there, in COCO's form, image by image; masks are kept run-length encoded."""

    def __init__(self, max_detections: int, masks: bool | None):
        try:
            import pycocotools.coco  # noqa: F401
        except ImportError as problem:
            raise MissingDependencyError.missing("detection", "pycocotools") from problem
        self.max_detections, self.masks = max_detections, masks
        self.images = 0
        self.sizes: list[tuple[int, int]] = []  # height and width
        self.truth: list[dict[str, Any]] = []
        self.found: list[dict[str, Any]] = []

    @property
    def kinds(self) -> tuple[str, ...]:
        """What is compared."""
        return ("box", "mask") if self.masks else ("box",)

    def add(self, detections: Mapping[str, Any], target: Mapping[str, Any]) -> None:
        """One image's detections and objects."""
        self._check(detections, target)
        if self.masks is None:
            self.masks = "masks" in detections and ("masks" in target or "instances" in target)
        self.images += 1
        crowd = target.get("iscrowd", [0] * len(target["boxes"]))
        there: list[Any] = [None] * len(target["boxes"])
        found: list[Any] = [None] * len(detections["boxes"])
        if self.masks:
            there, size = _encoded_truth(target)
            found, own = _encoded(_probable(detections["masks"], len(found)))
            if found and own != size:
                raise TrainingError(
                    f"image {self.images - 1}: masks of {own} pixels were found, the target's are {size}"
                )
            self.sizes.append(size)
        for box, label, code, flag in zip(_numbers(target["boxes"]), target["labels"], there, crowd, strict=True):
            entry = self._entry(box, label, code)
            self.truth.append(entry | {"id": len(self.truth) + 1, "iscrowd": int(flag)})
        scores = _numbers(detections["scores"])
        for box, label, code, score in zip(
            _numbers(detections["boxes"]), detections["labels"], found, scores, strict=True
        ):
            entry = self._entry(box, label, code)
            self.found.append(entry | {"id": len(self.found) + 1, "iscrowd": 0, "score": float(score)})

    def _check(self, detections: Mapping[str, Any], target: Mapping[str, Any]) -> None:
        where = f"image {self.images}"
        if missing := [name for name in _NEEDED if name not in detections]:
            raise TrainingError(f"{where}: what the model found has no {missing[0]!r}, only {sorted(detections)}")
        if missing := [name for name in ("boxes", "labels") if name not in target]:
            raise TrainingError(f"{where}: its target has no {missing[0]!r}, only {sorted(target)}")
        if self.masks:
            if "masks" not in detections:
                raise TrainingError(f"{where}: the model found no 'masks'; measure boxes alone: masks=False")
            if "masks" not in target and "instances" not in target:
                raise TrainingError(f"{where}: its target has neither 'masks' nor 'instances', others have")
        for name in ("boxes", "scores"):
            if not bool(torch.isfinite(detections[name]).all()):
                raise QuantizationError(f"{where}: the {name} that the model found hold NaN or infinity; check it")

    def _entry(self, box: Any, label: Any, code: Any) -> dict[str, Any]:
        left, top, right, bottom = map(float, box)
        area = (right - left) * (bottom - top)
        entry = {"image_id": self.images, "category_id": int(label), "bbox": [left, top, right - left, bottom - top]}
        if code is not None:
            from pycocotools import mask

            entry["segmentation"], area = code, float(mask.area(code))
        return entry | {"area": area}

    def precision(self, kind: str) -> dict[str, float]:
        """The average precision of boxes or masks."""
        from pycocotools.cocoeval import COCOeval

        with redirect_stdout(io.StringIO()):  # it reports its progress
            scorer = COCOeval(self._dataset(self.truth), self._dataset(self.found), KINDS[kind])
            scorer.params.maxDets = [self.max_detections]
            scorer.params.areaRng, scorer.params.areaRngLbl = scorer.params.areaRng[:1], ["all"]
            scorer.evaluate()
            scorer.accumulate()
        by_threshold = scorer.eval["precision"][..., 0, 0]  # (thresholds, recalls, classes); -1 where nothing is there
        thresholds = [round(float(value), 2) for value in scorer.params.iouThrs]
        places = {
            f"{kind}_ap": slice(None),
            f"{kind}_ap50": thresholds.index(0.5),
            f"{kind}_ap75": thresholds.index(0.75),
        }
        return {name: _mean(by_threshold[place]) for name, place in places.items()}

    def _dataset(self, entries: list[dict[str, Any]]) -> Any:
        from pycocotools.coco import COCO

        sizes = self.sizes or [(1, 1)] * self.images  # which boxes do not need
        images = [{"id": number, "height": h, "width": w} for number, (h, w) in enumerate(sizes, start=1)]
        classes = sorted({entry["category_id"] for entry in self.truth})
        dataset = COCO()
        dataset.dataset = {
            "images": images,
            "annotations": entries,
            "categories": [{"id": number} for number in classes],
        }
        dataset.createIndex()
        return dataset


def _mean(precision: Any) -> float:
    known = precision[precision > -1]
    return float(known.mean()) if known.size else float("nan")


def _numbers(values: Any) -> Any:
    return torch.as_tensor(values).detach().double().cpu().numpy()


def _probable(masks: Tensor, count: int) -> Tensor:
    """Which pixels belong to masks given as probabilities: bool (n, height, width)."""
    if len(masks) != count or masks.dim() not in (3, 4):
        raise TrainingError(
            f"{count} boxes have masks of shape {tuple(masks.shape)}; (boxes, 1, height, width) is wanted"
        )
    return (masks[:, 0] if masks.dim() == 4 else masks) >= LEVEL


def _encoded_truth(target: Mapping[str, Any]) -> tuple[list[Any], tuple[int, int]]:
    """The masks of a target's objects as COCO's run lengths, and their size."""
    count = len(target["boxes"])
    if "masks" in target:
        masks = torch.as_tensor(target["masks"]) > 0
        if len(masks) != count or masks.dim() != 3:
            raise TrainingError(
                f"a target with {count} boxes has masks of shape {tuple(masks.shape)}; (boxes, height, width) is wanted"
            )
        return _encoded(masks)
    instances = torch.as_tensor(target["instances"])
    codes = [_encoded(instances[None] == number)[0][0] for number in range(1, count + 1)]
    return codes, (int(instances.shape[0]), int(instances.shape[1]))


def _encoded(masks: Tensor) -> tuple[list[Any], tuple[int, int]]:
    """Masks (n, height, width) as COCO's run lengths, and their size."""
    from pycocotools import mask

    size = (int(masks.shape[1]), int(masks.shape[2]))
    columns = masks.permute(1, 2, 0).to(torch.uint8).cpu().numpy()
    return list(mask.encode(np.asfortranarray(columns))) if len(masks) else [], size
