"""Figures of a detector: average precision by width, and the error of its parts."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard
from xml.etree.ElementTree import Element

from bitdial.errors import ConfigError
from bitdial.report.charts.calibration import errors_by_block
from bitdial.report.charts.plot import SHAPES, Chart, Plot, Scale, card, frame, legend, percent_scale
from bitdial.report.markup import element
from bitdial.report.numbers import by_bits, width_name

WORDS = {"box": "boxes", "mask": "masks"}


def points_text(value: float | None) -> str:
    """An average precision (0 to 1) in points: '41.3', and a dash for what is no number."""
    return "–" if value is None or value != value else f"{100 * value:.1f}"


def precision_by_bits(level: Mapping[str, Any], widths: Mapping[Any, Mapping[str, Any]]) -> Chart:
    """A mark for the average precision at each width, beside the line of the float model: boxes, and masks if known.

    `level` and the values of `widths` have `box_ap` and, of detectors with masks, `mask_ap`, from 0 to 1 or None.
    """
    found = by_bits(widths)
    kinds = [kind for kind in WORDS if f"{kind}_ap" in level]
    if not kinds:
        raise ConfigError(f"there is no average precision to draw among {sorted(level)}; pass box_ap or mask_ap")
    panels = [_panel(kind, level[f"{kind}_ap"], {b: one[f"{kind}_ap"] for b, one in found.items()}) for kind in kinds]
    rows: list[tuple[str, ...]] = [("Setting", *(f"{WORDS[kind].capitalize()}, AP" for kind in kinds))]
    rows.append(("float", *(points_text(level[f"{kind}_ap"]) for kind in kinds)))
    rows += [(width_name(b), *(points_text(one[f"{kind}_ap"]) for kind in kinds)) for b, one in found.items()]
    key = legend(("float", "M-7 0H7", "float model"))
    grid = element("div", *panels, class_="panels pairs")
    return Chart(_title(kinds, level, found), card(grid, key), rows)


def errors_by_part(parts: Mapping[str, Mapping[str, float | None]]) -> Chart:
    """The error of each part's outputs at each width, on a logarithmic axis; `parts` has it by name and width."""
    blocks = [{"name": name, "error": dict(errors), "error_before": {}} for name, errors in parts.items()]
    return errors_by_block(blocks, what="part")


def _panel(kind: str, level: float | None, values: Mapping[int, float | None]) -> Element:
    known = [value for value in (level, *values.values()) if _is_number(value)]
    name = f"AP of {WORDS[kind]}"
    plot = Plot(name, 190, Scale(-0.5, len(values) - 0.5), percent_scale(known) if known else Scale(0, 1))
    plot.y_axis("AP (points)", [tick for tick in plot.scale_y.ticks() if 0 <= tick <= 100])
    plot.x_axis("setting", [(place, width_name(bits)) for place, bits in enumerate(values)])
    if _is_number(level):
        y = plot.y(100 * level)
        plot.axes.append(element("line", x2="100%", y1=y, y2=y, class_="level"))
    for place, (bits, value) in enumerate(values.items()):
        if not _is_number(value):
            continue
        text = points_text(value)
        tip = f"{width_name(bits)}: {text}"
        if _is_number(level):
            tip += f", {drop_text(value, level)} to float"
        label = element("text", text, y=plot.y(100 * value) - 10, class_="middle strong")
        plot.point(f"w{bits}", tip, plot.at(place, plot.shape(100 * value, SHAPES[bits]), label))
    return element("div", element("h3", f"{name} (float: {points_text(level)})"), frame(plot))


def drop_text(value: float | None, level: float | None) -> str:
    """'−1.3 points', or a dash where one of both is no number."""
    if not _is_number(value) or not _is_number(level):
        return "–"
    return f"{round(100 * (value - level), 1) + 0.0:+.1f} points".replace("-", "−")


def _is_number(value: float | None) -> TypeGuard[float]:
    return value is not None and value == value


def _title(kinds: Sequence[str], level: Mapping[str, Any], widths: Mapping[int, Mapping[str, Any]]) -> str:
    """What the lowest width loses."""
    low = list(widths)[-1]
    losses = [
        f"{drop_text(widths[low][f'{kind}_ap'], level[f'{kind}_ap'])} for {WORDS[kind]}"
        for kind in kinds
        if _is_number(widths[low][f"{kind}_ap"]) and _is_number(level[f"{kind}_ap"])
    ]
    return f"At {width_name(low)} the difference to float is {' and '.join(losses)}" if losses else "Average precision"
