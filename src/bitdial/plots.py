"""Figures: plain data in, a matplotlib Figure out. The only file that imports matplotlib.

figure = accuracy_by_bits(0.974, {8: 0.99, 4: 0.992, 2: 0.97})
to_svg(figure)                    # text to put into a page
to_png(figure, "accuracy.png")

No pyplot and no global state: the style holds inside a call, whatever the user's own settings are, and the same data
give the same bytes. Where data are by width, the keys are numbers or the text that JSON makes of them.
"""

import functools
import hashlib
import io
import math
import os
import re
import textwrap
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import numpy as np
import numpy.typing as npt

from bitdial.container import replacing
from bitdial.errors import BitdialError, ConfigError, MissingDependencyError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

P = ParamSpec("P")
T = TypeVar("T")

# A colour for each width, after Okabe, Ito and Tol; told apart with any colour vision, and each width has a marker too.
PALETTE = {8: "#332288", 7: "#CC79A7", 6: "#56B4E9", 5: "#D55E00", 4: "#E69F00", 3: "#117733", 2: "#882255"}
MARKERS = {8: "o", 7: "v", 6: "s", 5: "P", 4: "D", 3: "X", 2: "^"}
LIGHT = (7, 6, 4)  # widths whose colour needs dark text on it
INK, GREY = "#1f2328", "#8a9099"
WIDTH = 8.0  # inches; 9 points are then about 13 pixels at the width of a page

STYLE: dict[str, Any] = {
    "axes.axisbelow": True,
    "axes.edgecolor": GREY,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.labelcolor": INK,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlesize": 9.5,
    "font.size": 9,
    "grid.color": "#e3e6ea",
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "bitdial",
    "text.color": INK,
    "text.parse_math": False,
    "xtick.color": INK,
    "ytick.color": INK,
}


@contextmanager
def _style() -> Iterator[None]:
    try:
        from matplotlib import style
    except ImportError as problem:
        raise MissingDependencyError.missing("report", "matplotlib") from problem
    with style.context(["default", STYLE]):
        yield


def _drawing(make: "Callable[P, Figure]") -> "Callable[P, Figure]":
    """Run `make` in the house style and fix the layout, so that the figure is the same however often it is saved."""

    @functools.wraps(make)
    def drawn(*args: P.args, **kwargs: P.kwargs) -> "Figure":
        with _style():
            figure = make(*args, **kwargs)
            figure.draw_without_rendering()
            figure.set_layout_engine("none")
        return figure

    return drawn


def _panels(
    title: str, count: int, *, columns: int = 1, height: float, foot: float = 0.4, **shared: Any
) -> "tuple[Figure, list[Axes]]":
    """A figure with a title, left-aligned, `count` axes in rows of `columns`, and `foot` inches below the rows."""
    from matplotlib.figure import Figure

    columns = min(columns, count)
    rows = math.ceil(count / columns)
    figure = Figure((WIDTH, 0.3 + height * rows + foot), layout="constrained")
    figure.suptitle(textwrap.fill(title, 88), x=0.01, ha="left", fontsize=11, fontweight="bold")
    axes = list(figure.subplots(rows, columns, squeeze=False, **shared).flat)
    for empty in axes[count:]:
        empty.remove()
    return figure, axes[:count]


def by_bits(values: Mapping[Any, T]) -> dict[int, T]:
    """`values` by width as a number, descending; ConfigError if there are none or a key is not a width."""
    found = {int(key) if str(key).isdecimal() else key: value for key, value in values.items()}
    if not found or any(bits not in PALETTE for bits in found):
        raise ConfigError(f"expected values by bit-width from 2 to 8, got the keys {list(values)}")
    return {bits: found[bits] for bits in sorted(found, reverse=True)}


def format_bytes(count: float) -> str:
    """A number of bytes to read: '112.5 kB'; 1 kB is 1000 bytes."""
    unit, size = _unit_of(count)
    return f"{count / size:.{0 if size == 1 else 1}f} {unit}"


def _unit_of(count: float) -> tuple[str, float]:
    units = {"bytes": 1.0, "kB": 1e3, "MB": 1e6, "GB": 1e9}
    return next(((unit, size) for unit, size in units.items() if count < 999.95 * size), ("GB", 1e9))


@_drawing
def accuracy_by_bits(float_top1: float, top1: Mapping[Any, float]) -> "Figure":
    """A dot for the accuracy (0 to 1) at each width, hung from the line of the float model."""
    level = 100 * float_top1
    points = {bits: 100 * value for bits, value in by_bits(top1).items()}
    figure, (axes,) = _panels(_accuracy_title(level, points), 1, height=2.8)
    axes.axhline(level, color=INK, linewidth=1, linestyle=(0, (5, 3)))
    axes.annotate(f"float\n{level:.1f} %", (1, level), (6, 0), ("axes fraction", "data"), "offset points", va="center")
    for x, (bits, value) in enumerate(points.items()):
        axes.vlines(x, level, value, color=PALETTE[bits], linewidth=2.5)
        axes.plot([x], [value], MARKERS[bits], color=PALETTE[bits], markersize=9, label=_name(bits))
        text = axes.annotate(f"{value:.1f} %", (x, value), (0, 8 if value >= level else -8), textcoords="offset points")
        text.set(fontweight="bold", ha="center", va="bottom" if value >= level else "top")
    axes.set_xticks(range(len(points)), [_name(bits) for bits in points])
    axes.set_xlim(-0.6, len(points) - 0.4)
    axes.set_ylabel("accuracy (%)")
    _limit_percent(axes, [level, *points.values()])
    return figure


def _accuracy_title(level: float, points: dict[int, float]) -> str:
    worst = min(points, key=lambda bits: points[bits])
    if (loss := level - points[worst]) < 0.05:
        return "No bit-width loses accuracy against the float model"
    return f"The largest loss against the float model is {loss:.1f} points, at {_name(worst)}"


def _limit_percent(axes: "Axes", values: Sequence[float]) -> None:
    """Show all of `values` with room for labels, at least three points of accuracy and little above 100 %."""
    low, high = min(values), max(values)
    span = max(high - low, 2.0)
    bottom, top = max(low - 0.3 * span, -0.2 * span), min(high + 0.3 * span, 100 + 0.2 * span)
    axes.set_ylim(bottom, top)
    axes.set_yticks([tick for tick in axes.get_yticks() if max(bottom, 0) <= tick <= min(top, 100)])


def _name(bits: int) -> str:
    return f"{bits} bits"


@_drawing
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
    title = f"One run trains every bit-width: after {_count(epochs[-1], 'epoch')} all are at {least:.1f} % or more"
    figure, (axes,) = _panels(title, 1, height=3.0)
    for bits in widths:
        values = [100 * by_bits(row[key]).get(bits, math.nan) for row in rows]
        marker = MARKERS[bits] if len(rows) <= 40 else ""
        axes.plot(epochs, values, color=PALETTE[bits], marker=marker, markersize=5, linewidth=1.6, label=_name(bits))
    axes.set_xlabel("epoch")
    axes.set_ylabel("evaluation accuracy (%)" if key == "top1" else "training accuracy (%)")
    axes.margins(x=0.03)
    if len(epochs) <= 12:
        axes.set_xticks(epochs)
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5))
    return figure


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


@_drawing
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
    figure, panels = _panels(title, len(chosen), columns=columns, height=1.9, foot=foot, sharex=True, sharey=True)
    for number, (axes, (width, found)) in enumerate(zip(panels, chosen.items(), strict=True)):
        if found:
            _boxes(axes, {layers.index(i): peaks for i, peaks in found.items()}, PALETTE[width])
        axes.set_title(_name(width), loc="left", fontweight="bold")
        _label_layers(axes, names, bottom=number + columns >= len(panels))
        if number % columns == 0:
            axes.set_ylabel("|gradient| of the scale")
    _log_axis(panels[0])
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
        return f"Gradients of the {kind} scales at {_name(high)}: median {medians[high]:.2g}"
    times = f"{medians[low] / medians[high]:.2g} times those at {_name(high)} (medians)"
    return f"Gradients of the {kind} scales at {_name(low)} are {times}"


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


def _label_layers(axes: "Axes", names: list[str], *, bottom: bool) -> None:
    """Name the layers (of very many, some) below the lowest panel of a column, anchored at the axis in any font."""
    every = math.ceil(len(names) / 60)
    anchor: dict[str, Any] = {"rotation": 90, "rotation_mode": "anchor", "ha": "right", "va": "center"}
    axes.set_xticks(range(0, len(names), every), names[::every], fontsize=8, **anchor)
    axes.tick_params(axis="x", length=0, labelbottom=bottom)
    axes.set_xlim(-0.7, len(names) - 0.3)


def _log_axis(axes: "Axes") -> None:
    """A logarithmic y axis labelled with whole powers of ten, as plain text."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(numticks=6))
    axes.yaxis.set_minor_locator(NullLocator())
    raised = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda v, _: "10" + f"{math.log10(v):.0f}".translate(raised)))


@_drawing
def sensitivity_by_layer(layers: Mapping[str, Mapping[str, Any]], *, normalized: bool = False) -> "Figure":
    """The Hessian trace of each layer, on a logarithmic axis, with its standard error (the paper's Figure 4 c).

    `layers` is `Sensitivity.to_dict()["layers"]`. With `normalized`, both are divided by the layer's number of weights.
    Traces that are not above 0, which have no place on that axis, are crosses at its foot.
    """
    if not layers:
        raise ConfigError("there is no layer to draw; pass Sensitivity.to_dict()['layers']")
    share = [entry["parameters"] if normalized else 1 for entry in layers.values()]
    traces = np.array([entry["trace"] for entry in layers.values()], dtype=np.float64) / share
    errors = np.array([entry["error"] for entry in layers.values()], dtype=np.float64) / share
    names, above = list(layers), traces > 0
    what = "Hessian trace per weight" if normalized else "Hessian trace"
    title = f"No layer's {what} is above 0"
    if above.any():
        most = int(traces.argmax())
        times = f"{traces[most] / np.median(traces[above]):.2g} times the median"
        title = f"The largest {what} is that of {names[most]}: {times}"
    figure, (axes,) = _panels(title, 1, height=2.6, foot=0.1 + 0.07 * max(map(len, names)))
    drawn = np.where(above, traces, np.nan) if above.any() else traces
    axes.errorbar(range(len(names)), drawn, errors, color=PALETTE[8], ecolor=GREY, marker="o", markersize=5)
    if above.any():
        _log_axis(axes)
        axes.set_ylim(10 ** math.floor(math.log10(traces[above].min() / 2)), 2 * (traces + errors)[above].max())
    if above.any() and not above.all():
        foot: dict[str, Any] = {"transform": axes.get_xaxis_transform(), "markersize": 7, "label": "not above 0"}
        axes.plot(np.flatnonzero(~above), [0.04] * int((~above).sum()), "X", color=PALETTE[2], **foot)
        axes.legend(loc="upper right")
    _label_layers(axes, names, bottom=True)
    axes.set_ylabel(what)
    return figure


@_drawing
def weight_histograms(
    values: Mapping[Any, npt.ArrayLike], *, layer: str = "all layers", unit: str = "weight value"
) -> "Figure":
    """A histogram of the weights' values at each width; `values` by width is 1-D, `unit` the label of their axis."""
    arrays = {bits: _finite(array, bits) for bits, array in by_bits(values).items()}
    levels = {bits: 1 + _gaps(array).size for bits, array in arrays.items()}
    widest = max(float(np.ptp(array)) for array in arrays.values())
    first, last = max(levels), min(levels)
    title = f"{layer}: the same weights take {_count(levels[first], 'value')} at {_name(first)}"
    title += "" if first == last else f", {levels[last]:,} at {_name(last)}"
    figure, panels = _panels(title, len(arrays), columns=2, height=1.8, sharex=True)
    for number, (axes, (bits, array)) in enumerate(zip(panels, arrays.items(), strict=True)):
        edges = _level_edges(array)
        shares = 100 * np.histogram(array, edges)[0] / array.size
        thickness = min(0.9 * (edges[1] - edges[0]), widest / 40 or 1.0)
        axes.bar((edges[1:] + edges[:-1]) / 2, shares, width=thickness, color=PALETTE[bits])
        axes.set_title(f"{_name(bits)}: {_count(levels[bits], 'value')}", loc="left", fontweight="bold")
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


@_drawing
def sizes_by_bits(sizes: Mapping[str, Any]) -> "Figure":
    """Bars for bytes: `float` (the float model), `separate` (by width, one file each, end to end) and `artifact`."""
    separate = by_bits(sizes["separate"])
    totals = [sizes["float"], sum(separate.values()), sizes["artifact"]]
    share = f"{100 * totals[2] / totals[1]:.0f} % of the bytes of {_count(len(separate), 'separate file')}"
    title = f"One file takes {share} and {100 * totals[2] / totals[0]:.0f} % of the float model's"
    figure, (axes,) = _panels(title, 1, height=2.0)
    name, unit = _unit_of(max(totals))
    axes.barh(0, totals[0] / unit, color=GREY, height=0.6)
    start = 0.0
    for bits, count in separate.items():
        axes.barh(1, count / unit, left=start, color=PALETTE[bits], height=0.6, edgecolor="white", label=_name(bits))
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


def to_svg(figure: "Figure", *, prefix: str = "", label: str = "") -> str:
    """`figure` as an <svg> element to put into a page: no prolog, scales with the page, labelled for screen readers.

    Every id begins with `prefix`, by default one made from the content: give it where a page shows a figure twice.
    `label` describes the figure, by default with its title.
    """
    buffer = io.StringIO()
    with _style():
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    prefix = prefix or f"f{hashlib.sha256(buffer.getvalue().encode()).hexdigest()[:10]}-"
    root = ElementTree.fromstring(buffer.getvalue())
    for element in root.iter():
        element.tag = _local(element.tag)
        element.attrib = {_local(k): _prefixed(_local(k), v, prefix) for k, v in element.attrib.items()}
        for child in [c for c in element if _local(c.tag) in ("metadata", "style")]:
            element.remove(child)
    del root.attrib["width"], root.attrib["height"]
    root.attrib |= {
        "xmlns": "http://www.w3.org/2000/svg",
        "role": "img",
        "aria-label": label or figure.get_suptitle().replace("\n", " "),
        "style": "stroke-linejoin: round; stroke-linecap: butt",  # what the removed style said, for this element only
    }
    return ElementTree.tostring(root, encoding="unicode")


def _local(name: str) -> str:
    return name.rpartition("}")[2]


def _prefixed(key: str, value: str, prefix: str) -> str:
    if key == "id":
        return prefix + value
    return re.sub(r"^#" if key == "href" else r"(?<=url\()#", f"#{prefix}", value)


def to_png(figure: "Figure", path: str | os.PathLike[str], *, dpi: int = 160) -> None:
    """Write `figure` to `path`, atomically; BitdialError if that fails."""
    with replacing(Path(path), error=BitdialError) as temporary, _style():
        figure.savefig(temporary, format="png", dpi=dpi, metadata={"Software": None})
