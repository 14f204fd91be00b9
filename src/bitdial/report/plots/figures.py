"""Figures of multi-precision training: accuracy, its course, scale gradients, weights and bytes."""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from bitdial.errors import ConfigError
from bitdial.report.plots.drawing import (
    GREY,
    INK,
    LIGHT,
    MARKERS,
    PALETTE,
    by_bits,
    counted,
    drawing,
    format_bytes,
    label_layers,
    limit_percent,
    log_axis,
    make_panels,
    unit_of,
    width_name,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@drawing
def accuracy_by_bits(float_top1: float, top1: Mapping[Any, float]) -> "Figure":
    """A dot for the accuracy (0 to 1) at each width, hung from the line of the float model."""
    level = 100 * float_top1
    points = {bits: 100 * value for bits, value in by_bits(top1).items()}
    figure, (axes,) = make_panels(_accuracy_title(level, points), 1, height=2.8)
    axes.axhline(level, color=INK, linewidth=1, linestyle=(0, (5, 3)))
    axes.annotate(f"float\n{level:.1f} %", (1, level), (6, 0), ("axes fraction", "data"), "offset points", va="center")
    for x, (bits, value) in enumerate(points.items()):
        axes.vlines(x, level, value, color=PALETTE[bits], linewidth=2.5)
        axes.plot([x], [value], MARKERS[bits], color=PALETTE[bits], markersize=9, label=width_name(bits))
        text = axes.annotate(f"{value:.1f} %", (x, value), (0, 8 if value >= level else -8), textcoords="offset points")
        text.set(fontweight="bold", ha="center", va="bottom" if value >= level else "top")
    axes.set_xticks(range(len(points)), [width_name(bits) for bits in points])
    axes.set_xlim(-0.6, len(points) - 0.4)
    axes.set_ylabel("accuracy (%)")
    limit_percent(axes, [level, *points.values()])
    return figure


def _accuracy_title(level: float, points: dict[int, float]) -> str:
    worst = min(points, key=lambda bits: points[bits])
    if (loss := level - points[worst]) < 0.05:
        return "No bit-width loses accuracy against the float model"
    return f"The largest loss against the float model is {loss:.1f} points, at {width_name(worst)}"


@drawing
def convergence(history: Mapping[str, Any]) -> "Figure":
    """A line for each width: accuracy by epoch, evaluated (`top1`) if the history has it, else on training batches."""
    rows = history.get("rows") or []
    key = "top1" if any(row.get("top1") for row in rows) else "train_top1"
    rows = [row for row in rows if row.get(key)]
    if not rows:
        raise ConfigError("the history has no accuracy; train with evaluate_on, or on targets that are class numbers")
    widths = by_bits(rows[-1][key])
    least = 100 * min(widths.values())
    epochs = [row["epoch"] + 1 for row in rows]
    title = f"One run trains every bit-width: after {counted(epochs[-1], 'epoch')} all are at {least:.1f} % or more"
    figure, (axes,) = make_panels(title, 1, height=3.0)
    for bits in widths:
        values = [100 * by_bits(row[key]).get(bits, math.nan) for row in rows]
        marker = MARKERS[bits] if len(rows) <= 40 else ""
        axes.plot(
            epochs, values, color=PALETTE[bits], marker=marker, markersize=5, linewidth=1.6, label=width_name(bits)
        )
    axes.set_xlabel("epoch")
    axes.set_ylabel("evaluation accuracy (%)" if key == "top1" else "training accuracy (%)")
    axes.margins(x=0.03)
    if len(epochs) <= 12:
        axes.set_xticks(epochs)
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5))
    return figure


@drawing
def scale_gradients(history: Mapping[str, Any], which: str = "weight", bits: Sequence[int] | None = None) -> "Figure":
    """Box plots of the sampled peaks of the scale gradients, by layer, a panel for each width (the paper's Figure 3).

    `which` is 'weight' or 'act'; `bits` chooses widths, all by default. Boxes are quartiles, whiskers reach 1.5 times
    further, outliers are hidden. Samples that are 0 (a layer without such a scale) are left out.
    """
    if which not in ("weight", "act"):
        raise ConfigError(f"which={which!r} is not known; choose 'weight' or 'act'")
    if not history.get("layers") or not history.get("gradients"):
        raise ConfigError("the history has no samples of scale gradients; pass History.to_dict() of a finished run")
    samples = by_bits(history["gradients"])
    if bits is not None and (absent := [b for b in bits if b not in samples]):
        raise ConfigError(f"the history has no gradients at {absent} bits; it has {list(samples)}")
    chosen = {b: _positive(samples[b], which) for b in samples if bits is None or b in bits}
    layers = [i for i in range(len(history["layers"])) if any(i in found for found in chosen.values())]
    if not layers:
        raise ConfigError(f"the history has no {which} scale gradient above 0")
    names = [history["layers"][i] for i in layers]
    title = _gradient_title(chosen, "weight" if which == "weight" else "activation")
    columns, foot = 2 if len(layers) <= 24 else 1, 0.1 + 0.07 * max(map(len, names))
    figure, panels = make_panels(title, len(chosen), columns=columns, height=1.9, foot=foot, sharex=True, sharey=True)
    for number, (axes, (width, found)) in enumerate(zip(panels, chosen.items(), strict=True)):
        if found:
            _boxes(axes, {layers.index(i): peaks for i, peaks in found.items()}, PALETTE[width])
        axes.set_title(width_name(width), loc="left", fontweight="bold")
        label_layers(axes, names, bottom=number + columns >= len(panels))
        if number % columns == 0:
            axes.set_ylabel("|gradient| of the scale")
    log_axis(panels[0])
    return figure


def _positive(samples: list[dict[str, Any]], which: str) -> dict[int, npt.NDArray[np.float64]]:
    """The samples of each layer, by its number, that are finite and above 0; layers without any are left out."""
    table = np.array([sample[which] for sample in samples], dtype=np.float64).T
    kept = {i: peaks[np.isfinite(peaks) & (peaks > 0)] for i, peaks in enumerate(table)}
    return {i: peaks for i, peaks in kept.items() if peaks.size}


def _gradient_title(chosen: dict[int, dict[int, npt.NDArray[np.float64]]], kind: str) -> str:
    medians = {b: float(np.median(np.concatenate(list(found.values())))) for b, found in chosen.items() if found}
    high, low = max(medians), min(medians)
    if high == low:
        return f"Gradients of the {kind} scales at {width_name(high)}: median {medians[high]:.2g}"
    times = f"{medians[low] / medians[high]:.2g} times those at {width_name(high)} (medians)"
    return f"Gradients of the {kind} scales at {width_name(low)} are {times}"


def _boxes(axes: "Axes", groups: dict[int, npt.NDArray[np.float64]], color: str) -> None:
    """A box for each group, at its place. Not Axes.boxplot: it imports pyplot, which chooses the user's backend."""
    x = np.array(list(groups))
    low, middle, high = np.array([np.quantile(group, (0.25, 0.5, 0.75)) for group in groups.values()]).T
    least = [group[group >= a - 1.5 * (b - a)].min() for group, a, b in zip(groups.values(), low, high, strict=True)]
    most = [group[group <= b + 1.5 * (b - a)].max() for group, a, b in zip(groups.values(), low, high, strict=True)]
    for start, end in ((least, low), (high, most)):
        axes.vlines(x, start, end, color=color, linewidth=1)
    for whisker in (least, most):
        axes.hlines(whisker, x - 0.15, x + 0.15, color=color, linewidth=1)
    axes.bar(x, high - low, bottom=low, width=0.6, facecolor=f"{color}40", edgecolor=color)
    axes.hlines(middle, x - 0.3, x + 0.3, color=INK, linewidth=1.4)


@drawing
def weight_histograms(
    values: Mapping[Any, npt.ArrayLike], *, layer: str = "all layers", unit: str = "weight value"
) -> "Figure":
    """A histogram of the weights' values at each width; `values` by width is 1-D, `unit` the label of their axis."""
    arrays = {bits: _finite(array, bits) for bits, array in by_bits(values).items()}
    levels = {bits: 1 + _gaps(array).size for bits, array in arrays.items()}
    widest = max(float(np.ptp(array)) for array in arrays.values())
    first, last = max(levels), min(levels)
    title = f"{layer}: the same weights take {counted(levels[first], 'value')} at {width_name(first)}"
    title += "" if first == last else f", {levels[last]:,} at {width_name(last)}"
    figure, panels = make_panels(title, len(arrays), columns=2, height=1.8, sharex=True)
    for number, (axes, (bits, array)) in enumerate(zip(panels, arrays.items(), strict=True)):
        edges = _level_edges(array)
        shares = 100 * np.histogram(array, edges)[0] / array.size
        thickness = min(0.9 * (edges[1] - edges[0]), widest / 40 or 1.0)
        axes.bar((edges[1:] + edges[:-1]) / 2, shares, width=thickness, color=PALETTE[bits])
        axes.set_title(f"{width_name(bits)}: {counted(levels[bits], 'value')}", loc="left", fontweight="bold")
        axes.tick_params(axis="x", labelbottom=number + 2 >= len(panels))
        if number + 2 >= len(panels):
            axes.set_xlabel(unit)
        if number % 2 == 0:
            axes.set_ylabel("share of weights (%)")
    return figure


def _finite(values: npt.ArrayLike, bits: int) -> npt.NDArray[np.float64]:
    array = np.asarray(values, dtype=np.float64).reshape(-1)
    if not array.size or not np.isfinite(array).all():
        raise ConfigError(f"the weights at {bits} bits must be finite numbers, at least one")
    return array


def _gaps(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """The distances between neighbouring values; what is less than a millionth of their span is rounding noise."""
    gaps = np.diff(np.unique(values))
    return gaps[gaps > 1e-6 * np.ptp(values)]


def _level_edges(values: npt.NDArray[np.float64], most: int = 64) -> npt.NDArray[np.float64]:
    """Edges of at most `most` bins, each a whole number of the smallest steps between values.

    Bins that cut through a step would hold more values in some bins than in others: a pattern that is not there.
    """
    span = float(np.ptp(values)) or 1.0
    step = float(_gaps(values).min(initial=span))
    levels = round(span / step) + 1
    width = step * math.ceil(levels / most)
    bins = math.ceil(levels * step / width - 1e-9)
    return np.asarray(values.min() - step / 2 + width * np.arange(bins + 1), dtype=np.float64)


@drawing
def sizes_by_bits(sizes: Mapping[str, Any]) -> "Figure":
    """Bars for bytes: `float` (the float model), `separate` (by width, one file each, end to end) and `artifact`."""
    separate = by_bits(sizes["separate"])
    totals = [sizes["float"], sum(separate.values()), sizes["artifact"]]
    share = f"{100 * totals[2] / totals[1]:.0f} % of the bytes of {counted(len(separate), 'separate file')}"
    title = f"One file takes {share} and {100 * totals[2] / totals[0]:.0f} % of the float model's"
    figure, (axes,) = make_panels(title, 1, height=2.0)
    name, unit = unit_of(max(totals))
    axes.barh(0, totals[0] / unit, color=GREY, height=0.6)
    start = 0.0
    for bits, count in separate.items():
        axes.barh(
            1, count / unit, left=start, color=PALETTE[bits], height=0.6, edgecolor="white", label=width_name(bits)
        )
        ink = INK if bits in LIGHT else "white"
        axes.text(start + count / unit / 2, 1, f"{bits}", color=ink, fontweight="bold", ha="center", va="center")
        start += count / unit
    axes.barh(2, totals[2] / unit, color=INK, height=0.6)
    for y, total in enumerate(totals):
        text = axes.annotate(format_bytes(total), (total / unit, y), (6, 0), textcoords="offset points", va="center")
        text.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 1})
    axes.set_yticks(range(3), ["float model", "separate files", "one bitdial file"])
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.grid(visible=True, axis="x")
    axes.tick_params(axis="y", length=0)
    axes.margins(x=0.12)
    axes.set_xlabel(f"size ({name})")
    return figure
