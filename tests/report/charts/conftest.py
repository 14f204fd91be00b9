"""How tests read a drawing: its points, where they are and what they say."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from xml.etree.ElementTree import Element

import pytest

from bitdial.report.charts import Chart


@dataclass(frozen=True)
class Point:
    """A point of a drawing: its classes, its tooltip, x in per cent, y in pixels; bars have a width."""

    css: str
    tip: str
    x: float
    y: float
    width: float
    setting: str | None


def _number(text: str | None) -> float:
    return float((text or "nan").rstrip("%"))


def _point(group: Element) -> Point:
    bars = [rect for rect in group.findall("rect") if rect.get("class") != "track"]
    inner = group.find("svg")
    if inner is not None and not bars:
        mark = next(path for path in inner.iter("path") if "mark" in path.get("class", ""))
        (y,) = re.findall(r"translate\(0 ([\d.]+)\)", mark.get("transform", ""))
        x, width = _number(inner.get("x")), 0.0
    else:
        x, y, width = _number(bars[0].get("x")), bars[0].get("y", ""), _number(bars[0].get("width"))
    tip = (group.findtext("title") or "").replace("\u00a0", " ")
    return Point(group.get("class", "").removeprefix("point "), tip, x, float(y), width, group.get("data-setting"))


@pytest.fixture
def points() -> Callable[[Chart | Element], list[Point]]:
    def read(drawn: Chart | Element) -> list[Point]:
        root = drawn.drawing if isinstance(drawn, Chart) else drawn
        return [_point(group) for group in root.iter("g") if group.get("class", "").startswith("point ")]

    return read


@pytest.fixture
def words() -> Callable[[Chart | Element], list[str]]:
    """The texts of a drawing outside of tooltips."""

    def read(drawn: Chart | Element) -> list[str]:
        root = drawn.drawing if isinstance(drawn, Chart) else drawn
        texts = [found for tag in ("text", "li", "h3") for found in root.iter(tag)]
        return ["".join(found.itertext()).replace("\u00a0", " ") for found in texts]

    return read
