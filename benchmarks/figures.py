"""The figures of the results page: PNG files in docs/figures, from what runs wrote to results/.

    python benchmarks/figures.py                 # needs matplotlib: pip install -e '.[dev]'
    python benchmarks/results_page.py            # links them

Convergence and scale gradients are drawn from results/history-*.json (`bitdial train cifar10-resnet20 --history FILE`),
where there are runs that differ only by ALRS; accuracies from results/cifar10-resnet20.json; fronts of mixed plans from
results/cifar10-*-mixed.json. The same files give the same figures.
"""

import math
import statistics
import sys
import textwrap
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import mixed_results
import numpy as np
import paper_numbers as paper
import result_rows
from mixed_results import MODELS
from paper_numbers import Widths
from plot_style import GREY, MARKERS, PALETTE, STYLE, WIDTH
from results_page import RESULTS, ROOT, is_plain, matches

from bitdial.errors import BitdialError, MissingDependencyError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FOLDER = ROOT / "docs" / "figures"
READINGS = ("off", "relative", "literal")  # the order of panels
LEAST = 86.0  # percent; lower accuracies stand at the edge, with their number
COMPARED = ("sampling", "transitions")  # what lines of a front may differ by
Run = dict[str, Any]  # a history file: "settings" (a result row), "layers", "rows", "gradients"


class Method(NamedTuple):
    """A line of the figure of accuracies: mean, least and largest by width, and the paper's numbers."""

    label: str
    ours: dict[int, tuple[float, float, float]]
    paper: dict[int, float]


def read_history(path: Path) -> Run:
    """The history at `path`, checked as far as figures need it."""
    run: Run = result_rows.read_json(path, {})
    missing = {"settings", "layers", "rows", "gradients"} - set(run if isinstance(run, dict) else {})
    if missing:
        raise result_rows.WrongRows(f"{path.name} is no history: it lacks {sorted(missing)}")
    return run


def compare_alrs(runs: Iterable[Run]) -> dict[str, list[Run]]:
    """By model and widths ('resnet20-8642'): runs that differ only by ALRS, without it first.

    Of several seeds the lowest; of several such sets that of Double Rounding, then that of the longest training.
    """
    sets: dict[str, dict[str, Run]] = {}
    for run in sorted(runs, key=lambda run: run["settings"]["seed"]):
        settings = result_rows.settings_of(run["settings"])
        reading = settings.pop("alrs")
        sets.setdefault(result_rows.key(settings), {}).setdefault(reading, run)
    chosen: dict[str, list[Run]] = {}
    for found in sorted(sets.values(), key=_rank):
        if len(found) > 1 and "off" in found:
            row = found["off"]["settings"]
            name = f"{row.get('model', 'resnet20')}-{''.join(map(str, row['bit_choices']))}"
            chosen.setdefault(name, [found[reading] for reading in READINGS if reading in found])
    return chosen


def _rank(found: dict[str, Run]) -> tuple[object, ...]:
    row = next(iter(found.values()))["settings"]
    return (row["scheme"] != "double_rounding", -row["epochs"], result_rows.key(result_rows.settings_of(row)))


def styled(draw: "Callable[[], Figure]", path: Path) -> None:
    """Write what `draw` draws in the style of plot_style."""
    try:
        from matplotlib import style
        from PIL import Image  # comes with matplotlib
    except ImportError as problem:
        raise MissingDependencyError.missing("dev", "matplotlib") from problem
    with style.context(["default", STYLE]):
        figure = draw()
        figure.draw_without_rendering()
        figure.set_layout_engine("none")
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, format="png", dpi=160, metadata={"Software": None})
    with Image.open(path) as image:  # a palette takes a third of the bytes
        small = image.convert("RGB").quantize(256)
    small.save(path, optimize=True)


def panels(title: str, rows: int, columns: int, height: float, **options: Any) -> "tuple[Figure, list[Axes]]":
    """A figure with a title, left-aligned, and rows x columns axes."""
    from matplotlib.figure import Figure

    figure = Figure((WIDTH, height), layout="constrained")
    figure.suptitle(textwrap.fill(title, 88), x=0.01, ha="left", fontsize=11, fontweight="bold")
    return figure, list(figure.subplots(rows, columns, squeeze=False, **options).flat)


def what(run: Run) -> str:
    """Which training a figure is about."""
    row = run["settings"]
    method = result_rows.METHODS.get(row["scheme"], row["scheme"]).replace("`", "")
    data = "CIFAR-10" if row.get("split", "test") == "test" else "CIFAR-10, held-out images"
    return f"{method}, {MODELS.get(row.get('model', 'resnet20'))}, {data}"


def reading_of(run: Run) -> str:
    """The title of a panel."""
    reading = run["settings"]["alrs"]
    return "without ALRS" if reading == "off" else f"with ALRS ({reading})"


def convergence(runs: list[Run]) -> "Figure":
    """Accuracy by epoch, a panel for each reading of ALRS and a line for each width (the paper's Figure 3c, d)."""
    key = "top1" if all(row.get("top1") for run in runs for row in run["rows"]) else "train_top1"
    kind = "accuracy" if key == "top1" else "training accuracy"
    figure, axes = panels(f"{what(runs[0])}: {kind} by epoch", 1, len(runs), 3.4, sharex=True, sharey=True)
    for ax, run in zip(axes, runs, strict=True):
        epochs = [row["epoch"] + 1 for row in run["rows"]]
        for bits in run["settings"]["bit_choices"]:
            values = [100 * row[key][str(bits)] for row in run["rows"]]
            (line,) = ax.plot(
                epochs, values, color=PALETTE[bits], linewidth=1.5, label=f"{bits} bits: {values[-1]:.1f} %"
            )
            line.set(marker=MARKERS[bits], markersize=5, markevery=[-1], clip_on=False)
        ax.set_title(reading_of(run), loc="left", fontweight="bold")
        ax.set_xlabel("epoch")
        ax.legend(loc="lower right", title="after the last epoch", alignment="left")
        ax.margins(x=0.02)
    axes[0].set_ylabel(f"{kind} (%)")
    return figure


def scale_gradients(runs: list[Run], which: str) -> "Figure":
    """The sampled peaks of scale gradients by layer and width, a panel for each reading of ALRS.

    Medians, quartiles (thick) and the 5th to the 95th percentile (thin); samples that are 0 are left out.
    """
    names = runs[0]["layers"]
    kind = {"weight": "weight", "act": "activation"}[which]
    title = f"{what(runs[0])}: largest gradient of the {kind} scale by layer"
    figure, axes = panels(title, len(runs), 1, 1.2 + 2.4 * len(runs), sharex=True, sharey=True)
    for ax, run in zip(axes, runs, strict=True):
        widths = run["settings"]["bit_choices"]
        for number, bits in enumerate(widths):
            samples = np.array([sample[which] for sample in run["gradients"][str(bits)]], dtype=np.float64)
            samples[~(samples > 0)] = np.nan
            kept = [i for i in range(len(names)) if np.isfinite(samples[:, i]).any()]
            x = np.array(kept) + (number - (len(widths) - 1) / 2) * 0.8 / len(widths)
            low, left, middle, right, high = np.nanpercentile(samples[:, kept], (5, 25, 50, 75, 95), axis=0)
            ax.vlines(x, low, high, color=PALETTE[bits], linewidth=0.9)
            ax.vlines(x, left, right, color=PALETTE[bits], linewidth=4, alpha=0.4)
            ax.plot(x, middle, MARKERS[bits], color=PALETTE[bits], markersize=4.5, label=f"{bits} bits")
        ax.set_yscale("log")
        ax.set_title(reading_of(run), loc="left", fontweight="bold")
        ax.set_ylabel("|gradient| of the scale")
        for edge in range(1, len(names)):
            ax.axvline(edge - 0.5, color=STYLE["grid.color"], linewidth=0.6)
        ax.tick_params(axis="x", length=0)
    powers(axes[0])
    axes[0].legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=8, borderaxespad=0.2, columnspacing=1.2)
    axes[-1].set_xlim(-0.6, len(names) - 0.4)
    axes[-1].set_xticks(range(len(names)), names, rotation=90, fontsize=8)
    return figure


def powers(ax: "Axes") -> None:
    """Label a logarithmic y axis with whole powers of ten, as plain text."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    raised = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
    ax.yaxis.set_major_locator(LogLocator(numticks=8))
    ax.yaxis.set_minor_locator(NullLocator())
    ax.yaxis.set_major_formatter(FuncFormatter(lambda v, _: "10" + f"{math.log10(v):.0f}".translate(raised)))


def methods_of(groups: list[result_rows.Group], widths: Widths) -> list[Method]:
    """The lines of one set of widths: ours, each with the paper's if it is the first that it matches; then the rest.

    Runs of the usual length only.
    """
    lines = [line for line in paper.RESNET20 if line.widths == widths]
    usual = {name: statistics.mode(one.get(name) for one in groups) for name in ("lr", "epochs")}
    found = []
    shown = [one for one in groups if one.widths == widths and one.get("epochs") == usual["epochs"]]
    for one in [one for one in shown if one.kind() != "ablation"]:
        line = next((line for line in lines if matches(one, line)), None)
        lines = [other for other in lines if other is not line]
        found.append(Method(label(one, usual), spread([one]), line.by_bits() if line else {}))
    found += [Method(f"{line.method}, ALRS {'on' if line.alrs else 'off'}", {}, line.by_bits()) for line in lines]
    alone = [one for one in groups if one.widths[1:] == () and one.widths[0] in widths and is_plain(one)]
    alone = [one for one in alone if one.get("scheme") == "lsq" and one.get("epochs") == usual["epochs"]]
    return [*found, Method("one LSQ model per width", spread(alone), {})] if alone else found


def spread(groups: list[result_rows.Group]) -> dict[int, tuple[float, float, float]]:
    """Mean, least and largest accuracy by width."""
    values = {b: [row["top1"][str(b)] for row in one.runs] for one in groups for b in one.widths}
    return {bits: (statistics.fmean(found), min(found), max(found)) for bits, found in values.items()}


def label(one: result_rows.Group, usual: dict[str, Any]) -> str:
    """A method in words; the learning rate where it is not as `usual`."""
    cells = result_rows.our_cells(one)
    parts = [cells["method"].replace("`", "")]
    parts += [f"ALRS {cells['ALRS']}"] if cells["ALRS"] else []
    parts += [f"KD {cells['kd']}"] if one.get("kd") != "none" else []
    parts += [f"lr {cells['lr']}"] if one.get("lr") != usual["lr"] else []
    return ", ".join(parts)


def accuracies(methods: list[Method], widths: Widths) -> "Figure":
    """A line for each method, a marker for each width: ours filled, with the range over seeds; the paper's hollow."""
    title = f"ResNet20, CIFAR-10: accuracy by method, widths {', '.join(map(str, widths))}"
    labels = [textwrap.fill(method.label, 48) for method in methods]
    figure, (ax,) = panels(title, 1, 1, 1.3 + 0.3 * len(methods) + 0.1 * sum("\n" in text for text in labels))
    for row, method in enumerate(methods):
        above, below = (row - 0.15, row + 0.2) if method.ours and method.paper else (row, row)
        for bits in reversed(widths):
            if bits in method.ours:
                value, least, most = method.ours[bits]
                ax.hlines(above, max(least, LEAST), max(most, LEAST), color=PALETTE[bits], linewidth=1.4)
                mark(ax, value, above, bits, markersize=6.5, markeredgecolor="white", markeredgewidth=0.6)
            if bits in method.paper:
                mark(ax, method.paper[bits], below, bits, markersize=5, fillstyle="none")
    shown = [v for m in methods for v in (*m.paper.values(), *(x for x, _, _ in m.ours.values())) if v >= LEAST]
    ax.set_xlim(LEAST - 0.2, max([*shown, LEAST + 1]) + 0.3)
    ax.set_ylim(len(methods) - 0.4, -0.6)
    ax.set_yticks(range(len(methods)), labels)
    ax.tick_params(axis="y", length=0)
    ax.grid(visible=False, axis="y")
    ax.grid(visible=True, axis="x")
    for edge in range(1, len(methods)):
        ax.axhline(edge - 0.5, color=STYLE["grid.color"], linewidth=0.6)
    ax.set_xlabel("test accuracy (%)")
    for bits in widths:
        ax.plot([], [], MARKERS[bits], color=PALETTE[bits], markersize=6.5, label=f"{bits} bits")
    ax.plot([], [], "o", color=GREY, fillstyle="none", markersize=5, label="paper")
    figure.legend(*ax.get_legend_handles_labels(), loc="outside lower left", ncols=len(widths) + 1)
    return figure


def mark(ax: "Axes", value: float, y: float, bits: int, **style: Any) -> None:
    """A marker; at the left edge with its number if the value lies beyond."""
    ax.plot([max(value, LEAST)], [y], MARKERS[bits], color=PALETTE[bits], zorder=3, **style)
    if value < LEAST:
        ax.annotate(f"← {value:.1f}", (LEAST, y), (6, 0), textcoords="offset points", va="center", fontsize=8)


def comparable(groups: list[mixed_results.Runs]) -> dict[str, list[mixed_results.Runs]]:
    """By model and widths: the runs on the test set that differ from the first, plainest ones only by COMPARED."""
    found: dict[str, list[mixed_results.Runs]] = {}

    def rest(one: mixed_results.Runs) -> dict[str, Any]:
        return {name: value for name, value in one.settings.items() if name not in COMPARED}

    for one in (one for one in groups if one.get("split") == "test"):
        same = found.setdefault(f"{one.get('model')}-{''.join(map(str, one.widths))}", [])
        if not same or rest(one) == rest(same[0]):
            same.append(one)
    return found


def fronts(groups: list[mixed_results.Runs]) -> "Figure":
    """The best accuracy within a budget, a line for each group with the range over seeds; the start's widths."""
    first, shared = groups[0], mixed_results.shared_settings(groups)
    widths = ", ".join(map(str, first.widths))
    figure, (ax,) = panels(f"{MODELS[first.get('model')]}, CIFAR-10: searched plans of widths {widths}", 1, 1, 3.6)
    for number, one in enumerate(groups):
        common = set.intersection(*({budget for budget, _ in run.front()} for run in one.runs))
        values = [[value for budget, value in run.front() if budget in common] for run in one.runs]
        color, marker = ((PALETTE[8], "o"), (PALETTE[5], "D"), (PALETTE[3], "s"))[number % 3]
        low, high = np.min(values, axis=0), np.max(values, axis=0)
        ax.fill_between(sorted(common), low, high, color=color, alpha=0.15, linewidth=0)
        ax.plot(
            sorted(common), np.mean(values, axis=0), marker=marker, markersize=4.5, color=color, label=one.label(shared)
        )
    for bits in first.widths:
        start = statistics.fmean(run.start(bits) for run in first.runs)
        ax.plot([bits], [start], MARKERS[bits], color=GREY, fillstyle="none", markersize=8, label=f"start, {bits} bits")
    ax.set_xlabel("average bits of a weight, at most")
    ax.set_ylabel("test accuracy (%)")
    ax.legend(loc="lower right")
    return figure


def main() -> int:
    """Draw every figure that there is data for; returns the exit code."""
    try:
        runs = [read_history(path) for path in sorted(RESULTS.glob("history-*.json"))]
        groups = result_rows.group(result_rows.read_rows(RESULTS / "cifar10-resnet20.json"))
        mixed = [row for name in mixed_results.FILES for row in mixed_results.read_rows(RESULTS / name)]
        tested = [one for one in groups if one.get("split") == "test"]
        draw_all(compare_alrs(runs), tested, comparable(mixed_results.group(mixed)))
    except (BitdialError, result_rows.WrongRows) as problem:
        print(problem, file=sys.stderr)
        return 1
    return 0


def draw_all(
    pairs: dict[str, list[Run]], groups: list[result_rows.Group], mixed: dict[str, list[mixed_results.Runs]]
) -> None:
    """Write the figures, and say which."""
    figures: dict[str, Callable[[], Figure]] = {}
    for name, runs in pairs.items():
        figures[f"convergence-{name}"] = partial(convergence, runs)
        for which in ("weight", "act"):
            figures[f"scale-gradients-{which}-{name}"] = partial(scale_gradients, runs, which)
    for widths in sorted({one.widths for one in groups if len(one.widths) > 1}, reverse=True):
        drawing = partial(accuracies, methods_of(groups, widths), widths)
        figures[f"accuracy-resnet20-{''.join(map(str, widths))}"] = drawing
    for name, found in mixed.items():
        figures[f"front-{name}"] = partial(fronts, found)
    for name, draw in figures.items():
        FOLDER.mkdir(parents=True, exist_ok=True)
        styled(draw, FOLDER / f"{name}.png")
        print(f"Wrote docs/figures/{name}.png")
    if not figures:
        print("Nothing to draw: no histories of runs that differ only by ALRS, and no results on the test set")


if __name__ == "__main__":
    sys.exit(main())
