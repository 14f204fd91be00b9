"""Figures of one file: every number is drawn where it belongs, and in the table."""

from typing import Any

import numpy as np
import pytest
import torch

from bitdial.errors import ConfigError
from bitdial.report.charts import accuracy_by_bits, sizes_by_bits, weight_histograms
from bitdial.report.numbers import Samples

SAMPLES = Samples(500, "test images")
SIZES = {"float": 400_000, "artifact": 120_000, "separate": {"8": 100_000, "6": 75_000, "4": 50_000, "2": 25_000}}


def test_accuracy_has_a_mark_with_an_interval_for_each_width_beside_float(points: Any, words: Any) -> None:
    chart = accuracy_by_bits(0.98, {2: 0.9, "8": 0.99, 4: 0.97}, SAMPLES)
    found = points(chart)
    assert [point.css for point in found] == ["float", "w8", "w4", "w2"]
    assert [point.setting for point in found] == [None, "2", "1", "0"]  # the dial counts from the lowest width
    assert [point.x for point in found] == pytest.approx([12.5, 37.5, 62.5, 87.5])
    slope = np.polyfit([98, 99, 97, 90], [point.y for point in found], 1)
    assert slope[0] < 0  # better is higher
    assert [point.y for point in found] == pytest.approx(np.polyval(slope, [98, 99, 97, 90]), abs=0.1)
    assert found[1].tip == "8 bits: 99.0 %, 95 % interval 97.7 to 99.6 %"
    assert len([path for path in chart.drawing.iter("path") if path.get("class") == "whisker"]) == 4
    assert {"98.0", "99.0", "97.0", "90.0", "8 bits", "float"} <= set(words(chart))
    assert any("95 % interval (Wilson) of right answers out of 500 test images" in text for text in words(chart))
    assert chart.rows[0] == ("Setting", "Accuracy on 500 test images", "95 % interval")
    assert chart.rows[2] == ("8 bits", "99.0 %", "97.7 to 99.6 %")
    assert chart.title == "The largest loss against the float model is 8.0 points, at 2 bits"
    assert accuracy_by_bits(0.97, {8: 0.99, 2: 0.97}, SAMPLES).title.startswith("No bit-width loses")


def test_an_accuracy_that_is_no_count_has_no_interval(points: Any, words: Any) -> None:
    chart = accuracy_by_bits(0.9803, {8: 0.99113}, SAMPLES)
    assert [point.tip for point in points(chart)] == ["float: 98.0 %", "8 bits: 99.1 %"]
    assert not [path for path in chart.drawing.iter("path") if path.get("class") == "whisker"]
    assert not any("interval" in text for text in words(chart))


def grid_values(bits: int, step: float = 0.5) -> np.ndarray[Any, Any]:
    """Every code of `bits` once, and code 0 twice."""
    codes = np.arange(-(2 ** (bits - 1)), 2 ** (bits - 1))
    return np.append(codes, 0) * step * 2 ** (8 - bits)


def shares(found: list[Any], css: str) -> list[float]:
    """What the tooltips of a panel say."""
    return [float(point.tip.split(": ")[1].split(" %")[0]) for point in found if point.css == css]


def test_histograms_count_every_weight_at_its_value(points: Any, words: Any) -> None:
    chart = weight_histograms({str(b): grid_values(b) for b in (8, 4, 2)}, layer="fc", unit="steps")
    found = points(chart)
    for bits in (8, 4, 2):
        assert sum(shares(found, f"w{bits}")) == pytest.approx(100, abs=0.5)
        assert len(shares(found, f"w{bits}")) == min(2**bits, 64)
    last = [point for point in found if point.css == "w2"]
    assert [point.tip for point in last] == [
        f"{v}: {s} % of the weights" for v, s in zip(("−64", "−32", "0", "32"), (20, 20, 40, 20), strict=True)
    ]
    assert last[2].y < last[0].y == last[1].y  # twice as high
    assert [text for text in words(chart) if "values" in text] == [
        "8 bits: 256 values",
        "4 bits: 16 values",
        "2 bits: 4 values",
    ]
    assert words(chart).count("steps") == 3
    assert chart.title == "fc: the same weights take 256 values at 8 bits, 4 at 2 bits"
    assert chart.rows[-1] == ("2 bits", "4", "−64", "32", "0", "40.0 %")


def test_histogram_of_equally_frequent_codes_is_flat(points: Any) -> None:
    """Bins that are not a whole number of steps wide would draw a comb that the weights do not have."""
    for levels in (200, 254, 256):
        found = points(weight_histograms({8: np.arange(levels) * 0.013}))
        assert len({point.y for point in found[:-1]}) == 1


def test_histogram_ignores_rounding_noise_and_takes_tensors_of_one_value(points: Any) -> None:
    noisy = np.repeat(np.arange(4.0), 50) + np.linspace(0, 1e-9, 200)
    found = points(weight_histograms({8: torch.zeros(5), 2: noisy}))
    assert shares(found, "w8") == [100]
    assert shares(found, "w2") == [25] * 4


@pytest.mark.parametrize("values", [[], [float("nan")], [1.0, float("inf")]])
def test_weights_that_are_not_numbers_are_refused(values: list[float]) -> None:
    with pytest.raises(ConfigError, match="at 4 bits"):
        weight_histograms({4: values})


def test_sizes_lay_the_separate_files_end_to_end(points: Any, words: Any) -> None:
    chart = sizes_by_bits(SIZES)
    found = points(chart)
    assert [(point.css, point.x, point.width) for point in found] == [
        ("float", 0, 100), ("w8", 0, 25), ("w6", 25, 18.75), ("w4", 43.75, 12.5), ("w2", 56.25, 6.25), ("one", 0, 30)
    ]  # fmt: skip
    assert len({point.y for point in found}) == 3
    assert found[2].tip == "separate file of 6 bits: 75,000 bytes"
    assert "48 % of the bytes of 4 separate files and 30 % of the float model's" in chart.title
    assert {"float model", "separate files", "one file", "400.0 kB", "250.0 kB", "120.0 kB"} <= set(words(chart))
    assert ("separate files together", "250,000") in chart.rows
