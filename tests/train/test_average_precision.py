"""COCO's average precision: values that can be worked out by hand, and images of every odd kind."""

import math
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bitdial import QuantConfig, evaluate, prepare
from bitdial.errors import BitdialError, ConfigError, MissingDependencyError, QuantizationError, TrainingError
from bitdial.train.average_precision import detection_metrics

pytest.importorskip("pycocotools")


class Says(nn.Module):
    """A detector that finds what it was told to, image by image."""

    def __init__(self, *found: dict[str, Tensor]):
        super().__init__()
        self.found = list(found)

    def forward(self, images: list[Tensor], targets: Any = None) -> list[dict[str, Tensor]]:
        return [self.found.pop(0) for _ in images]


def boxes(*values: tuple[float, float, float, float]) -> Tensor:
    return torch.tensor(values).reshape(-1, 4)


def found(*values: tuple[float, float, float, float], scores: list[float] | None = None) -> dict[str, Tensor]:
    scores = [1 - 0.1 * place for place in range(len(values))] if scores is None else scores
    return {
        "boxes": boxes(*values),
        "labels": torch.ones(len(values), dtype=torch.long),
        "scores": torch.tensor(scores),
    }


def target(*values: tuple[float, float, float, float]) -> dict[str, Tensor]:
    return {"boxes": boxes(*values), "labels": torch.ones(len(values), dtype=torch.long)}


def measured(detections: list[dict[str, Tensor]], targets: list[dict[str, Tensor]], **options: Any) -> dict[str, float]:
    images = [torch.zeros(3, 8, 8) for _ in targets]
    return detection_metrics(Says(*detections), [(images, targets)], **options)


ONE = (10.0, 10.0, 30.0, 30.0)


def test_boxes_by_hand() -> None:
    cases = {
        "perfect": ([found(ONE)], [target(ONE)], (1.0, 1.0, 1.0)),
        # 20 x 20 moved by 4 pixels: 16 x 20 of 24 x 20 are common, an IoU of 2/3: right at 0.50 to 0.65, four of ten
        "moved": ([found((14.0, 10.0, 34.0, 30.0))], [target(ONE)], (0.4, 1.0, 0.0)),
        "elsewhere": ([found((50.0, 50.0, 60.0, 60.0))], [target(ONE)], (0.0, 0.0, 0.0)),
        "nothing found": ([found()], [target(ONE)], (0.0, 0.0, 0.0)),
        # One of two objects: precision 1 up to a recall of 0.5, which are 51 of COCO's 101 points
        "half of them": ([found(ONE)], [target(ONE, (50.0, 50.0, 60.0, 60.0))], (51 / 101,) * 3),
        # A wrong one with a higher score: precision is 1/2 at every recall
        "a wrong one first": ([found((50.0, 50.0, 60.0, 60.0), ONE)], [target(ONE)], (0.5,) * 3),
        "a wrong one last": ([found(ONE, (50.0, 50.0, 60.0, 60.0))], [target(ONE)], (1.0,) * 3),
        "twice the same": ([found(ONE, ONE)], [target(ONE, (50.0, 50.0, 60.0, 60.0))], (51 / 101,) * 3),
        "an image without objects": ([found(ONE), found()], [target(ONE), target()], (1.0,) * 3),
        "found where nothing is": ([found(ONE, scores=[0.5]), found(ONE)], [target(ONE), target()], (0.5,) * 3),
    }
    for name, (detections, targets, expected) in cases.items():
        result = measured(detections, targets)
        assert list(result) == ["box_ap", "box_ap50", "box_ap75"], name
        assert list(result.values()) == pytest.approx(expected), name


def test_classes_are_averaged_and_those_that_no_image_has_do_not_count() -> None:
    there = target(ONE, (50.0, 50.0, 60.0, 60.0))
    there["labels"] = torch.tensor([1, 2])
    seen = found(ONE, (50.0, 50.0, 60.0, 60.0), (1.0, 1.0, 3.0, 3.0))
    seen["labels"] = torch.tensor([1, 1, 7])  # the second is of the other class
    assert measured([seen], [there])["box_ap"] == pytest.approx(0.5)


def mask(left: int, right: int, size: int = 40) -> Tensor:
    pixels = torch.zeros(size, size)
    pixels[10:30, left:right] = 1
    return pixels


def test_masks_by_hand_as_tensors_and_as_a_map() -> None:
    truth = target(ONE) | {"masks": mask(10, 30)[None].byte()}
    as_map = target(ONE) | {"instances": mask(10, 30).int()}
    seen = found(ONE) | {"masks": 0.9 * mask(14, 34)[None, None] + 0.05}
    assert list(measured([seen], [truth]).values()) == pytest.approx([1.0, 1.0, 1.0, 0.4, 1.0, 0.0])
    assert measured([seen], [as_map]) == measured([seen], [truth])
    assert list(measured([seen], [truth], masks=False)) == ["box_ap", "box_ap50", "box_ap75"]
    assert list(measured([seen], [target(ONE)])) == ["box_ap", "box_ap50", "box_ap75"], "targets without masks"
    empty = found() | {"masks": torch.zeros(0, 1, 40, 40)}
    nothing = target() | {"masks": torch.zeros(0, 40, 40)}
    assert measured([seen, empty], [truth, nothing])["mask_ap50"] == pytest.approx(1.0)
    assert measured([empty, seen], [as_map, nothing])["mask_ap50"] == 0.0


def test_five_hundred_objects_want_a_higher_limit() -> None:
    values = [(20.0 * (n % 25), 20.0 * (n // 25), 20.0 * (n % 25) + 15, 20.0 * (n // 25) + 15) for n in range(500)]
    scores = [1 - n / 1000 for n in range(500)]
    assert measured([found(*values, scores=scores)], [target(*values)], max_detections=500)["box_ap"] == 1.0
    # 100 of 500 are a recall of 0.2: 21 of the 101 points
    assert measured([found(*values, scores=scores)], [target(*values)])["box_ap"] == pytest.approx(21 / 101)


def test_without_any_object_the_precision_is_no_number() -> None:
    assert all(math.isnan(value) for value in measured([found(ONE)], [target()]).values())


class Shaken(nn.Module):
    """A detector whose boxes are moved where a network's output is far from that at 8 bits."""

    def __init__(self, network: nn.Module, x: Tensor):
        super().__init__()
        self.network, self.x = network, x
        self.reference = network(x).detach()

    def forward(self, images: list[Tensor]) -> list[dict[str, Tensor]]:
        error = (self.network(self.x) - self.reference).abs().max() / self.reference.abs().max()
        return [found(ONE) | {"boxes": boxes(ONE) + (error > 0.1) * 4} for _ in images]


def test_a_measure_for_evaluate_at_every_width() -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 16)
    layers = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 8))
    network = prepare(layers, QuantConfig(bit_choices=(8, 2), keep_first_last=False), x).eval()
    batches = [([torch.rand(3, 8, 9), torch.rand(3, 5, 6)], [target(ONE)] * 2)]
    by_width = evaluate(Shaken(network, x), batches, [8, 2], measure=detection_metrics)
    assert (by_width[8]["box_ap"], by_width[2]["box_ap75"]) == (1.0, 0.0)


def test_what_is_wrong_is_named() -> None:
    mine, masked = found(ONE), found(ONE) | {"masks": torch.ones(1, 1, 40, 40)}
    lone: dict[str, Any] = {"boxes": boxes(ONE)}
    cases: list[tuple[type[BitdialError], str, Any]] = [
        (TrainingError, "what the model found has no 'labels'", lambda: measured([lone], [target(ONE)])),
        (TrainingError, "its target has no 'labels'", lambda: measured([mine], [lone])),
        (TrainingError, "1 images have 2 targets", lambda: detection_metrics(Says(mine), [([0], [target(ONE)] * 2)])),
        (TrainingError, "the model found no 'masks'", lambda: measured([mine], [target(ONE)], masks=True)),
        (TrainingError, "neither 'masks' nor", lambda: measured([masked], [target(ONE)], masks=True)),
        (TrainingError, r"of \(40, 40\) pixels were found, the target's are \(20, 20\)",
         lambda: measured([masked], [target(ONE) | {"instances": torch.ones(20, 20)}])),
        (TrainingError, r"masks of shape \(2, 1, 40, 40\)",
         lambda: measured([mine | {"masks": torch.ones(2, 1, 40, 40)}], [target(ONE) | {"masks": masked["masks"][0]}])),
        (TrainingError, "1 boxes has masks of shape",
         lambda: measured([masked], [target(ONE) | {"masks": torch.ones(2, 40, 40)}])),
        (QuantizationError, "the scores that the model found hold NaN",
         lambda: measured([found(ONE, scores=[float("nan")])], [target(ONE)])),
        (TrainingError, "nothing to evaluate on", lambda: detection_metrics(Says(), [])),
        (TrainingError, "not a dict of detections for each image",
         lambda: detection_metrics(nn.Identity(), [(torch.zeros(1, 3, 8, 8), [target(ONE)])])),
        (ConfigError, "max_detections=0", lambda: measured([mine], [target(ONE)], max_detections=0)),
    ]  # fmt: skip
    for kind, text, run in cases:
        with pytest.raises(kind, match=text):
            run()


def test_without_pycocotools_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pycocotools.coco", None)
    with pytest.raises(MissingDependencyError, match=r"bitdial\[detection\]"):
        measured([found(ONE)], [target(ONE)])
