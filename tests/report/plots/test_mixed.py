"""Figures of mixed precision: the data they draw, and what their titles say of it."""

import re
import xml.etree.ElementTree as ElementTree
from typing import Any

import numpy as np
import pytest
from matplotlib.colors import to_rgb

from bitdial.errors import ConfigError
from bitdial.report import plots

LAYERS: dict[str, dict[str, Any]] = {
    "conv1": {"trace": 40.0, "error": 4.0, "parameters": 4, "samples": 16},
    "conv2": {"trace": -2.0, "error": 1.0, "parameters": 8, "samples": 200},
    "conv3": {"trace": 30.0, "error": 1.0, "parameters": 30, "samples": 200},
    "fc": {"trace": 10.0, "error": 2.0, "parameters": 100, "samples": 200},
}
PLANS = {
    "3.25 bits": {"conv1": (8, 8), "conv2": (2, 2), "conv3": (4, 8), "fc": (2, 2)},
    "2.00 bits": dict.fromkeys(LAYERS, (2, 2)),
}


def test_bits_are_bars_under_the_line_of_the_traces() -> None:
    figure = plots.bits_over_traces(LAYERS, PLANS)
    bars = [axes for axes in figure.axes if axes.get_ylabel() == "weight bits"]
    lines = [axes for axes in figure.axes if axes.get_ylabel() == "trace per weight"]
    assert [axes.get_title(loc="left") for axes in bars] == list(PLANS)
    for axes, plan in zip(bars, PLANS.values(), strict=True):
        assert [bar.get_height() for bar in axes.patches] == [plan[name][0] for name in LAYERS]
        assert [to_rgb(bar.get_edgecolor()) for bar in axes.patches] == [
            to_rgb(plots.PALETTE[plan[name][0]]) for name in LAYERS
        ]
        assert [text.get_text() for text in axes.texts] == [str(plan[name][0]) for name in LAYERS]
    for axes in lines:
        (line,) = axes.lines
        assert list(line.get_ydata()) == pytest.approx([10, np.nan, 1, 0.1], nan_ok=True)
        assert axes.get_yscale() == "log"
        bottom, top = axes.get_ylim()
        assert bottom < 0.1
        assert top > 10
    assert [text.get_text() for text in bars[-1].get_xticklabels()] == list(LAYERS)
    title = "3.25 bits: 6.0 bits on average for the 2 most sensitive layers, 2.0 for the 2 least"
    assert figure.get_suptitle().replace("\n", " ") == title


def test_bits_without_a_positive_trace_have_no_line_and_one_layer_no_halves() -> None:
    flat = {name: {**entry, "trace": -1.0} for name, entry in LAYERS.items()}
    figure = plots.bits_over_traces(flat, PLANS)
    assert len(figure.axes) == 2
    alone = plots.bits_over_traces({"fc": LAYERS["fc"]}, {"plan": {"fc": (4, 4)}})
    assert alone.get_suptitle() == "plan: the bits of one layer"
    for layers, plans in (({}, PLANS), (LAYERS, {})):
        with pytest.raises(ConfigError, match="nothing to draw"):
            plots.bits_over_traces(layers, plans)


SVG = "{http://www.w3.org/2000/svg}"
FRONTS = {"HASB": [(2.0, 0.5), (3.0, 0.8)], "random": [(2.5, 0.7)]}
DOTS = {"HASB": [(2.0, 0.5), (2.2, 0.3), (3.0, 0.8), (4.0, 0.6)]}


def test_fronts_are_steps_with_marks_and_faint_dots() -> None:
    figure = plots.pareto_fronts(FRONTS, candidates=DOTS, uniform={3: (3.0, 0.75)}, cost="Average bits")
    (axes,) = figure.axes
    steps = [line for line in axes.lines if line.get_drawstyle() == "steps-post"]
    assert [list(line.get_xdata()) for line in steps] == [[2, 3, 4], [2.5, 4]]  # to the end of what was tried
    assert [list(line.get_ydata()) for line in steps] == [pytest.approx([50, 80, 80]), pytest.approx([70, 70])]
    (dots,) = (line for line in axes.lines if line.get_marker() == ".")
    assert list(dots.get_ydata()) == pytest.approx([50, 30, 80, 60])
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    assert labels == ["HASB", "random", "3 bits everywhere"]
    bottom, top = axes.get_ylim()
    assert bottom < 30
    assert top > 80
    assert axes.get_xlabel() == "Average bits"
    assert figure.get_suptitle() == "2 plans, from 50.0 % to 80.0 %"
    assert plots.pareto_fronts(FRONTS, cost="x", title="A finding").get_suptitle() == "A finding"


def test_marks_of_the_first_front_can_be_found_in_the_svg() -> None:
    root = ElementTree.fromstring(plots.to_svg(plots.pareto_fronts(FRONTS, cost="bits"), prefix="front-"))
    marks = {e.get("id"): e for e in root.iter() if re.fullmatch(r"front-plan-\d+", e.get("id") or "")}
    assert list(marks) == ["front-plan-0", "front-plan-1"]
    places = [(float(use.get("x", "")), float(use.get("y", ""))) for m in marks.values() for use in m.iter(f"{SVG}use")]
    assert len(places) == 2
    assert places[0][0] < places[1][0]  # costs more
    assert places[0][1] > places[1][1]  # is more accurate: y counts from the top


@pytest.mark.parametrize("fronts", [{}, {"a": []}, {"a": [(2.0, 0.5)], "b": []}])
def test_a_front_without_points_is_refused(fronts: dict[str, list[tuple[float, float]]]) -> None:
    with pytest.raises(ConfigError, match="no front to draw"):
        plots.pareto_fronts(fronts, cost="bits")


def test_predictions_are_dots_with_the_rank_correlation_above() -> None:
    figure = plots.predicted_and_measured([0.0, 0.02, 3.0], [0.9, 0.8, 0.85], -0.5)
    (axes,) = figure.axes
    (dots,) = axes.lines
    assert list(dots.get_xdata()) == [0, 0.02, 3]
    assert list(dots.get_ydata()) == pytest.approx([90, 80, 85])
    assert figure.get_suptitle() == "Rank correlation over 3 plans: −0.50"
    assert [text.get_text() for text in axes.get_xticklabels()] == ["0", "10⁻²", "10⁻¹", "10⁰", "10¹"]
    assert "not defined" in plots.predicted_and_measured([0.0], [0.9], None).get_suptitle()
    for losses, accuracies in (([], []), ([1.0], [])):
        with pytest.raises(ConfigError, match="nothing to draw"):
            plots.predicted_and_measured(losses, accuracies, None)
