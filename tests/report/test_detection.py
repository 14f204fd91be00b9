"""The page of a detector: what it says and shows."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from bitdial.errors import ConfigError
from bitdial.report import Shots, detection_report, panel
from bitdial.report.charts import errors_by_part, precision_by_bits

pytest.importorskip("PIL.Image")

AP = {"box_ap": 0.5, "box_ap50": 0.8, "mask_ap": 0.4, "mask_ap50": 0.7}
RESULT: dict[str, Any] = {
    "model": "net", "method": "trained", "artifact": "net.safetensors", "float": AP,
    "widths": {"8": {**AP, "box_ap": 0.49}, "2": {**AP, "mask_ap": 0.3, "box_ap": None}},
    "parts": {"backbone": {"8": 1e-4, "2": 0.1}, "mask head": {"8": 1e-3, "2": 0.02}, "idle": {"8": None, "2": None}},
    "compared_on": 4, "data": {"folder": "cells", "split": "val", "images": 10, "objects": 300},
    "settings": {"bit_choices": [8, 2], "scheme": "nested", "float_epochs": 3, "epochs": 2, "images": 40, "seed": 7,
                 "max_detections": 400},
    "command": "bitdial train", "device": "cpu", "seconds": 90.0,
    "bytes": {"float": 4_000_000, "artifact": 1_000_000, "separate": {"8": 900_000, "2": 300_000}},
}  # fmt: skip


def found(*boxes: tuple[float, float, float, float], scores: list[float]) -> dict[str, torch.Tensor]:
    masks = torch.zeros(len(boxes), 1, 20, 30)
    for mask, (left, top, right, bottom) in zip(masks, boxes, strict=True):
        mask[0, int(top) : int(bottom), int(left) : int(right)] = 1
    return {"boxes": torch.tensor(boxes).reshape(-1, 4), "scores": torch.tensor(scores), "masks": masks}


def test_panels_count_what_is_the_same_added_and_missed() -> None:
    image = torch.full((3, 20, 30), 0.5)
    here, there = (2.0, 2.0, 10.0, 10.0), (15.0, 5.0, 25.0, 15.0)
    reference = found(here, there, (0.0, 0.0, 5.0, 5.0), scores=[0.9, 0.9, 0.1])  # the last is not sure
    moved = panel(
        "4 bits", image, found((3.0, 2.0, 11.0, 10.0), (16.0, 12.0, 29.0, 19.0), scores=[0.8, 0.7]), reference
    )
    assert (moved.found, moved.added, moved.missed) == (2, 1, 1)
    assert moved.uri.startswith("data:image/jpeg;base64,")
    same = panel("8 bits", image, reference, reference)
    assert (same.found, same.added, same.missed) == (2, 0, 0)
    assert panel("float", image, reference).uri == same.uri
    empty = panel("2 bits", image, found(scores=[]), reference)
    assert (empty.found, empty.added, empty.missed) == (0, 0, 2)
    boxes = {name: value for name, value in reference.items() if name != "masks"}
    assert panel("boxes", image, boxes).uri != same.uri
    with pytest.raises(ConfigError, match="cannot be drawn"):
        panel("grey", torch.zeros(1, 4, 4), reference)


def test_precision_has_a_mark_for_each_width_of_boxes_and_masks() -> None:
    chart = precision_by_bits(AP, RESULT["widths"])
    assert chart.rows == [
        ("Setting", "Boxes, AP", "Masks, AP"), ("float", "50.0", "40.0"), ("8 bits", "49.0", "40.0"),
        ("2 bits", "–", "30.0"),
    ]  # fmt: skip
    assert chart.title == "At 2 bits the difference to float is −10.0 points for masks"
    tips = [one.findtext("title") for one in chart.drawing.iter("g") if "point" in one.get("class", "")]
    assert tips == ["8 bits: 49.0, −1.0 points to float", "8 bits: 40.0, +0.0 points to float",
                    "2 bits: 30.0, −10.0 points to float"]  # fmt: skip
    with pytest.raises(ConfigError, match="no average precision"):
        precision_by_bits({"top1": 0.5}, {"8": {}})
    assert errors_by_part(RESULT["parts"]).title == "At 2 bits the largest error is that of backbone: 0.1"
    assert errors_by_part(RESULT["parts"]).rows[0][0] == "Part"


def test_the_page_says_and_shows_everything(tmp_path: Path) -> None:
    image = torch.full((3, 20, 30), 0.5)
    one = panel("float", image, found((2.0, 2.0, 10.0, 10.0), scores=[0.9]))
    detection_report(tmp_path / "a.html", RESULT, [Shots("a.png", 1, [one])])
    page = (tmp_path / "a.html").read_text(encoding="utf-8")
    assert "img-src data:" in page
    assert page.count("<img ") == 1
    text = re.sub(r"<(style|script)>.*?</\1>", "", page, flags=re.S)
    text = re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", text).replace("\u00a0", " "))
    for words in (
        "net at every width", "Trained jointly and stored once, in net.safetensors (1.0 MB; float: 4.0 MB)",
        "8 bits 49.0 −1.0 points 80.0 40.0 +0.0 points 70.0 900,000", "2 bits – – 80.0 30.0 −10.0 points",
        "a.png, 1 object", "float: 1 object", "found by the float model alone",
        "On 4 images.", "No error is known of idle", "At 2 bits the backbone has the largest error of its own: 0.1.",
        "10 images of cells, split val, with 300 objects", "10 images are few",
    ):  # fmt: skip
        assert words in text, words
    detection_report(tmp_path / "b.html", RESULT | {"method": "calibrated", "parts": {}, "command": None})
    assert "Calibrated without labels" in (tmp_path / "b.html").read_text()
