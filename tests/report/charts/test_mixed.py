"""Figures of mixed precision: the data they draw, and what their titles say of it."""

from typing import Any

import numpy as np
import pytest

from bitdial.errors import ConfigError
from bitdial.report.charts import bits_over_traces, pareto_fronts, predicted_and_measured, sensitivity_by_layer
from bitdial.report.charts.mixed import PlanPoint, Series
from bitdial.report.numbers import Samples

LAYERS: dict[str, dict[str, Any]] = {
    "conv1": {"trace": 40.0, "error": 4.0, "parameters": 4, "samples": 16},
    "conv2": {"trace": -2.0, "error": 1.0, "parameters": 8, "samples": 200},
    "conv3": {"trace": 30.0, "error": 1.0, "parameters": 30, "samples": 200},
    "fc": {"trace": 10.0, "error": 20.0, "parameters": 100, "samples": 200},
}
PLANS = {
    "3.25 bits": {"conv1": (8, 8), "conv2": (2, 2), "conv3": (4, 8), "fc": (2, 2)},
    "2.00 bits": dict.fromkeys(LAYERS, (2, 2)),
}
SAMPLES = Samples(100, "held-out samples")


def test_traces_have_errors_and_those_not_above_zero_a_cross_at_the_end(points: Any, words: Any) -> None:
    chart = sensitivity_by_layer(LAYERS)
    found = points(chart)
    assert [point.tip for point in found] == ["conv1: 40 ± 4", "conv2: −2 ± 1", "conv3: 30 ± 1", "fc: 10 ± 20"]
    assert [point.css for point in found] == ["w8", "w2", "w8", "w8"]
    assert found[1].x == 0
    logs = np.log10([40, 30, 10])
    places = [found[place].x for place in (0, 2, 3)]
    assert places == pytest.approx(np.polyval(np.polyfit(logs, places, 1), logs), abs=0.01)
    assert found[0].y < found[1].y < found[2].y < found[3].y
    assert "not above 0" in words(chart)
    assert chart.rows[1] == ("conv1", "40", "4", "4", "10")
    assert chart.title == "The largest Hessian trace is that of conv1: 1.3 times the median"


def test_traces_that_are_all_negative_have_a_linear_axis(points: Any) -> None:
    chart = sensitivity_by_layer({name: {**entry, "trace": -3.0} for name, entry in LAYERS.items()})
    assert {point.css for point in points(chart)} == {"w8"}
    assert len({point.x for point in points(chart)}) == 1
    assert chart.title == "No layer's Hessian trace is above 0"
    with pytest.raises(ConfigError, match="no layer to draw"):
        sensitivity_by_layer({})


def test_bits_are_bars_under_marks_of_the_traces(points: Any, words: Any) -> None:
    chart = bits_over_traces(LAYERS, PLANS)
    found = points(chart)
    assert [point.css for point in found] == ["w8", "w2", "w4", "w2", "w2", "w2", "w2", "w2"]
    assert [point.width for point in found] == [100, 25, 50, 25, 25, 25, 25, 25]
    assert found[0].tip == "conv1: 8 bits, trace per weight 10"
    marks = [path for path in chart.drawing.iter("path") if path.get("class") == "mark over"]
    assert len(marks) == 2 * 3  # that of conv2 is not above 0
    assert [text for text in words(chart) if text in PLANS] == list(PLANS)
    assert chart.rows[1] == ("conv1", "10", "8", "2")
    assert chart.title == "3.25 bits: 6.0 bits on average for the 2 most sensitive layers, 2.0 for the 2 least"
    assert bits_over_traces({"fc": LAYERS["fc"]}, {"p": {"fc": (4, 4)}}).title == "p: the bits of one layer"
    for layers, plans in (({}, PLANS), (LAYERS, {})):
        with pytest.raises(ConfigError, match="nothing to draw"):
            bits_over_traces(layers, plans)


FIRST = Series(
    "HASB",
    [PlanPoint(2.0, 0.5, "2.00 bits", 0), PlanPoint(3.0, 0.8, "3.00 bits", 1)],
    [PlanPoint(2.2, 0.3), PlanPoint(4.0, 0.6)],
    samples=SAMPLES,
)
OTHER = Series("random", [PlanPoint(2.5, 0.7, "2.50 bits")], samples=SAMPLES)


def test_a_front_has_marks_with_intervals_steps_and_faint_dots(points: Any, words: Any) -> None:
    chart = pareto_fronts([FIRST], uniform={3: PlanPoint(3.0, 0.75, "3 bits everywhere", 2)}, cost="Average bits")
    found = points(chart)
    assert [(point.css, point.setting) for point in found] == [
        ("w8 faint", None), ("w8 faint", None), ("w8", "0"), ("w8", "1"), ("open", "2")
    ]  # fmt: skip
    assert found[3].tip == "3.00 bits: 80.0 %, 95 % interval 71.1 to 86.7 %"
    costs, accuracies = [2.2, 4.0, 2.0, 3.0, 3.0], [30, 60, 50, 80, 75]
    for places, values in (([p.x for p in found], costs), ([p.y for p in found], accuracies)):
        assert places == pytest.approx(np.polyval(np.polyfit(values, places, 1), values), abs=0.1)
    assert len([path for path in chart.drawing.iter("path") if path.get("class") == "whisker"]) == 3
    (steps,) = (path.get("d", "") for path in chart.drawing.iter("path") if "curve" in path.get("class", ""))
    assert steps.count("H") == 2  # to the second plan, and to the end of what was tried
    assert {"HASB", "3 bits everywhere", "Average bits", "other candidates"} <= set(words(chart))
    assert any("held-out samples" in text for text in words(chart))
    assert chart.rows[1] == ("HASB", "2.00 bits", "2", "50.0 %", "40.4 to 59.6 %")
    assert chart.title == "2 plans, from 50.0 % to 80.0 %"


def test_several_fronts_are_named_in_tooltips_and_have_no_bars_that_cover_each_other(points: Any) -> None:
    chart = pareto_fronts([FIRST, OTHER], cost="bits", title="A finding")
    assert points(chart)[-1].tip.startswith("random, 2.50 bits: 70.0 %")
    assert points(chart)[-1].css == "w5"
    assert not [path for path in chart.drawing.iter("path") if path.get("class") == "whisker"]
    assert chart.title == "A finding"
    for fronts in ([], [Series("a", [], samples=SAMPLES)], [FIRST, Series("b", [], samples=SAMPLES)]):
        with pytest.raises(ConfigError, match="no front to draw"):
            pareto_fronts(fronts, cost="bits")


def test_predictions_are_dots_with_the_rank_correlation_above(points: Any, words: Any) -> None:
    chart = predicted_and_measured([0.0, 0.02, 3.0], [0.9, 0.8, 0.85], -0.5)
    found = points(chart)
    assert [point.tip for point in found] == [
        "predicted loss 0: 90.0 %", "predicted loss 0.02: 80.0 %", "predicted loss 3: 85.0 %"
    ]  # fmt: skip
    assert 0 == found[0].x < found[1].x < found[2].x
    assert found[0].y < found[2].y < found[1].y
    assert [text for text in words(chart) if text.startswith("10") or text == "0"][-3:] == ["0", "10⁻¹", "10⁰"]
    assert chart.title == "Rank correlation over 3 plans: −0.50"
    assert "not defined" in predicted_and_measured([0.0], [0.9], None).title
    for losses, accuracies in (([], []), ([1.0], [])):
        with pytest.raises(ConfigError, match="nothing to draw"):
            predicted_and_measured(losses, accuracies, None)
