"""Figures of mixed precision: sensitivities, the bits of plans over them, and fronts of plans."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from bitdial.errors import ConfigError
from bitdial.report.charts.plot import (
    DOT,
    ROUND,
    SHAPES,
    Chart,
    Plot,
    Scale,
    card,
    frame,
    interval_key,
    legend,
    log_scale,
    percent_scale,
)
from bitdial.report.markup import element
from bitdial.report.numbers import (
    Samples,
    counted,
    interval_text,
    measured_text,
    percent,
    shortened,
    width_name,
)

SERIES = (8, 5, 3, 7)  # the widths whose colour and shape the first, second, ... front takes
ROW = 40  # pixels for a layer
Array = npt.NDArray[np.float64]


def sensitivity_by_layer(layers: Mapping[str, Mapping[str, Any]]) -> Chart:
    """The Hessian trace of each layer, on a logarithmic axis, with its standard error (the paper's Figure 4 c).

    `layers` is `Sensitivity.to_dict()["layers"]`. Traces that are not above 0, which have no place on that axis, are
    crosses at its left end.
    """
    if not layers:
        raise ConfigError("there is no layer to draw; pass Sensitivity.to_dict()['layers']")
    names = list(layers)
    traces, errors = (np.array([one[key] for one in layers.values()], dtype=np.float64) for key in ("trace", "error"))
    above = traces > 0
    title = "No layer's Hessian trace is above 0"
    if above.any():
        most = int(traces.argmax())
        times = f"{traces[most] / np.median(traces[above]):.2g} times the median"
        title = f"The largest Hessian trace is that of {names[most]}: {times}"
    plot = Plot(title, ROW * len(names), _trace_scale(traces, errors))
    plot.x_axis("Hessian trace", top=True)
    for row, (name, trace, error) in enumerate(zip(names, traces.tolist(), errors.tolist(), strict=True)):
        text, y = _with_error(trace, error), ROW * row + 28
        plot.text(shortened(name), "0", ROW * row + 14)
        plot.text(text, "100%", ROW * row + 14, "end quiet")
        shape = SHAPES[3] if above.any() and trace <= 0 else ROUND
        mark = element("path", d=shape, transform=f"translate(0 {y})", class_="mark")
        low, high = trace - error, trace + error
        caps = [plot.line(end, end, y - 4, y + 4, "whisker") for end in (low, high)]
        bars = [plot.line(low, high, y, y, "whisker"), *caps] if trace > 0 or not above.any() else []
        plot.point("w2" if shape is SHAPES[3] else "w8", f"{name}: {text}", *bars, plot.at(trace, mark))
    rows = [("Layer", "Hessian trace", "Standard error", "Weights", "Trace per weight")]
    for name, one in layers.items():
        cells = (_shown(one["trace"]), _shown(one["error"]), f"{one['parameters']:,}")
        rows.append((name, *cells, _shown(one["trace"] / one["parameters"])))
    keys = [("quiet-key", "M-7 0H7M-7-4V4M7-4V4", "standard error of the estimate")]
    keys += [("w2", SHAPES[3], "not above 0")] if above.any() and not above.all() else []
    return Chart(title, card(legend(*keys), frame(plot, "rows")), rows)


def _trace_scale(traces: Array, errors: Array) -> Scale:
    above = traces > 0
    if above.any():
        return log_scale([*traces[above].tolist(), *(traces + errors)[above].tolist()])
    low, high = float((traces - errors).min()), float((traces + errors).max())
    return Scale(low, high if high > low else low + 1.0)


def _shown(value: float) -> str:
    return f"{value:.3g}".replace("-", "−")


def _with_error(value: float, error: float) -> str:
    return f"{_shown(value)} ± {error:.2g}"


def bits_over_traces(
    layers: Mapping[str, Mapping[str, Any]], plans: Mapping[str, Mapping[str, Sequence[int]]]
) -> Chart:
    """Weight bits by layer as bars, under marks of the Hessian trace per weight (the paper's Figures 13 to 15).

    `layers` is `Sensitivity.to_dict()["layers"]`; `plans` has, by name, (weight bits, activation bits) for each
    of them. Each plan has a panel. Traces that are not above 0 have no mark.
    """
    if not layers or not plans:
        raise ConfigError("there is nothing to draw; pass Sensitivity.to_dict()['layers'] and at least one plan")
    names = list(layers)
    traces = [one["trace"] / one["parameters"] for one in layers.values()]
    widths = {name: [plan[layer][0] for layer in names] for name, plan in plans.items()}
    title = _bits_title(np.array(traces), next(iter(widths.values())), next(iter(plans)))
    most = max(bits for row in widths.values() for bits in row)
    panels = [_bits_panel(name, names, row, traces, most) for name, row in widths.items()]
    keys = [("w4", SHAPES[6], "weight bits"), ("ink", ROUND, "Hessian trace per weight, on a logarithmic axis")]
    rows: list[tuple[str, ...]] = [("Layer", "Trace per weight", *(f"Weight bits, {name}" for name in plans))]
    for place, (name, trace) in enumerate(zip(names, traces, strict=True)):
        rows.append((name, _shown(trace), *(str(row[place]) for row in widths.values())))
    return Chart(title, card(legend(*keys), element("div", *panels, class_="panels")), rows)


def _bits_panel(plan: str, names: list[str], bits: list[int], traces: list[float], most: int) -> Any:
    plot = Plot(f"{plan}: bits by layer", ROW * len(names), Scale(0, most))
    above = [trace for trace in traces if trace > 0]
    across = log_scale(above) if above else None
    for row, (name, width, trace) in enumerate(zip(names, bits, traces, strict=True)):
        y = ROW * row + 20
        plot.text(shortened(name, 30), "0", y - 6)
        plot.text(width_name(width), "100%", y - 6, "end quiet")
        shapes = [plot.bar(0, most, y, 14, "track"), plot.bar(0, width, y, 14)]
        if across is not None and trace > 0:
            mark = element("path", d=ROUND, transform=f"translate(0 {y + 7})", class_="mark over")
            shapes.append(plot.at(most * (0.03 + 0.94 * across.at(trace)), mark))
        plot.point(f"w{width}", f"{name}: {width_name(width)}, trace per weight {_shown(trace)}", *shapes)
    return element("div", element("h3", plan), frame(plot, "rows plain"))


def _bits_title(traces: Array, bits: Sequence[int], plan: str) -> str:
    """What the first plan gives the more and the less sensitive half of the layers."""
    row = np.array(bits, dtype=np.float64)[np.argsort(traces, kind="stable")]
    half = len(row) // 2
    if half == 0:
        return f"{plan}: the bits of one layer"
    return (
        f"{plan}: {row[-half:].mean():.1f} bits on average for the {half} most sensitive layers, "
        f"{row[:half].mean():.1f} for the {half} least"
    )


@dataclass(frozen=True)
class PlanPoint:
    """A plan in the figure of fronts; `setting` is its place on the page's dial, if it has one."""

    cost: float
    accuracy: float
    name: str = "another candidate"
    setting: int | None = None


@dataclass(frozen=True)
class Series:
    """One front by rising cost, and the other plans that were measured for it."""

    label: str
    front: Sequence[PlanPoint]
    others: Sequence[PlanPoint] = ()
    samples: Samples = field(kw_only=True)


def pareto_fronts(
    fronts: Sequence[Series], *, cost: str, uniform: Mapping[int, PlanPoint] | None = None, title: str = ""
) -> Chart:
    """Accuracy over cost: a line of marks for each front, faint dots for other candidates (the paper's Figure 6).

    `cost` names the axis, `uniform` has the settings of one width, drawn with their intervals as the first front is.
    """
    if not fronts or not all(one.front for one in fronts):
        raise ConfigError("there is no front to draw; each needs at least one plan")
    first, widths = fronts[0], uniform or {}
    title = title or (
        f"{counted(len(first.front), 'plan')}, from {percent(first.front[0].accuracy)} to "
        f"{percent(first.front[-1].accuracy)}"
    )
    points = [point for one in fronts for point in (*one.front, *one.others)] + list(widths.values())
    shown = [point.accuracy for point in points]
    whiskers = len(fronts) == 1  # of several fronts they would cover each other
    if whiskers:
        ends = [first.samples.interval(point.accuracy) for point in (*first.front, *widths.values())]
        shown += [end for found in ends if found for end in found]
    costs = [point.cost for point in points]
    room = 0.04 * (max(costs) - min(costs)) or 1.0
    plot = Plot(title, 280, Scale(min(costs) - room, max(costs) + room), percent_scale(shown))
    plot.y_axis("accuracy (%)", [tick for tick in plot.scale_y.ticks() if 0 <= tick <= 100])
    plot.x_axis(cost)
    keys = [_draw_front(plot, one, SERIES[number % len(SERIES)], max(costs), whiskers)
            for number, one in enumerate(fronts)]  # fmt: skip
    for bits, point in sorted(widths.items(), reverse=True):
        _draw_plan(plot, point, "open", SHAPES[bits], first.samples, whiskers)
        keys.append(("open", SHAPES[bits], f"{width_name(bits)} everywhere"))
    keys += [("ink", DOT, "other candidates")] if any(one.others for one in fronts) else []
    keys += [interval_key(str(first.samples))] if whiskers and first.samples.interval(first.front[0].accuracy) else []
    rows: list[tuple[str, ...]] = [("Front", "Plan", cost, "Accuracy", "95 % interval")]
    for one in fronts:
        for point in one.front:
            found = interval_text(one.samples.interval(point.accuracy))
            rows.append((one.label, point.name, f"{point.cost:,.4g}", percent(point.accuracy), found))
    return Chart(title, card(frame(plot), legend(*keys)), rows)


def _draw_front(plot: Plot, one: Series, bits: int, end: float, whiskers: bool) -> tuple[str, str, str]:
    """Its candidates, its steps to the end of what was tried, and its plans; the entry of the legend."""
    for point in one.others:
        tip = f"{one.label}, {point.name}: {percent(point.accuracy)}"
        dot = plot.at(point.cost, plot.shape(100 * point.accuracy, DOT))
        plot.point(f"w{bits} faint", tip, dot)
    last = PlanPoint(end, one.front[-1].accuracy)
    plot.curve([(point.cost, 100 * point.accuracy) for point in (*one.front, last)], f"w{bits}", steps=True)
    for point in one.front:
        _draw_plan(plot, point, f"w{bits}", SHAPES[bits], one.samples, whiskers, one.label)
    return f"w{bits}", SHAPES[bits], one.label


def _draw_plan(
    plot: Plot, point: PlanPoint, css: str, path: str, samples: Samples, whiskers: bool, label: str = ""
) -> None:
    found = samples.interval(point.accuracy)
    parts = [plot.whisker(100 * found[0], 100 * found[1])] if whiskers and found else []
    parts += [] if point.setting is None else [plot.ring(100 * point.accuracy)]
    tip = f"{label + ', ' if label and not whiskers else ''}{point.name}: {measured_text(point.accuracy, found)}"
    mark = plot.at(point.cost, *parts, plot.shape(100 * point.accuracy, path))
    plot.point(css, tip, mark, setting=point.setting)


def predicted_and_measured(losses: Sequence[float], accuracies: Sequence[float], spearman: float | None) -> Chart:
    """A dot for each candidate: the loss that the search predicted and the accuracy that was measured."""
    if not losses or len(losses) != len(accuracies):
        raise ConfigError("there is nothing to draw; pass as many accuracies as predicted losses, at least one")
    rank = "not defined: one of both does not vary" if spearman is None else f"{spearman:.2f}".replace("-", "−")
    title = f"Rank correlation over {counted(len(losses), 'plan')}: {rank}"
    above = [loss for loss in losses if loss > 0]
    across = log_scale(above) if above else Scale(min(losses), min(losses) + 1.0)
    ticks = [(tick, across.text(tick)) for tick in across.ticks()]
    if above and min(losses) <= 0:  # a place for 0, left of what a logarithmic axis has
        across = Scale(across.low * (across.low / across.high) ** 0.08, across.high, log=True)
        ticks = [(across.low, "0"), *ticks]
    plot = Plot(title, 240, across, percent_scale(accuracies))
    plot.y_axis("measured accuracy (%)", [tick for tick in plot.scale_y.ticks() if 0 <= tick <= 100])
    plot.x_axis("predicted loss", ticks)
    for loss, accuracy in zip(losses, accuracies, strict=True):
        mark = plot.at(loss, plot.shape(100 * accuracy, ROUND))
        plot.point("w8 faint", f"predicted loss {_shown(loss)}: {percent(accuracy)}", mark)
    rows = [("Predicted loss", "Measured accuracy")]
    rows += [(_shown(loss), percent(value)) for loss, value in sorted(zip(losses, accuracies, strict=True))]
    return Chart(title, card(frame(plot)), rows)
