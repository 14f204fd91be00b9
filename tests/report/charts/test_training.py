"""Figures of a run: accuracy by epoch, and box plots of gradients."""

from typing import Any

import numpy as np
import pytest

from bitdial.errors import ConfigError
from bitdial.report.charts import convergence, scale_gradients
from bitdial.report.numbers import Samples

BITS = (8, 6, 4, 2)
LAYERS = ["conv1", "layer1.0.conv1", "fc"]
SAMPLES = Samples(500, "test images")


def make_history(epochs: int = 3) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    rows, gradients = [], {}
    for epoch in range(epochs):
        base = {str(b): 0.2 + 0.002 * epoch + 0.01 * b for b in BITS}
        rows.append({"epoch": epoch, "train_top1": base, "top1": {b: value + 0.1 for b, value in base.items()}})
    for bits in map(str, BITS):
        peaks = rng.uniform(1, 3, (20, 6)).tolist()
        gradients[bits] = [{"step": i, "weight": p[:3], "act": [0.0, *p[4:]]} for i, p in enumerate(peaks)]
    return {"layers": LAYERS, "rows": rows, "gradients": gradients}


def test_convergence_draws_evaluated_accuracy_by_epoch(points: Any, words: Any) -> None:
    chart = convergence(make_history(), SAMPLES)
    found = points(chart)
    assert [point.css for point in found] == [f"w{bits}" for bits in BITS for _ in range(3)]
    assert [point.tip.partition(", 95")[0] for point in found[-3:]] == [
        "epoch 1, 2 bits: 32.0 %", "epoch 2, 2 bits: 32.2 %", "epoch 3, 2 bits: 32.4 %"
    ]  # fmt: skip
    assert found[0].tip.endswith("95 % interval 33.9 to 42.3 %")  # 190 of 500
    assert [point.x for point in found[:3]] == pytest.approx([100 / 6, 50, 500 / 6], abs=0.01)
    assert found[0].y > found[1].y > found[2].y
    assert "accuracy on 500 test images (%)" in words(chart)
    assert [text for text in words(chart) if text in ("1", "2", "3")] == ["1", "2", "3"]  # whole epochs
    assert chart.rows[:2] == [
        ("Epoch", "8 bits", "6 bits", "4 bits", "2 bits"),
        ("1", "38.0 %", "36.0 %", "34.0 %", "32.0 %"),
    ]
    assert chart.title.endswith("after 3 epochs all are at 32.4 % or more")


def test_convergence_without_evaluation_draws_training_accuracy_without_intervals(points: Any, words: Any) -> None:
    history = make_history()
    for row in history["rows"]:
        del row["top1"]
    chart = convergence(history, SAMPLES)
    assert points(chart)[0].tip == "epoch 1, 8 bits: 28.0 %"
    assert "training accuracy (%)" in words(chart)


def test_long_runs_have_a_mark_for_some_epochs_and_for_the_last(points: Any) -> None:
    found = [point for point in points(convergence(make_history(100), SAMPLES)) if point.css == "w8"]
    assert 30 <= len(found) <= 40
    assert found[-1].tip.startswith("epoch 100,")


def test_gradient_boxes_are_quartiles_on_one_logarithmic_axis(points: Any, words: Any) -> None:
    history = make_history()
    chart = scale_gradients(history)
    found = points(chart)
    assert len(found) == 3 * 4
    places, values = [], []
    for point in found:
        layer, width = point.tip.partition(":")[0].split(", ")
        peaks = [sample["weight"][LAYERS.index(layer)] for sample in history["gradients"][width[0]]]
        low, middle, high = np.quantile(peaks, (0.25, 0.5, 0.75))
        assert f"median {middle:.2g}, half of the samples {low:.2g} to {high:.2g}" in point.tip
        places += [point.x, point.x + point.width]
        values += [np.log10(low), np.log10(high)]
    assert places == pytest.approx(np.polyval(np.polyfit(values, places, 1), values), abs=0.05)
    assert [text for text in words(chart) if text in LAYERS] == LAYERS
    assert [row[0] for row in chart.rows] == ["Layer", *LAYERS]


def test_gradient_whiskers_leave_outliers_out(points: Any) -> None:
    samples = [1.0, 2.0, 3.0, 4.0, 5.0, 10.0]
    gradients = {"4": [{"step": i, "weight": [value], "act": [0.0]} for i, value in enumerate(samples)]}
    (point,) = points(scale_gradients({"layers": ["fc"], "gradients": gradients}))
    assert point.tip == "fc, 4 bits: median 3.5, half of the samples 2.2 to 4.8, whiskers 1 to 5"


def test_gradients_leave_out_layers_without_such_a_scale(words: Any) -> None:
    chart = scale_gradients(make_history(), "act")
    assert [text for text in words(chart) if text in LAYERS] == LAYERS[1:]
    assert "activation" in chart.title


def test_the_title_states_the_measured_ratio() -> None:
    gradients = {b: [{"step": 0, "weight": [v] * 130, "act": []}] for b, v in (("8", 0.5), ("4", 1.0), ("2", 20.0))}
    chart = scale_gradients({"layers": [f"layer{i}" for i in range(130)], "gradients": gradients})
    assert "at 2 bits are 40 times those at 8 bits" in chart.title


def test_a_history_without_accuracy_or_gradients_is_refused() -> None:
    for rows in ([], [{"epoch": 0, "train_top1": {}}]):
        with pytest.raises(ConfigError, match="no accuracy"):
            convergence({"rows": rows}, SAMPLES)
    with pytest.raises(ConfigError, match="no samples"):
        scale_gradients({"layers": ["fc"], "gradients": {}})
    zero = {"8": [{"step": 0, "weight": [0.0], "act": [float("nan")]}]}
    for which in ("weight", "act"):
        with pytest.raises(ConfigError, match=f"no {which} scale gradient"):
            scale_gradients({"layers": ["fc"], "gradients": zero}, which)
    with pytest.raises(ConfigError, match="which='bias'"):
        scale_gradients(make_history(), "bias")
