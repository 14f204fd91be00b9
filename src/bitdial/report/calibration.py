"""The page of a calibration."""

import os
from collections.abc import Mapping
from typing import Any
from xml.etree.ElementTree import Element

from bitdial.report import charts
from bitdial.report.charts.calibration import error_text
from bitdial.report.markup import element, table
from bitdial.report.numbers import (
    Samples,
    by_bits,
    counted,
    difference,
    format_bytes,
    interval_text,
    percent,
    width_name,
)
from bitdial.report.page import details, figure, remarks, write_report

WORST = 10  # rows of the table of blocks that suffer most
LISTED = 4  # layers of a block that are named


def calibration_report(path: str | os.PathLike[str], result: Mapping[str, Any]) -> None:
    """Write the page of a calibration to `path`; `result` is what `run_calibration` gives, and its JSON file holds."""
    widths, size = by_bits(result["widths"]), result["bytes"]
    evaluation = result["evaluation"]
    samples = Samples(evaluation["count"], "images")
    blocks = result["calibration"]["blocks"]
    measured = _figures(result, widths, samples)
    if blocks:
        caption = (
            "Each row is a block of the network, and each mark in it a bit-width: how far the block's outputs are from "
            "those of the float model, as the square of the difference over the square of the outputs. A block is fed "
            "by those before it at the same bit-width, so its error holds theirs too."
        )
        measured += [figure("Error by block", caption, charts.errors_by_block(blocks)), *_worst(blocks)]
    listed = ", ".join(map(str, widths))
    write_report(
        path,
        title=f"{result['model']} at every width",
        lead=f"Calibrated once on {counted(result['images']['count'], 'image')}, without labels, and stored once, in "
        f"{result['artifact']} ({format_bytes(size['artifact'])}; float: {format_bytes(size['float'])}). "
        f"The same file runs at {listed} bits.",
        body=[
            element("h2", "Every width"),
            table("Every width", _summary(result, widths, samples)),
            *measured,
            details(_facts(result)),
            remarks(_notes(result)),
        ],
    )


def _summary(result: Mapping[str, Any], widths: Mapping[int, Any], samples: Samples) -> list[tuple[str, ...]]:
    level, size, labels = result["float"]["top1"], result["bytes"], result["evaluation"]["labels"]
    head = ("Accuracy", "95 % interval", "Difference to float") if labels else ()
    rows: list[tuple[str, ...]] = [("Setting", *head, "Agreement with float", "Bytes as a separate file")]
    first = (percent(level), interval_text(samples.interval(level)), "–") if labels else ()
    rows.append(("float", *first, "–", f"{size['float']:,}"))
    for bits, one in widths.items():
        top1 = one["top1"]
        cells = (percent(top1), interval_text(samples.interval(top1)), difference(top1, level)) if labels else ()
        separate = by_bits(size["separate"])[bits]
        rows.append((width_name(bits), *cells, percent(one["agreement"]), f"{separate:,}"))
    return rows


def _figures(result: Mapping[str, Any], widths: Mapping[int, Any], samples: Samples) -> list[Element]:
    """Accuracy by width where there are labels, and agreement with the float model."""
    found = []
    bars = "Bars are what the number of images leaves open. Mind where the axis begins."
    if result["evaluation"]["labels"]:
        top1 = {bits: one["top1"] for bits, one in widths.items()}
        chart = charts.accuracy_by_bits(result["float"]["top1"], top1, samples, dial=False)
        caption = f"Each mark is the accuracy of the file at one bit-width; the dashed line is the float model. {bars}"
        found.append(figure("Accuracy by bit-width", caption, chart))
    agreement = {bits: one["agreement"] for bits, one in widths.items()}
    caption = f"How many images get the answer that the float model gives, right or wrong. {bars}"
    found.append(figure("Agreement with the float model", caption, charts.agreement_by_bits(agreement, samples)))
    return found


def _worst(blocks: list[Mapping[str, Any]]) -> list[Element]:
    """The blocks with the largest error at the lowest width."""
    widths = list(by_bits(blocks[0]["error"]))
    low = str(widths[-1])
    known = [one for one in blocks if one["layers"] and one["error"][low] is not None]
    order = sorted(known, key=lambda one: -one["error"][low])[:WORST]
    rows: list[tuple[str, ...]] = [("Block", *(width_name(bits) for bits in widths), "Layers")]
    for one in order:
        errors = [error_text(one["error"][str(bits)]) for bits in widths]
        names = [name.removeprefix(f"{one['name']}.") for name in one["layers"]]
        more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
        rows.append((one["name"], *errors, ", ".join(names[:LISTED]) + more))
    text = f"Relative errors of outputs, the largest at {low} bits first. Those of late blocks hold what came before."
    return [element("h2", "What suffers most"), element("p", text), table("What suffers most", rows)]


def _facts(result: Mapping[str, Any]) -> dict[str, str]:
    quant, images, report = result["quant"], result["image_settings"], result["calibration"]
    mean, std = (" ".join(f"{value:g}" for value in images[key]) for key in ("mean", "std"))
    resize = "sizes stay" if images["resize"] is None else f"shorter side to {images['resize']} at most"
    kept = {True: "in float", False: "as the others"}.get(quant["keep_first_last"], f"{quant['keep_first_last']} bits")
    seconds = result["seconds"]
    return {
        "File": f"{result['artifact']}, {result['bytes']['artifact']:,} bytes",
        "Bit-widths": ", ".join(map(str, quant["bit_choices"])),
        "Scheme": quant["scheme"] + ("" if quant["group_size"] is None else f", groups of {quant['group_size']}"),
        "First and last layers": kept,
        "Images": f"{images['crop']} x {images['crop']} pixels, {resize}, {images['order']}, mean {mean}, std {std}",
        "Calibrated on": f"{counted(result['images']['count'], 'image')} of {result['images']['folder']}",
        "Measured on": f"{counted(result['evaluation']['count'], 'image')}: {result['evaluation']['which']}",
        "Effort": report["effort"] + (f": {', '.join(report['steps'])}" if report["steps"] else ""),
        "Time": f"{_duration(seconds['calibrate'])} to calibrate, {_duration(seconds['measure'])} to measure, on "
        f"{result['device']}",
    }


def _duration(seconds: float) -> str:
    """'48 s', '12 min'."""
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def _notes(result: Mapping[str, Any]) -> list[str]:
    evaluation = result["evaluation"]
    notes = [
        f"One of {counted(evaluation['count'], 'image')} is {100 / evaluation['count']:.2g} points.",
        *result["calibration"]["warnings"],
    ]
    if resumed := result["calibration"]["resumed"]:
        notes.append(f"The run went on after {counted(resumed, 'block')} of an earlier one, whose time is not counted.")
    if seen := evaluation["seen"]:
        which = "the images" if seen == evaluation["count"] else f"{counted(seen, 'image')} of those"
        notes.append(
            f"It is measured on {which} that it was calibrated on, so other images will agree less. Give others with "
            "--eval-images."
        )
    if not evaluation["labels"]:
        notes.append("There were no labels: agreement says how often answers stay, not how often they are right.")
    return notes
