"""Figures: the data they draw, the same bytes every time, and nothing left behind in matplotlib."""

import functools
import hashlib
import itertools
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pytest
import torch
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from bitdial.errors import BitdialError, ConfigError, MissingDependencyError
from bitdial.report import plots

BITS = (8, 6, 4, 2)
TOP1 = {8: 0.99, 6: 0.985, 4: 0.97, 2: 0.9}
LAYERS = ["conv1", "layer1.0.conv1", "fc"]
SIZES = {"float": 400_000, "artifact": 120_000, "separate": {"8": 100_000, "6": 75_000, "4": 50_000, "2": 25_000}}


TRACES = {
    "conv1": {"trace": 40.0, "error": 4.0, "parameters": 4, "samples": 16},
    "layer1.0.conv1": {"trace": -2.0, "error": 1.0, "parameters": 8, "samples": 200},
    "fc": {"trace": 10.0, "error": 20.0, "parameters": 100, "samples": 200},
}


PLANS = {"2.5 bits": {"conv1": (4, 4), "layer1.0.conv1": (2, 2), "fc": (8, 4)}}
FRONTS = {"one": [(2.0, 0.5), (3.0, 0.9)], "other": [(2.5, 0.7)]}


def make_history(epochs: int = 3) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    rows, gradients = [], {}
    for epoch in range(epochs):
        base = {str(b): 0.2 + 0.1 * epoch + 0.01 * b for b in BITS}
        rows.append({"epoch": epoch, "train_top1": base, "top1": {b: value + 0.1 for b, value in base.items()}})
    for bits in map(str, BITS):
        peaks = rng.uniform(1, 3, (20, 6)).tolist()
        gradients[bits] = [{"step": i, "weight": p[:3], "act": [0.0, *p[4:]]} for i, p in enumerate(peaks)]
    return {"layers": LAYERS, "rows": rows, "gradients": gradients}


def grid_values(bits: int, step: float = 0.5) -> np.ndarray[Any, Any]:
    """Every code of `bits` once, and code 0 twice."""
    codes = np.arange(-(2 ** (bits - 1)), 2 ** (bits - 1))
    return np.append(codes, 0) * step * 2 ** (8 - bits)


@functools.cache
def drawings() -> dict[str, str]:
    """Each kind of figure as SVG."""
    return {name: plots.to_svg(figure) for name, figure in all_figures().items()}


@functools.cache
def all_figures() -> dict[str, Figure]:
    return {
        "accuracy": plots.accuracy_by_bits(0.98, TOP1),
        "convergence": plots.convergence(make_history()),
        "weight": plots.scale_gradients(make_history(), "weight"),
        "act": plots.scale_gradients(make_history(), "act"),
        "histograms": plots.weight_histograms({b: grid_values(b) for b in BITS}),
        "sizes": plots.sizes_by_bits(SIZES),
        "sensitivity": plots.sensitivity_by_layer(TRACES),
        "bits": plots.bits_over_traces(TRACES, PLANS),
        "fronts": plots.pareto_fronts(FRONTS, cost="bits", uniform={4: (4.0, 0.9)}),
        "predicted": plots.predicted_and_measured([0.0, 1.0], [0.9, 0.8], -1.0),
    }


def texts(figure: Figure) -> str:
    return " ".join("".join(element.itertext()) for element in ElementTree.fromstring(plots.to_svg(figure)).iter())


def boxes(axes: Axes) -> list[tuple[float, float, float]]:
    """(place, lower quartile, upper quartile) of each box."""
    return [(p.get_x() + p.get_width() / 2, p.get_y(), p.get_y() + p.get_height()) for p in axes.patches]


def segments(axes: Axes) -> list[np.ndarray[Any, Any]]:
    return [s for c in axes.collections if isinstance(c, LineCollection) for s in c.get_segments()]


def test_accuracy_shows_every_width_in_percent_against_the_float_line() -> None:
    figure = plots.accuracy_by_bits(0.98, {2: 0.9, 8: 0.99, 6: 0.985, 4: 0.97})
    (axes,) = figure.axes
    dots = {line.get_label(): line for line in axes.lines if line.get_label() in {f"{b} bits" for b in BITS}}
    assert list(dots) == ["8 bits", "6 bits", "4 bits", "2 bits"]
    assert [line.get_ydata()[0] for line in dots.values()] == pytest.approx([99, 98.5, 97, 90])
    level = next(line for line in axes.lines if line not in dots.values())
    assert list(level.get_ydata()) == pytest.approx([98, 98])
    assert [t.get_text() for t in axes.get_xticklabels()] == list(dots)
    assert {to_rgb(line.get_color()) for line in dots.values()} == {to_rgb(plots.PALETTE[b]) for b in BITS}
    assert "8.0 points, at 2 bits" in figure.get_suptitle()
    assert plots.accuracy_by_bits(0.97, {8: 0.99, 2: 0.97}).get_suptitle().startswith("No bit-width loses")
    assert "99.0 %" in texts(figure)


@pytest.mark.parametrize(
    "level, top1", [(1.0, {8: 1.0, 2: 1.0}), (0.5, {8: 0.0, 2: 0.001}), (0.0, {8: 0.0}), (0.98, {8: 0.981, 2: 0.98})]
)
def test_accuracy_axis_shows_every_dot_and_no_impossible_percentage(level: float, top1: dict[int, float]) -> None:
    (axes,) = plots.accuracy_by_bits(level, top1).axes
    bottom, top = axes.get_ylim()
    values = [100 * level, *(100 * v for v in top1.values())]
    assert bottom < min(values)
    assert max(values) < top
    assert all(0 <= tick <= 100 for tick in axes.get_yticks())
    assert len(axes.get_yticks()) >= 3


def test_convergence_draws_evaluated_accuracy_by_epoch() -> None:
    (axes,) = plots.convergence(make_history()).axes
    assert [line.get_label() for line in axes.lines] == ["8 bits", "6 bits", "4 bits", "2 bits"]
    for line, bits in zip(axes.lines, BITS, strict=True):
        assert list(line.get_xdata()) == [1, 2, 3]
        assert list(line.get_ydata()) == pytest.approx([30 + bits, 40 + bits, 50 + bits])
        assert to_rgb(line.get_color()) == to_rgb(plots.PALETTE[bits])
    assert axes.get_ylabel() == "evaluation accuracy (%)"


def test_convergence_without_evaluation_draws_training_accuracy() -> None:
    history = make_history()
    for row in history["rows"]:
        del row["top1"]
    (axes,) = plots.convergence(history).axes
    assert list(axes.lines[0].get_ydata()) == pytest.approx([28, 38, 48])
    assert axes.get_ylabel() == "training accuracy (%)"


@pytest.mark.parametrize("epochs", [1, 2, 100])
def test_convergence_labels_whole_epochs(epochs: int) -> None:
    (axes,) = plots.convergence(make_history(epochs)).axes
    low, high = axes.get_xlim()
    assert {tick % 1 for tick in axes.get_xticks() if low <= tick <= high} == {0}


def test_gradients_have_a_panel_for_each_width_on_one_logarithmic_axis() -> None:
    history = make_history()
    figure = plots.scale_gradients(history)
    assert [axes.get_title(loc="left") for axes in figure.axes] == [f"{b} bits" for b in BITS]
    assert {axes.get_yscale() for axes in figure.axes} == {"log"}
    assert len({axes.get_ylim() for axes in figure.axes}) == 1
    for axes, bits in zip(figure.axes, BITS, strict=True):
        peaks = np.array([sample["weight"] for sample in history["gradients"][str(bits)]])
        low, high = np.quantile(peaks, (0.25, 0.75), axis=0)
        assert [place for place, *_ in boxes(axes)] == pytest.approx([0, 1, 2])
        assert [box[1] for box in boxes(axes)] == pytest.approx(low)
        assert [box[2] for box in boxes(axes)] == pytest.approx(high)
    assert [t.get_text() for t in figure.axes[-1].get_xticklabels()] == LAYERS


def test_gradient_boxes_have_median_whiskers_and_no_outliers() -> None:
    samples = [1.0, 2.0, 3.0, 4.0, 5.0, 10.0]
    gradients = {"4": [{"step": i, "weight": [value], "act": [0.0]} for i, value in enumerate(samples)]}
    (axes,) = plots.scale_gradients({"layers": ["fc"], "gradients": gradients}).axes
    heights = {float(y) for segment in segments(axes) for y in segment[:, 1]}
    assert sorted(heights) == pytest.approx([1.0, 2.25, 3.5, 4.75, 5.0])  # whisker, quartile, median, quartile, whisker
    assert not axes.lines


def test_gradients_leave_out_layers_without_such_a_scale_and_choose_widths() -> None:
    figure = plots.scale_gradients(make_history(), "act", bits=[2, 8])
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["8 bits", "2 bits"]
    assert [t.get_text() for t in figure.axes[0].get_xticklabels()] == LAYERS[1:]
    assert [len(boxes(axes)) for axes in figure.axes] == [2, 2]
    assert "activation" in figure.get_suptitle()


def test_gradients_of_many_layers_name_some_and_the_title_states_the_measured_ratio() -> None:
    layers = [f"layer{i}" for i in range(130)]
    gradients = {b: [{"step": 0, "weight": [v] * 130, "act": []}] for b, v in (("8", 0.5), ("4", 1.0), ("2", 20.0))}
    figure = plots.scale_gradients({"layers": layers, "gradients": gradients})
    assert len(figure.axes) == 3
    assert [t.get_text() for t in figure.axes[-1].get_xticklabels()] == layers[::3]
    assert "at 2 bits are 40 times those at 8 bits" in figure.get_suptitle()


@pytest.mark.parametrize("normalized", [False, True])
def test_sensitivity_draws_traces_with_errors_and_marks_those_not_above_zero(normalized: bool) -> None:
    figure = plots.sensitivity_by_layer(TRACES, normalized=normalized)
    (axes,) = figure.axes
    share = [entry["parameters"] if normalized else 1 for entry in TRACES.values()]
    line, crosses = axes.lines
    assert axes.get_yscale() == "log"
    assert list(line.get_xdata()) == [0, 1, 2]
    assert list(line.get_ydata()) == pytest.approx([40 / share[0], np.nan, 10 / share[2]], nan_ok=True)
    (first, last) = (s for s in segments(axes) if len(s) and np.isfinite(s).all())
    assert list(first[:, 1]) == pytest.approx([36 / share[0], 44 / share[0]])
    assert list(last[:, 1]) == pytest.approx([-10 / share[2], 30 / share[2]])
    assert (list(crosses.get_xdata()), crosses.get_label()) == ([1], "not above 0")
    bottom, top = axes.get_ylim()
    assert 0 < bottom < min(10 / share[2], 40 / share[0])
    assert top > 44 / share[0]
    assert [t.get_text() for t in axes.get_xticklabels()] == LAYERS
    times = "2 times" if normalized else "1.6 times"  # 10 / 5.05; 40 / 25
    assert f"that of conv1: {times} the median" in figure.get_suptitle().replace("\n", " ")


def test_sensitivity_without_a_positive_trace_has_a_linear_axis() -> None:
    figure = plots.sensitivity_by_layer({name: {**entry, "trace": -3.0} for name, entry in TRACES.items()})
    (axes,) = figure.axes
    assert axes.get_yscale() == "linear"
    assert list(axes.lines[0].get_ydata()) == [-3, -3, -3]
    assert "No layer's" in figure.get_suptitle()
    with pytest.raises(ConfigError, match="no layer to draw"):
        plots.sensitivity_by_layer({})


def test_histograms_count_every_weight_at_its_value() -> None:
    figure = plots.weight_histograms({str(b): grid_values(b) for b in BITS}, layer="fc", unit="steps")
    for axes, bits in zip(figure.axes, BITS, strict=True):
        shares = [bar.get_height() for bar in axes.patches]
        assert sum(shares) == pytest.approx(100)
        assert axes.get_title(loc="left") == f"{bits} bits: {2**bits} values"
        assert len(shares) <= 64
    last = figure.axes[-1]
    centres = [bar.get_x() + bar.get_width() / 2 for bar in last.patches]
    assert centres == pytest.approx([-64, -32, 0, 32])
    assert [bar.get_height() for bar in last.patches] == pytest.approx([20, 20, 40, 20])
    assert last.get_xlabel() == "steps"
    assert figure.get_suptitle() == "fc: the same weights take 256 values at 8 bits, 4 at 2 bits"


def test_histogram_of_equally_frequent_codes_is_flat() -> None:
    """Bins that are not a whole number of steps wide would draw a comb that the weights do not have."""
    for levels in (200, 254, 256):
        (axes,) = plots.weight_histograms({8: np.arange(levels) * 0.013}).axes
        heights = [bar.get_height() for bar in axes.patches]
        assert sum(heights) == pytest.approx(100)
        assert heights[:-1] == pytest.approx([heights[0]] * (len(heights) - 1))


def test_histogram_ignores_rounding_noise_and_takes_tensors_of_one_value() -> None:
    noisy = np.repeat(np.arange(4.0), 50) + np.linspace(0, 1e-9, 200)
    figure = plots.weight_histograms({8: torch.zeros(5), 2: noisy})
    assert sum(bar.get_height() for bar in figure.axes[0].patches) == pytest.approx(100)
    assert [bar.get_height() for bar in figure.axes[1].patches] == pytest.approx([25] * 4)


def test_sizes_lay_the_separate_files_end_to_end() -> None:
    figure = plots.sizes_by_bits(SIZES)
    (axes,) = figure.axes
    bars = [(bar.get_y() + bar.get_height() / 2, bar.get_x(), bar.get_width()) for bar in axes.patches]
    rows = {row: [(x, width) for y, x, width in bars if round(y) == row] for row in range(3)}
    assert rows[0] == [(0, pytest.approx(400))]
    assert rows[1] == [(start, pytest.approx(width)) for start, width in ((0, 100), (100, 75), (175, 50), (225, 25))]
    assert rows[2] == [(0, pytest.approx(120))]
    assert axes.get_xlabel() == "size (kB)"
    assert "48 % of the bytes of 4 separate files and 30 % of the float model's" in figure.get_suptitle()
    assert [t.get_text() for t in axes.get_yticklabels()] == ["float model", "separate files", "one bitdial file"]


def test_format_bytes() -> None:
    expected = {0: "0 bytes", 999: "999 bytes", 1000: "1.0 kB", 999_949: "999.9 kB", 999_951: "1.0 MB", 5e9: "5.0 GB"}
    assert {count: plots.format_bytes(count) for count in expected} == expected


@pytest.mark.parametrize("values", [{}, {9: 0.5}, {"x": 0.5}, {1: 0.5}, {"all": 1}])
def test_widths_that_are_none_are_refused(values: dict[Any, float]) -> None:
    with pytest.raises(ConfigError, match="bit-width"):
        plots.accuracy_by_bits(0.9, values)


def test_a_history_without_accuracy_or_gradients_is_refused() -> None:
    with pytest.raises(ConfigError, match="no accuracy"):
        plots.convergence({"rows": []})
    with pytest.raises(ConfigError, match="no accuracy"):
        plots.convergence({"rows": [{"epoch": 0, "train_top1": {}}]})
    with pytest.raises(ConfigError, match="no samples"):
        plots.scale_gradients({"layers": ["fc"], "gradients": {}})
    zero = {"8": [{"step": 0, "weight": [0.0], "act": [float("nan")]}]}
    for which in ("weight", "act"):
        with pytest.raises(ConfigError, match=f"no {which} scale gradient"):
            plots.scale_gradients({"layers": ["fc"], "gradients": zero}, which)
    with pytest.raises(ConfigError, match="which='bias'"):
        plots.scale_gradients(make_history(), "bias")
    with pytest.raises(ConfigError, match=r"no gradients at \[3\] bits"):
        plots.scale_gradients(make_history(), bits=[8, 3])


@pytest.mark.parametrize("values", [[], [float("nan")], [1.0, float("inf")]])
def test_weights_that_are_not_numbers_are_refused(values: list[float]) -> None:
    with pytest.raises(ConfigError, match="at 4 bits"):
        plots.weight_histograms({4: values})


def test_missing_matplotlib_names_the_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    figure = plots.accuracy_by_bits(0.9, TOP1)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    calls: list[tuple[Any, ...]] = [
        (plots.accuracy_by_bits, 0.9, TOP1),
        (plots.convergence, make_history()),
        (plots.scale_gradients, make_history()),
        (plots.weight_histograms, {2: [1.0]}),
        (plots.sizes_by_bits, SIZES),
        (plots.sensitivity_by_layer, TRACES),
        (plots.bits_over_traces, TRACES, PLANS),
        (functools.partial(plots.pareto_fronts, cost="bits"), FRONTS),
        (plots.predicted_and_measured, [1.0], [0.5], None),
        (plots.to_svg, figure),
        (plots.to_png, figure, tmp_path / "x.png"),
    ]
    for function, *arguments in calls:
        with pytest.raises(MissingDependencyError, match=r"pip install 'bitdial\[report\]'"):
            function(*arguments)
    assert not list(tmp_path.iterdir())


def test_svg_is_one_labelled_element_that_scales() -> None:
    for name, figure in all_figures().items():
        text = drawings()[name]
        assert text.startswith("<svg ")
        root = ElementTree.fromstring(text)
        assert root.get("role") == "img"
        assert root.get("aria-label") == figure.get_suptitle().replace("\n", " ")
        assert root.get("viewBox")
        assert root.get("width") is None
        assert not re.search(r"<(style|metadata|script|image|!DOCTYPE|\?xml)", text)
        assert re.findall(r"https?://[^\"]*", text) == ["http://www.w3.org/2000/svg"]
    assert ElementTree.fromstring(plots.to_svg(figure, label='a "b" <c>')).get("aria-label") == 'a "b" <c>'


def ids_and_references(text: str) -> tuple[list[str], set[str]]:
    root = ElementTree.fromstring(text)
    ids = [element.get("id", "") for element in root.iter() if element.get("id")]
    references = set(re.findall(r"url\(#([^)]+)\)", text))
    references |= {value[1:] for element in root.iter() if (value := element.get("href"))}
    return ids, references


def test_svg_ids_are_unique_across_figures_and_references_hold() -> None:
    seen: set[str] = set()
    for text in [*drawings().values(), plots.to_svg(plots.accuracy_by_bits(0.5, TOP1))]:
        ids, references = ids_and_references(text)
        assert references
        assert references <= set(ids)
        assert len(ids) == len(set(ids))
        assert not seen & set(ids)
        seen |= set(ids)


def test_svg_prefix_separates_two_copies_of_a_figure() -> None:
    figure = plots.convergence(make_history())
    first, _ = ids_and_references(plots.to_svg(figure, prefix="a-"))
    second, references = ids_and_references(plots.to_svg(figure, prefix="b-"))
    assert not set(first) & set(second)
    assert all(name.startswith("b-") for name in [*second, *references])


def test_text_of_the_data_is_only_text() -> None:
    """Names that look like ids, markup or formulas come out as they went in."""
    name = 'a<b>&"url(#x)" id="y" $\\alpha$ #z'
    figure = plots.weight_histograms({2: [0.0, 1.0]}, layer=name)
    assert name in texts(figure)


def test_same_data_give_the_same_bytes(tmp_path: Path) -> None:
    first, second = plots.scale_gradients(make_history()), plots.scale_gradients(make_history())
    text = plots.to_svg(first)
    plots.to_png(first, tmp_path / "a.png", dpi=70)
    plots.to_png(second, tmp_path / "b.png", dpi=70)
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()
    assert plots.to_svg(second) == plots.to_svg(first) == text  # saving in between changed nothing


def test_the_style_of_the_user_neither_shows_nor_changes() -> None:
    with matplotlib.rc_context({"font.size": 20, "axes.facecolor": "black", "svg.fonttype": "path"}):
        before = matplotlib.rcParams.copy()
        found = {name: plots.to_svg(figure) for name, figure in all_figures.__wrapped__().items()}
        assert dict.items(matplotlib.rcParams) == dict.items(before)
    assert found == drawings()


def test_another_process_gives_the_same_bytes_and_never_imports_pyplot() -> None:
    code = (
        "import sys, hashlib, runpy, bitdial.report\n"
        "assert 'matplotlib' not in sys.modules\n"
        "tests = runpy.run_path(sys.argv[1])\n"
        "assert 'matplotlib.pyplot' not in sys.modules\n"
        "text = ''.join(tests['drawings']().values())\n"
        "assert 'matplotlib.pyplot' not in sys.modules\n"
        "print(hashlib.sha256(text.encode()).hexdigest())\n"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "7", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code, __file__],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == hashlib.sha256("".join(drawings().values()).encode()).hexdigest()


def test_png_is_written_atomically(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figure, path = plots.accuracy_by_bits(0.9, TOP1), tmp_path / "deep" / "a.png"
    plots.to_png(figure, path)
    before = path.read_bytes()
    assert before.startswith(b"\x89PNG")

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(BitdialError, match="No space left"):
        plots.to_png(plots.accuracy_by_bits(0.1, TOP1), path)
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]


# Machado, Oliveira and Fernandes (2009): how linear RGB looks without one kind of cone.
VISION = {
    "full": np.eye(3),
    "protan": [[0.152, 1.053, -0.205], [0.115, 0.786, 0.099], [-0.004, -0.048, 1.052]],
    "deutan": [[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]],
    "tritan": [[1.256, -0.077, -0.179], [-0.078, 0.931, 0.148], [0.005, 0.691, 0.304]],
}


@pytest.mark.parametrize("kind", VISION)
def test_colours_are_told_apart_with_any_colour_vision(kind: str) -> None:
    to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    lab = {}
    for bits, colour in plots.PALETTE.items():
        linear = np.array([v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in to_rgb(colour)])
        seen = np.clip(np.array(VISION[kind]) @ linear, 0, 1)
        x, y, z = np.cbrt(to_xyz @ seen / to_xyz.sum(axis=1))
        lab[bits] = np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])
    for left, right in itertools.combinations(lab, 2):
        least = 25 if {left, right} <= {8, 6, 4, 3, 2} else 15  # a just noticeable difference is about 2
        assert np.linalg.norm(lab[left] - lab[right]) > least, (left, right)
    assert len(set(plots.MARKERS.values())) == len(plots.PALETTE) == 7
