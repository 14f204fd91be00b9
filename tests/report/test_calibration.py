"""The page of a calibration: what it says, with labels and without."""

import copy
import re
from pathlib import Path
from typing import Any

import pytest

from bitdial.report import calibration_report


def blocks(count: int) -> list[dict[str, Any]]:
    return [
        {
            "name": f"features.{number}",
            "layers": [f"features.{number}.conv.{layer}" for layer in range(6)],
            "error": {"8": 1e-4 * (number + 1), "4": 1e-2 * (number + 1)},
            "error_before": {"8": 2e-4, "4": 0.5},
            "seconds": 1.0,
        }
        for number in range(count)
    ]


RESULT: dict[str, Any] = {
    "model": "net",
    "artifact": "net.safetensors",
    "device": "cpu",
    "images": {"folder": "photos", "count": 1000},
    "image_settings": {"resize": 256, "crop": 224, "mean": [1, 2, 3], "std": [4, 5, 6], "order": "RGB"},
    "evaluation": {"folder": "dev", "count": 200, "labels": True, "which": "those of dev", "seen": 0},
    "quant": {"bit_choices": [8, 4], "scheme": "nested", "group_size": None, "keep_first_last": 8},
    "float": {"top1": 0.75},
    "widths": {"8": {"top1": 0.74, "agreement": 0.99}, "4": {"top1": 0.7, "agreement": 0.9}},
    "calibration": {
        "effort": "quick", "samples": 1000, "steps": ["norms corrected"], "warnings": ["mind <this>"], "seconds": 61.0,
        "resumed": 3, "blocks": blocks(12),
    },
    "seconds": {"calibrate": 61.0, "measure": 240.0},
    "bytes": {"float": 14_000_000, "artifact": 8_000_000, "separate": {"8": 5_000_000, "4": 3_000_000}},
}  # fmt: skip


def text_of(path: Path) -> str:
    page = re.sub(r"<(style|script)>.*?</\1>", "", path.read_text(encoding="utf-8"), flags=re.S)
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", page).replace("\u00a0", " "))


def test_a_page_with_labels(tmp_path: Path) -> None:
    calibration_report(tmp_path / "a.html", RESULT)
    text = text_of(tmp_path / "a.html")
    for words in (
        "net at every width", "Calibrated once on 1,000 images, without labels, and stored once, in net.safetensors",
        "(8.0 MB; float: 14.0 MB)",
        "The same file runs at 8, 4 bits.", "4 bits 70.0 % 63.3 to 75.9 % −5.0 points 90.0 % 3,000,000",
        "Accuracy by bit-width", "Agreement with the float model", "Error by block", "What suffers most",
        "First and last layers 8 bits", "224 x 224 pixels, shorter side to 256 at most, RGB, mean 1 2 3, std 4 5 6",
        "61 s to calibrate, 4 min to measure, on cpu", "One of 200 images is 0.5 points.", "mind &lt;this&gt;",
        "The run went on after 3 blocks of an earlier one",
        "Effort quick: norms corrected",
    ):  # fmt: skip
        assert words in text, words
    assert "There were no labels" not in text
    worst = text[text.index("What suffers most") :]
    names = re.findall(r"features\.(\d+) 0\.", worst)
    assert names[:10] == [str(number) for number in range(11, 1, -1)], "the ten largest errors, the largest first"
    assert "conv.0, conv.1, conv.2, conv.3 and 2 more" in worst
    assert 'data-setting="' not in (tmp_path / "a.html").read_text(), "there is no dial to turn"


def test_a_page_without_labels_says_what_agreement_is(tmp_path: Path) -> None:
    result = copy.deepcopy(RESULT)
    result["evaluation"] |= {"labels": False, "which": "the same that it was calibrated on", "count": 1, "seen": 1}
    result["float"]["top1"] = None
    for one in result["widths"].values():
        one |= {"top1": None, "agreement": 1.0}
    result["calibration"] |= {"blocks": [], "steps": [], "resumed": 0}
    result["quant"]["keep_first_last"] = True
    result["image_settings"]["resize"] = None
    calibration_report(tmp_path / "a.html", result)
    text = text_of(tmp_path / "a.html")
    for words in (
        "There were no labels: agreement says how often answers stay", "so other images will agree less",
        "First and last layers in float", "sizes stay", "Effort quick Time",
    ):  # fmt: skip
        assert words in text, words
    for words in ("Accuracy", "went on after", "Error by block", "What suffers most"):
        assert words not in text, words


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [400, 1280])
def test_the_page_fits_the_window_in_both_modes(tmp_path: Path, browser: Any, width: int, dark: bool) -> None:
    calibration_report(tmp_path / "a.html", RESULT)
    browser.open(tmp_path / "a.html", width=width, dark=dark)
    browser.run("document.querySelectorAll('details').forEach((part) => { part.open = true; })")
    assert browser.run("[innerWidth, document.documentElement.scrollWidth]") == [width, width]
    beyond = """[...document.querySelectorAll("main *")].filter((one) => !one.closest(".wide") &&
        one.getBoundingClientRect().right > innerWidth + 0.5).map((one) => one.outerHTML.slice(0, 80))"""
    assert browser.run(beyond) == []
    ground = browser.run("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, ground[4:-1].split(","))) < 384) == dark
    browser.hover(".frame.rows .point.w4 .mark")
    tip = browser.run("document.querySelector('.tip').innerText")
    assert tip == "features.0, 4 bits: 0.01, before 0.5"
