"""Figures of one file at its widths: accuracy, weights and bytes."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from bitdial.errors import ConfigError
from bitdial.report.charts.plot import (
    ROUND,
    SHAPES,
    Chart,
    Plot,
    Scale,
    card,
    frame,
    interval_key,
    legend,
    percent_scale,
)
from bitdial.report.markup import element
from bitdial.report.numbers import (
    Samples,
    by_bits,
    counted,
    format_bytes,
    interval_text,
    measured_text,
    percent,
    width_name,
)

# --- accuracy -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mark:
    """A share of samples (0 to 1) at a setting: name, colour (as a class), shape, and the place on the dial."""

    name: str
    value: float
    css: str
    shape: str
    ring: bool = False
    setting: int | None = None


def accuracy_by_bits(float_top1: float, top1: Mapping[Any, float], samples: Samples, *, dial: bool = True) -> Chart:
    """A mark for the accuracy (0 to 1) at each width, with its interval, beside the line of the float model.

    With `dial`, the marks of the widths are the settings of the page's dial, which counts from the lowest width.
    """
    widths = by_bits(top1)
    marks = [Mark("float", float_top1, "float", ROUND)]
    for place, (bits, value) in enumerate(widths.items(), start=1):
        setting = len(widths) - place if dial else None
        marks.append(Mark(width_name(bits), value, f"w{bits}", SHAPES[bits], ring=True, setting=setting))
    key = ("float", "M-7 0H7", f"float model, {percent(float_top1)}")
    return shares_by_setting(
        _accuracy_title(float_top1, widths), ("accuracy", "right"), marks, samples, level=(float_top1, key)
    )


def shares_by_setting(
    title: str,
    what: tuple[str, str],
    marks: Sequence[Mark],
    samples: Samples,
    level: tuple[float, tuple[str, str, str]] | None = None,
) -> Chart:
    """A chart of shares of samples with their intervals, side by side.

    `what` is the name of the share, and what answers that count are; `level` is a line across with its key.
    """
    intervals = [samples.interval(mark.value) for mark in marks]
    shown = [mark.value for mark in marks] + [end for found in intervals if found for end in found]
    plot = Plot(title, 220, Scale(-0.5, len(marks) - 0.5), percent_scale(shown))
    plot.y_axis(f"{what[0]} (%)", [tick for tick in plot.scale_y.ticks() if 0 <= tick <= 100])
    plot.x_axis("setting", [(place, mark.name) for place, mark in enumerate(marks)])
    if level is not None:
        y = plot.y(100 * level[0])
        plot.axes.append(element("line", x2="100%", y1=y, y2=y, class_="level"))
    for place, (mark, found) in enumerate(zip(marks, intervals, strict=True)):
        low, high = found or (mark.value, mark.value)
        parts = [] if found is None else [plot.whisker(100 * low, 100 * high)]
        parts += [plot.ring(100 * mark.value)] if mark.ring else []
        label = element("text", f"{100 * mark.value:.1f}", y=plot.y(100 * high) - 8, class_="middle strong")
        drawn = plot.at(place, *parts, plot.shape(100 * mark.value, mark.shape), label)
        plot.point(mark.css, f"{mark.name}: {measured_text(mark.value, found)}", drawn, setting=mark.setting)
    keys = [] if level is None else [level[1]]
    keys += [interval_key(str(samples), what[1])] if any(intervals) else []
    rows: list[tuple[str, ...]] = [("Setting", f"{what[0].capitalize()} on {samples}", "95 % interval")]
    rows += [
        (mark.name, percent(mark.value), interval_text(found)) for mark, found in zip(marks, intervals, strict=True)
    ]
    return Chart(title, card(frame(plot), legend(*keys)), rows)


def _accuracy_title(level: float, widths: dict[int, float]) -> str:
    worst = min(widths, key=lambda bits: widths[bits])
    if (loss := 100 * (level - widths[worst])) < 0.05:
        return "No bit-width loses accuracy against the float model"
    return f"The largest loss against the float model is {loss:.1f} points, at {width_name(worst)}"


# --- weights --------------------------------------------------------------------------------------


def weight_histograms(
    values: Mapping[Any, npt.ArrayLike], *, layer: str = "all layers", unit: str = "weight value"
) -> Chart:
    """A histogram of the weights' values at each width; `values` by width is 1-D, `unit` the label of their axis."""
    arrays = {bits: _finite(array, bits) for bits, array in by_bits(values).items()}
    levels = {bits: 1 + _gaps(array).size for bits, array in arrays.items()}
    first, last = max(levels), min(levels)
    title = f"{layer}: the same weights take {counted(levels[first], 'value')} at {width_name(first)}"
    title += "" if first == last else f", {levels[last]:,} at {width_name(last)}"
    edges = {bits: _level_edges(array) for bits, array in arrays.items()}
    across = Scale(min(float(e[0]) for e in edges.values()), max(float(e[-1]) for e in edges.values()))
    panels = []
    rows: list[tuple[str, ...]] = [("Setting", "Values", "Least", "Largest", "Most frequent", "Its share")]
    for bits, array in arrays.items():
        shares = 100 * np.histogram(array, edges[bits])[0] / array.size
        name = f"{width_name(bits)}: {counted(levels[bits], 'value')}"
        panels.append(_histogram(name, shares, edges[bits], across, bits, unit))
        found, counts = np.unique(array, return_counts=True)
        most = int(counts.argmax())
        ends = [f"{value:.4g}".replace("-", "−") for value in (array.min(), array.max(), found[most])]
        rows.append((width_name(bits), f"{levels[bits]:,}", *ends, percent(counts[most] / array.size)))
    return Chart(title, card(element("div", *panels, class_="panels pairs")), rows)


def _histogram(
    name: str, shares: npt.NDArray[np.float64], edges: npt.NDArray[np.float64], across: Scale, bits: int, unit: str
) -> Any:
    plot = Plot(name, 120, across, Scale(0, 1.1 * float(shares.max())))
    plot.y_axis("share of weights (%)", plot.scale_y.ticks(3))
    plot.x_axis(unit)
    slim = min(0.45 * (edges[1] - edges[0]), (across.high - across.low) / 100)
    for left, right, share in zip(edges[:-1], edges[1:], shares, strict=True):
        middle = (left + right) / 2
        top = plot.y(float(share))
        if share == 0:
            continue
        tip = f"{middle:.4g}: {share:.3g} % of the weights".replace("-", "−")
        plot.point(f"w{bits}", tip, plot.bar(middle - slim, middle + slim, top, plot.height - top))
    return element("div", element("h3", name), frame(plot))


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


# --- bytes ----------------------------------------------------------------------------------------


def sizes_by_bits(sizes: Mapping[str, Any]) -> Chart:
    """Bars for bytes: `float` (the float model), `separate` (by width, one file each, end to end) and `artifact`."""
    separate = by_bits(sizes["separate"])
    whole, together, one = sizes["float"], sum(separate.values()), sizes["artifact"]
    share = f"{100 * one / together:.0f} % of the bytes of {counted(len(separate), 'separate file')}"
    title = f"One file takes {share} and {100 * one / whole:.0f} % of the float model's"
    plot = Plot(title, 3 * 52, Scale(0, max(whole, together, one)))
    for row, (name, total) in enumerate((("float model", whole), ("separate files", together), ("one file", one))):
        plot.text(name, "0", 52 * row + 12)
        plot.text(format_bytes(total), "100%", 52 * row + 12, "end strong")
    plot.point("float", f"float model: {whole:,} bytes", plot.bar(0, whole, 18, 22))
    start = 0
    for bits, count in separate.items():
        part = plot.bar(start, start + count, 52 + 18, 22, "part")
        plot.point(f"w{bits}", f"separate file of {width_name(bits)}: {count:,} bytes", part)
        start += count
    plot.point("one", f"one file for all bit-widths: {one:,} bytes", plot.bar(0, one, 104 + 18, 22))
    keys = [(f"w{bits}", SHAPES[6], f"{width_name(bits)}, {format_bytes(count)}") for bits, count in separate.items()]
    rows: list[tuple[str, ...]] = [("What", "Bytes"), ("float model", f"{whole:,}")]
    rows += [(f"separate file of {width_name(bits)}", f"{count:,}") for bits, count in separate.items()]
    rows += [("separate files together", f"{together:,}"), ("one file for all bit-widths", f"{one:,}")]
    return Chart(title, card(frame(plot, "rows plain"), legend(*keys)), rows)
