"""The page's colours: told apart with any colour vision, and with enough contrast in the light and in the dark."""

import importlib
import itertools
import re
from pathlib import Path

import numpy as np
import pytest

from bitdial.report.charts.plot import SHAPES
from bitdial.report.page import STYLE

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
WIDTHS = (8, 7, 6, 5, 4, 3, 2)


def colours(mode: str) -> dict[str, str]:
    """The variables of the style in `mode`."""
    light, dark = re.findall(r":root \{(.*?)\}", STYLE.read_text(encoding="utf-8"), re.S)
    found = dict(re.findall(r"--(\w+): (#\w+);", light if mode == "light" else dark))
    return {
        name: "#" + "".join(2 * c for c in value[1:]) if len(value) == 4 else value for name, value in found.items()
    }


def linear(colour: str) -> np.ndarray:
    values = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    return np.array([v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in values])


def contrast(one: str, other: str) -> float:
    """WCAG 2's ratio."""
    dark, light = sorted(float(linear(colour) @ [0.2126, 0.7152, 0.0722]) for colour in (one, other))
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("mode", ["light", "dark"])
def test_text_and_marks_have_the_contrast_of_wcag_aa(mode: str) -> None:
    found = colours(mode)
    for ground in ("page", "card"):
        for text in ("ink", "quiet"):
            assert contrast(found[text], found[ground]) >= 4.5, (text, ground)
    marks = ["float", "focus", "edge", *(f"w{bits}" for bits in WIDTHS)]
    assert {
        name: contrast(found[name], found["card"]) for name in marks if contrast(found[name], found["card"]) < 3
    } == {}


def test_both_modes_name_the_same_colours() -> None:
    assert set(colours("light")) == set(colours("dark"))
    assert len(set(SHAPES.values())) == len(WIDTHS)


# Machado, Oliveira and Fernandes (2009): how linear RGB looks without one kind of cone.
VISION = {
    "full": np.eye(3),
    "protan": [[0.152, 1.053, -0.205], [0.115, 0.786, 0.099], [-0.004, -0.048, 1.052]],
    "deutan": [[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]],
    "tritan": [[1.256, -0.077, -0.179], [-0.078, 0.931, 0.148], [0.005, 0.691, 0.304]],
}


@pytest.mark.parametrize("kind", VISION)
def test_colours_are_told_apart_with_any_colour_vision(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    palettes = {mode: {bits: colours(mode)[f"w{bits}"] for bits in WIDTHS} for mode in ("light", "dark")}
    palettes["docs"] = importlib.import_module("plot_style").PALETTE
    to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    for name, palette in palettes.items():
        lab = {}
        for bits, colour in palette.items():
            seen = np.clip(np.array(VISION[kind]) @ linear(colour), 0, 1)
            x, y, z = np.cbrt(to_xyz @ seen / to_xyz.sum(axis=1))
            lab[bits] = np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])
        assert set(lab) == set(WIDTHS)
        for left, right in itertools.combinations(lab, 2):
            least = 25 if {left, right} <= {8, 6, 4, 3, 2} else 15  # a just noticeable difference is about 2
            assert np.linalg.norm(lab[left] - lab[right]) > least, (name, left, right)
