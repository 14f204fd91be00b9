"""Figures of a training run: accuracy by epoch, and the gradients of the scales."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from bitdial.errors import ConfigError
from bitdial.report.charts.plot import SHAPES, Chart, Plot, Scale, card, frame, legend, log_scale, percent_scale
from bitdial.report.numbers import Samples, by_bits, counted, measured_text, percent, shortened, width_name

MOST_MARKS = 40  # of a line
BOX = 10  # pixels for each width in a layer's row
Peaks = dict[int, npt.NDArray[np.float64]]  # a layer's number -> its samples


def convergence(history: Mapping[str, Any], samples: Samples) -> Chart:
    """A line for each width: accuracy by epoch, on `samples` (`top1`) if the history has it, else in training."""
    rows = history.get("rows") or []
    key = "top1" if any(row.get("top1") for row in rows) else "train_top1"
    rows = [row for row in rows if row.get(key)]
    if not rows:
        raise ConfigError("the history has no accuracy; train with evaluate_on, or on targets that are class numbers")
    epochs = [row["epoch"] + 1 for row in rows]
    last = by_bits(rows[-1][key])
    lines = {bits: [by_bits(row[key]).get(bits, math.nan) for row in rows] for bits in last}
    least = percent(min(last.values()))
    title = f"One run trains every bit-width: after {counted(epochs[-1], 'epoch')} all are at {least} or more"
    shown = [value for line in lines.values() for value in line if value == value]
    plot = Plot(title, 220, Scale(epochs[0] - 0.5, epochs[-1] + 0.5), percent_scale(shown))
    what = f"accuracy on {samples} (%)" if key == "top1" else "training accuracy (%)"
    plot.y_axis(what, [tick for tick in plot.scale_y.ticks() if 0 <= tick <= 100])
    plot.x_axis("epoch", [(tick, f"{tick:.0f}") for tick in plot.scale_x.ticks(6) if tick % 1 == 0])
    every = math.ceil(len(rows) / MOST_MARKS)
    for bits, line in lines.items():
        points = [(epoch, value) for epoch, value in zip(epochs, line, strict=True) if value == value]
        plot.curve([(epoch, 100 * value) for epoch, value in points], f"w{bits}")
        for epoch, value in points[::-1][::every][::-1]:
            interval = samples.interval(value) if key == "top1" else None
            tip = f"epoch {epoch}, {width_name(bits)}: {measured_text(value, interval)}"
            plot.point(f"w{bits}", tip, plot.at(epoch, plot.shape(100 * value, SHAPES[bits], size=0.7)))
    keys = [(f"w{bits}", SHAPES[bits], f"{width_name(bits)}, {percent(value)}") for bits, value in last.items()]
    table: list[tuple[str, ...]] = [("Epoch", *(width_name(bits) for bits in lines))]
    for place, epoch in enumerate(epochs):
        values = [line[place] for line in lines.values()]
        table.append((f"{epoch}", *(percent(value) if value == value else "–" for value in values)))
    return Chart(title, card(frame(plot), legend(*keys)), table)


def scale_gradients(history: Mapping[str, Any], which: str = "weight") -> Chart:
    """Box plots of the sampled peaks of the scale gradients, by layer and width (the paper's Figure 3).

    `which` is 'weight' or 'act'. Boxes are quartiles, whiskers reach 1.5 times further, outliers are hidden. Samples
    that are 0 (a layer without such a scale) are left out.
    """
    if which not in ("weight", "act"):
        raise ConfigError(f"which={which!r} is not known; choose 'weight' or 'act'")
    if not history.get("layers") or not history.get("gradients"):
        raise ConfigError("the history has no samples of scale gradients; pass History.to_dict() of a finished run")
    found = {bits: _positive(samples, which) for bits, samples in by_bits(history["gradients"]).items()}
    layers = [i for i in range(len(history["layers"])) if any(i in peaks for peaks in found.values())]
    if not layers:
        raise ConfigError(f"the history has no {which} scale gradient above 0")
    boxes = {(i, bits): _box(peaks[i]) for bits, peaks in found.items() for i in peaks}
    title = _gradient_title(found, "weight" if which == "weight" else "activation")
    pitch = 26 + BOX * len(found)
    plot = Plot(title, pitch * len(layers), log_scale([end for box in boxes.values() for end in (box[0], box[4])]))
    plot.x_axis("|gradient| of the scale", top=True)
    for row, i in enumerate(layers):
        plot.text(shortened(history["layers"][i]), "0", pitch * row + 14)
        for place, bits in enumerate(found):
            if (i, bits) in boxes:
                tip = f"{history['layers'][i]}, {width_name(bits)}: {_box_text(boxes[i, bits])}"
                _draw_box(plot, boxes[i, bits], pitch * row + 20 + BOX * place, f"w{bits}", tip)
    keys = [(f"w{bits}", SHAPES[6], width_name(bits)) for bits in found]
    table: list[tuple[str, ...]] = [("Layer", *(f"{width_name(bits)}, median" for bits in found))]
    for i in layers:
        medians = [f"{boxes[i, bits][2]:.2g}" if (i, bits) in boxes else "–" for bits in found]
        table.append((history["layers"][i], *medians))
    return Chart(title, card(legend(*keys), frame(plot, "rows")), table)


def _positive(samples: list[dict[str, Any]], which: str) -> Peaks:
    """The samples of each layer, by its number, that are finite and above 0; layers without any are left out."""
    table = np.array([sample[which] for sample in samples], dtype=np.float64).T
    kept = {i: peaks[np.isfinite(peaks) & (peaks > 0)] for i, peaks in enumerate(table)}
    return {i: peaks for i, peaks in kept.items() if peaks.size}


def _gradient_title(found: dict[int, Peaks], kind: str) -> str:
    medians = {b: float(np.median(np.concatenate(list(peaks.values())))) for b, peaks in found.items() if peaks}
    high, low = max(medians), min(medians)
    if high == low:
        return f"Gradients of the {kind} scales at {width_name(high)}: median {medians[high]:.2g}"
    times = f"{medians[low] / medians[high]:.2g} times those at {width_name(high)} (medians)"
    return f"Gradients of the {kind} scales at {width_name(low)} are {times}"


def _box(peaks: npt.NDArray[np.float64]) -> tuple[float, float, float, float, float]:
    """The least within reach, the quartiles, and the most within reach: one and a half heights of the box."""
    low, middle, high = np.quantile(peaks, (0.25, 0.5, 0.75))
    reach = 1.5 * (high - low)
    least, most = peaks[peaks >= low - reach].min(), peaks[peaks <= high + reach].max()
    return float(least), float(low), float(middle), float(high), float(most)


def _box_text(box: tuple[float, ...]) -> str:
    least, low, middle, high, most = (f"{value:.2g}" for value in box)
    return f"median {middle}, half of the samples {low} to {high}, whiskers {least} to {most}"


def _draw_box(plot: Plot, box: tuple[float, ...], top: float, css: str, tip: str) -> None:
    least, low, middle, high, most = box
    centre = top + BOX / 2
    plot.point(
        css,
        tip,
        plot.line(least, most, centre, centre, "whisker"),
        plot.bar(low, high, top + 1, BOX - 2, "mark"),
        plot.line(middle, middle, top, top + BOX, "median"),
    )
