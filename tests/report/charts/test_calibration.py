"""Figures of a calibration: every number is drawn where it belongs, and in the table."""

from typing import Any

import pytest

from bitdial.errors import ConfigError
from bitdial.report.charts import agreement_by_bits, errors_by_block
from bitdial.report.numbers import Samples

BLOCKS: list[dict[str, Any]] = [
    {"name": "stem", "layers": ["stem.0"], "error": {"8": 1e-4, "3": 0.01}, "error_before": {"8": 1e-4, "3": 0.1}},
    {"name": "body", "layers": ["body.0"], "error": {"8": 1e-3, "3": None}, "error_before": {"8": 1e-2, "3": 1.0}},
]


def test_agreement_has_a_mark_with_an_interval_for_each_width(points: Any, words: Any) -> None:
    chart = agreement_by_bits({"3": 0.5, "8": 0.99}, Samples(100, "images"))
    found = points(chart)
    assert [point.css for point in found] == ["w8", "w3"]
    assert [point.x for point in found] == pytest.approx([25, 75])
    assert found[0].y < found[1].y  # better is higher
    assert found[0].tip == "8 bits: 99.0 %, 95 % interval 94.6 to 99.8 %"
    assert [point.setting for point in found] == [None, None]
    assert len([path for path in chart.drawing.iter("path") if path.get("class") == "whisker"]) == 2
    assert any("of equal answers out of 100 images" in text for text in words(chart))
    assert {"99.0", "50.0", "8 bits", "3 bits", "agreement (%)"} <= set(words(chart))
    assert chart.title == "At 3 bits the answer is the float model's for 50.0 % of the images"
    assert chart.rows[1:] == [("8 bits", "99.0 %", "94.6 to 99.8 %"), ("3 bits", "50.0 %", "40.4 to 59.6 %")]


def test_blocks_have_a_mark_for_each_width_on_a_logarithmic_axis(points: Any, words: Any) -> None:
    chart = errors_by_block(BLOCKS)
    found = points(chart)
    assert [point.tip for point in found] == [
        "stem, 8 bits: 0.0001, before 0.0001",
        "stem, 3 bits: 0.01, before 0.1",
        "body, 8 bits: 0.001, before 0.01",
    ]
    left, right, middle = (point.x for point in found)
    assert middle - left == pytest.approx(right - middle, rel=1e-3), "each is ten times the one before"
    assert found[0].y < found[1].y < found[2].y
    lines = [(line.get("x1"), line.get("x2")) for line in chart.drawing.iter("line") if line.get("class") == "whisker"]
    assert len(lines) == 6  # from before to after, and the end
    assert lines[2][0] == f"{right:.4g}%"
    assert {"stem", "body", "8 bits", "3 bits", "from where it was before its weights were learned"} <= set(
        words(chart)
    )
    assert chart.rows[0] == ("Block", "8 bits, before", "8 bits, calibrated", "3 bits, before", "3 bits, calibrated")
    assert chart.rows[2] == ("body", "0.01", "0.001", "1", "–")
    assert chart.title == "At 3 bits calibration brings the errors of the blocks to 10.0 %, on average"


def test_blocks_without_a_before_and_without_errors(points: Any, words: Any) -> None:
    plain = [{**one, "error_before": {}} for one in BLOCKS]
    chart = errors_by_block(plain)
    assert [point.tip for point in points(chart)][1] == "stem, 3 bits: 0.01"
    assert not any("before" in text for text in words(chart))
    assert chart.rows[0] == ("Block", "8 bits", "3 bits")
    assert chart.title == "At 3 bits the largest error is that of stem: 0.01"
    perfect = [{**one, "error": {"8": 0.0}, "error_before": {}} for one in BLOCKS]
    assert [point.x for point in points(errors_by_block(perfect))] == [0, 0]
    worse = [{**one, "error": {"8": 2.0}, "error_before": {"8": 1.0}} for one in BLOCKS]
    assert errors_by_block(worse).title.startswith("At 8 bits calibration leaves the errors")
    with pytest.raises(ConfigError, match="there is no block to draw"):
        errors_by_block([])
