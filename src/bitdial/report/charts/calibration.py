"""Figures of a calibration: agreement with the float model by width, and the error of each block."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from bitdial.errors import ConfigError
from bitdial.report.charts.plot import SHAPES, Chart, Plot, Scale, card, frame, legend, log_scale
from bitdial.report.charts.widths import Mark, shares_by_setting
from bitdial.report.markup import element
from bitdial.report.numbers import Samples, by_bits, percent, shortened, width_name

LINE = 13  # pixels for a width in the row of a block


def agreement_by_bits(agreement: Mapping[Any, float], samples: Samples) -> Chart:
    """A mark for the share of images (0 to 1) with the float model's answer at each width, with its interval."""
    widths = by_bits(agreement)
    worst = min(widths, key=lambda bits: widths[bits])
    title = f"At {width_name(worst)} the answer is the float model's for {percent(widths[worst])} of the images"
    marks = [Mark(width_name(bits), value, f"w{bits}", SHAPES[bits]) for bits, value in widths.items()]
    return shares_by_setting(title, ("agreement", "equal"), marks, samples)


def errors_by_block(blocks: Sequence[Mapping[str, Any]], *, what: str = "block") -> Chart:
    """The error of each block's outputs at each width, after calibration and before, on a logarithmic axis.

    A block has `name`, and `error` and `error_before` by width, where None stands for what is no number;
    `error_before` may be empty. `what` is the word for a block.
    """
    if not blocks:
        raise ConfigError(f"there is no {what} to draw; pass the {what}s of the model")
    widths = list(by_bits(blocks[0]["error"]))
    drawn = [value for one in blocks for key in ("error", "error_before") for value in one[key].values()]
    above = [value for value in drawn if value is not None and value > 0]
    title = _title(blocks, widths[-1])
    pitch = 30 + LINE * len(widths)
    plot = Plot(title, pitch * len(blocks), log_scale(above) if above else Scale(0, 1))
    plot.x_axis(f"relative error of the {what}'s outputs", top=True)
    for row, one in enumerate(blocks):
        plot.text(shortened(one["name"]), "0", pitch * row + 16)
        for place, bits in enumerate(widths):
            _draw(plot, one, bits, pitch * row + 28 + LINE * place)
    keys = [(f"w{bits}", SHAPES[bits], width_name(bits)) for bits in widths]
    before = any(one["error_before"] for one in blocks)
    keys += [("quiet-key", "M-7 0H7M7-4V4", "from where it was before its weights were learned")] if before else []
    columns = {"error_before": ", before", "error": ", calibrated"} if before else {"error": ""}
    rows: list[tuple[str, ...]] = [
        (what.capitalize(), *(f"{width_name(b)}{text}" for b in widths for text in columns.values()))
    ]
    for one in blocks:
        rows.append((one["name"], *(error_text(one[key].get(str(b))) for b in widths for key in columns)))
    return Chart(title, card(legend(*keys), frame(plot, "rows")), rows)


def error_text(value: float | None) -> str:
    """An error to read: three digits, and a dash for what is no number."""
    return "–" if value is None else f"{value:.3g}"


def _draw(plot: Plot, block: Mapping[str, Any], bits: int, y: float) -> None:
    after, before = block["error"][str(bits)], block["error_before"].get(str(bits))
    if after is None:
        return
    tip = f"{block['name']}, {width_name(bits)}: {error_text(after)}"
    shapes = []
    if before is not None:
        tip += f", before {error_text(before)}"
        shapes = [plot.line(min(before, after), max(before, after), y, y, "whisker")]
        shapes.append(plot.line(before, before, y - 4, y + 4, "whisker"))
    mark = element("path", d=SHAPES[bits], transform=f"translate(0 {y})", class_="mark")
    plot.point(f"w{bits}", tip, *shapes, plot.at(after, mark))


def _title(blocks: Sequence[Mapping[str, Any]], bits: int) -> str:
    """What calibration did to the errors at the lowest width, all blocks together."""
    pairs = [(one["error_before"].get(str(bits)), one["error"][str(bits)]) for one in blocks]
    ratios = [math.log(after / before) for before, after in pairs if before and after]
    if not ratios:
        worst = max(blocks, key=lambda one: one["error"][str(bits)] or 0)
        value = error_text(worst["error"][str(bits)])
        return f"At {width_name(bits)} the largest error is that of {worst['name']}: {value}"
    times = math.exp(sum(ratios) / len(ratios))
    if times > 0.99:
        return f"At {width_name(bits)} calibration leaves the errors of the blocks as they are, on average"
    return f"At {width_name(bits)} calibration brings the errors of the blocks to {percent(times)}, on average"
