"""Figures of mixed precision: sensitivities, the bits of a plan over them, and fronts of plans."""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from bitdial.errors import ConfigError
from bitdial.report.plots.drawing import (
    GREY,
    INK,
    MARKERS,
    PALETTE,
    counted,
    drawing,
    label_layers,
    limit_percent,
    log_axis,
    make_panels,
    power_of_ten,
    width_name,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Point = tuple[float, float]  # cost, accuracy (0 to 1)
SERIES = ((PALETTE[8], "o"), (PALETTE[5], "D"), (PALETTE[3], "X"), (PALETTE[7], "^"))  # colour and marker of each front


@drawing
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
    figure, (axes,) = make_panels(title, 1, height=2.6, foot=0.1 + 0.07 * max(map(len, names)))
    drawn = np.where(above, traces, np.nan) if above.any() else traces
    axes.errorbar(
        range(len(names)), drawn, errors, color=PALETTE[8], ecolor=GREY, elinewidth=5, marker="o", markersize=4
    )
    if above.any():
        log_axis(axes)
        axes.set_ylim(10 ** math.floor(math.log10(traces[above].min() / 2)), 2 * (traces + errors)[above].max())
    if above.any() and not above.all():
        foot: dict[str, Any] = {"transform": axes.get_xaxis_transform(), "markersize": 7, "label": "not above 0"}
        axes.plot(np.flatnonzero(~above), [0.04] * int((~above).sum()), "X", color=PALETTE[2], **foot)
        axes.legend(loc="upper right")
    label_layers(axes, names, bottom=True)
    axes.set_ylabel(what)
    return figure


@drawing
def bits_over_traces(
    layers: Mapping[str, Mapping[str, Any]], plans: Mapping[str, Mapping[str, Sequence[int]]]
) -> "Figure":
    """Weight bits by layer as bars, under the line of the Hessian trace per weight (the paper's Figures 13 to 15).

    `layers` is `Sensitivity.to_dict()["layers"]`; `plans` has, by name, (weight bits, activation bits) for each
    of them. Each plan has a panel. Traces that are not above 0 are left out of the line.
    """
    if not layers or not plans:
        raise ConfigError("there is nothing to draw; pass Sensitivity.to_dict()['layers'] and at least one plan")
    names = list(layers)
    traces = np.array([entry["trace"] / entry["parameters"] for entry in layers.values()], dtype=np.float64)
    widths = {name: [plan[layer][0] for layer in names] for name, plan in plans.items()}
    title = _bits_title(traces, next(iter(widths.values())), next(iter(plans)))
    foot = 0.1 + 0.07 * max(map(len, names))
    figure, panels = make_panels(title, len(plans), height=1.7, foot=foot, sharex=True, sharey=True)
    shown = sorted({bits for row in widths.values() for bits in row}, reverse=True)
    for number, (axes, (name, row)) in enumerate(zip(panels, widths.items(), strict=True)):
        fill, edge = [f"{PALETTE[bits]}60" for bits in row], [PALETTE[bits] for bits in row]
        axes.bar(range(len(names)), row, width=0.75, color=fill, edgecolor=edge)
        for x, bits in enumerate(row):
            axes.annotate(str(bits), (x, 0), (0, 4), textcoords="offset points", ha="center", fontweight="bold")
        axes.set_title(name, loc="left", fontweight="bold")
        axes.set_ylabel("weight bits")
        axes.set_yticks([0, *reversed(shown)])
        axes.set_ylim(0, max(shown) * 1.1)
        label_layers(axes, names, bottom=number + 1 == len(panels))
        _trace_line(axes, traces)
    return figure


def _bits_title(traces: "np.ndarray[Any, np.dtype[np.float64]]", bits: Sequence[int], plan: str) -> str:
    """What the first plan gives the more and the less sensitive half of the layers."""
    order = np.argsort(traces, kind="stable")
    row = np.array(bits, dtype=np.float64)[order]
    half = len(row) // 2
    if half == 0:
        return f"{plan}: the bits of one layer"
    return (
        f"{plan}: {row[-half:].mean():.1f} bits on average for the {half} most sensitive layers, "
        f"{row[:half].mean():.1f} for the {half} least"
    )


def _trace_line(axes: "Axes", traces: "np.ndarray[Any, np.dtype[np.float64]]") -> None:
    above = np.where(traces > 0, traces, np.nan)
    if np.isnan(above).all():
        return
    other = axes.twinx()
    other.plot(range(len(traces)), above, color=INK, marker="o", markersize=4, linewidth=1.2)
    log_axis(other)
    other.set_ylim(np.nanmin(above) / 3, np.nanmax(above) * 3)
    other.grid(visible=False)
    other.spines["right"].set_visible(True)
    other.set_ylabel("trace per weight")


@drawing
def pareto_fronts(
    fronts: Mapping[str, Sequence[Point]],
    *,
    cost: str,
    candidates: Mapping[str, Sequence[Point]] | None = None,
    uniform: Mapping[int, Point] | None = None,
    title: str = "",
) -> "Figure":
    """Accuracy over cost: a line of marks for each front, faint dots for other candidates (the paper's Figure 6).

    `fronts` and `candidates` have (cost, accuracy) by label, `cost` names the axis, `uniform` has the settings of one
    width. The marks of the first front are the elements `plan-0`, `plan-1`, ... of the SVG, for pages that react.
    """
    if not fronts or not all(fronts.values()):
        raise ConfigError("there is no front to draw; each needs at least one (cost, accuracy)")
    first = next(iter(fronts.values()))
    title = title or f"{counted(len(first), 'plan')}, from {100 * first[0][1]:.1f} % to {100 * first[-1][1]:.1f} %"
    figure, (axes,) = make_panels(title, 1, height=3.4)
    values = [100 * accuracy for points in fronts.values() for _, accuracy in points]
    ends = [point[0] for group in (fronts, candidates or {}) for points in group.values() for point in points]
    for number, (label, points) in enumerate(fronts.items()):
        color, marker = SERIES[number % len(SERIES)]
        if dots := (candidates or {}).get(label):
            x, y = np.array(dots, dtype=np.float64).T
            axes.plot(x, 100 * y, ".", color=color, markersize=4, alpha=0.35)
            values += (100 * y).tolist()
        x, y = np.array([*points, (max(ends), points[-1][1])], dtype=np.float64).T
        axes.plot(x, 100 * y, color=color, linewidth=1.2, drawstyle="steps-post")
        for place, (x_, y_) in enumerate(points):
            (mark,) = axes.plot([x_], [100 * y_], marker, color=color, markersize=7, linestyle="none")
            if number == 0:
                mark.set_gid(f"plan-{place}")
            if place == 0:
                mark.set_label(label)
    for bits, (x_, y_) in sorted((uniform or {}).items(), reverse=True):
        axes.plot([x_], [100 * y_], MARKERS[bits], color="none", markeredgecolor=INK, markersize=9, linestyle="none",
                  label=f"{width_name(bits)} everywhere")  # fmt: skip
        values.append(100 * y_)
    axes.set_xlabel(cost)
    axes.set_ylabel("accuracy (%)")
    limit_percent(axes, values)
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5))
    return figure


@drawing
def predicted_and_measured(losses: Sequence[float], accuracies: Sequence[float], spearman: float | None) -> "Figure":
    """A dot for each candidate: the loss that the search predicted and the accuracy that was measured."""
    if not losses or len(losses) != len(accuracies):
        raise ConfigError("there is nothing to draw; pass as many accuracies as predicted losses, at least one")
    rank = "not defined: one of both does not vary" if spearman is None else f"{spearman:.2f}".replace("-", "−")
    figure, (axes,) = make_panels(f"Rank correlation over {counted(len(losses), 'plan')}: {rank}", 1, height=2.8)
    axes.plot(losses, [100 * value for value in accuracies], "o", color=PALETTE[8], markersize=5, alpha=0.7)
    if above := [loss for loss in losses if loss > 0]:
        threshold = 10 ** math.floor(math.log10(min(above)))
        powers = [threshold * 10**step for step in range(math.ceil(math.log10(max(above) / threshold)) + 1)]
        axes.set_xscale("symlog", linthresh=threshold, linscale=0.3)  # logarithmic, with a place for 0
        ticks = [0, *powers] if min(losses) <= 0 else powers
        axes.set_xticks(ticks, [power_of_ten(tick) for tick in ticks])
        axes.minorticks_off()
    axes.set_xlabel("predicted loss")
    axes.set_ylabel("measured accuracy (%)")
    limit_percent(axes, [100 * value for value in accuracies])
    return figure
