"""The page of a detector: pictures at every width beside the float model's, average precision, error by part."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from xml.etree.ElementTree import Element

from bitdial.report import charts
from bitdial.report.charts.calibration import error_text
from bitdial.report.charts.detection import drop_text, points_text
from bitdial.report.markup import element, table
from bitdial.report.numbers import by_bits, counted, format_bytes, width_name
from bitdial.report.page import details, figure, remarks, write_report
from bitdial.report.pictures import ADDED, BOTH, MISSED, SHOWN, Panel

AP_NAMES = {"box_ap": "Box AP", "box_ap50": "Box AP50", "mask_ap": "Mask AP", "mask_ap50": "Mask AP50"}


@dataclass(frozen=True)
class Shots:
    """One image: its name, how many objects it has, and a picture for each setting, the float model's first."""

    name: str
    objects: int
    panels: Sequence[Panel]


def detection_report(path: str | os.PathLike[str], result: Mapping[str, Any], shots: Sequence[Shots] = ()) -> None:
    """Write the page of a detector to `path`; `result` is what the recipe writes as JSON, `shots` are its pictures."""
    widths, size, data = by_bits(result["widths"]), result["bytes"], result["data"]
    how = "Trained jointly" if result["method"] == "trained" else "Calibrated without labels"
    write_report(
        path,
        title=f"{result['model']} at every width",
        lead=f"{how} and stored once, in {result['artifact']} ({format_bytes(size['artifact'])}; float: "
        f"{format_bytes(size['float'])}). The same file runs at {', '.join(map(str, widths))} bits.",
        body=[
            element("h2", "Every width"),
            table("Every width", _summary(result, widths)),
            *_pictures(shots),
            *_figures(result, widths),
            details(_facts(result)),
            remarks(_notes(result, data)),
        ],
    )


def _summary(result: Mapping[str, Any], widths: Mapping[int, Any]) -> list[tuple[str, ...]]:
    level, separate = result["float"], by_bits(result["bytes"]["separate"])
    kinds = [kind for kind in ("box", "mask") if f"{kind}_ap" in level]
    head = [
        text for kind in kinds for text in (AP_NAMES[f"{kind}_ap"], "Difference to float", AP_NAMES[f"{kind}_ap50"])
    ]
    rows: list[tuple[str, ...]] = [("Setting", *head, "Bytes as a separate file")]
    whole = [text for k in kinds for text in (points_text(level[f"{k}_ap"]), "–", points_text(level[f"{k}_ap50"]))]
    rows.append(("float", *whole, f"{result['bytes']['float']:,}"))
    for bits, one in widths.items():
        cells = []
        for kind in kinds:
            value = one[f"{kind}_ap"]
            cells += [points_text(value), drop_text(value, level[f"{kind}_ap"]), points_text(one[f"{kind}_ap50"])]
        rows.append((width_name(bits), *cells, f"{separate[bits]:,}"))
    return rows


def _pictures(shots: Sequence[Shots]) -> list[Element]:
    """The pictures of each image in a grid, and what the colours mean."""
    if not shots:
        return []
    words = (
        (BOTH, "found by the float model too"),
        (ADDED, "not found by the float model"),
        (MISSED, "found by the float model alone"),
    )
    key = element("ul", *(element("li", _swatch(colour), text) for colour, text in words), class_="legend")
    text = (
        f"What is found with a score of at least {SHOWN:g}, as boxes and masks. Two objects are the same where their "
        "boxes have an IoU of at least a half."
    )
    grids = [
        part for one in shots for part in (element("h3", f"{one.name}, {counted(one.objects, 'object')}"), _grid(one))
    ]
    return [element("section", element("h2", "The same image at every width"), element("p", text), key, *grids)]


def _grid(one: Shots) -> Element:
    figures = []
    for panel in one.panels:
        words = f"{panel.name}: {counted(panel.found, 'object')}"
        if panel.added or panel.missed:
            words += f", {panel.added} added, {panel.missed} missed"
        picture = element("img", src=panel.uri, alt=f"{one.name}, {words}")
        figures.append(element("figure", picture, element("figcaption", words)))
    return element("div", *figures, class_="shots card")


def _swatch(colour: tuple[int, int, int]) -> Element:
    return element("span", class_="swatch", style=f"background: rgb{colour}", aria_hidden="true")


def _figures(result: Mapping[str, Any], widths: Mapping[int, Any]) -> list[Element]:
    text = (
        "COCO's average precision: the mean over IoU thresholds from 0.50 to 0.95. The dashed line is the float model. "
        "Mind where the axes begin."
    )
    found = [figure("Average precision by bit-width", text, charts.precision_by_bits(result["float"], widths))]
    parts = {name: errors for name, errors in result["parts"].items() if any(v is not None for v in errors.values())}
    moved = "Training moves the weights, too, which is part of it. " if result["method"] == "trained" else ""
    if parts:
        caption = (
            "Each row is a part of the detector, and each mark in it a bit-width: how far the part's outputs are from "
            "the float model's, as the square of the difference over the square of the outputs. Every part is given "
            f"what the float model gives it, so its error is its own. {moved}"
            f"On {counted(result['compared_on'], 'image')}."
        )
        found.append(figure("Error by part", caption, charts.errors_by_part(parts)))
    return found


def _facts(result: Mapping[str, Any]) -> dict[str, str]:
    settings, data, size = result["settings"], result["data"], result["bytes"]
    trained = result["method"] == "trained"
    epochs = f"{settings['float_epochs']} epochs in float" + (f", {settings['epochs']} jointly" if trained else "")
    return {
        "File": f"{result['artifact']}, {size['artifact']:,} bytes",
        "Bit-widths": ", ".join(map(str, settings["bit_choices"])),
        "Scheme": settings["scheme"],
        "Training": f"{counted(settings['images'], 'image')}, {epochs}, seed {settings['seed']}",
        "Measured on": f"{counted(data['images'], 'image')} of {data['folder']}, split {data['split']}, with "
        f"{counted(data['objects'], 'object')}",
        "Time": f"{result['seconds'] / 60:.1f} min for all widths, on {result['device']}",
        **({"Command": result["command"]} if result["command"] else {}),
    }


def _notes(result: Mapping[str, Any], data: Mapping[str, Any]) -> list[str]:
    most = result["settings"]["max_detections"]
    notes = [f"Up to {most} objects of an image count. COCO's own limit is 100."]
    if data["images"] < 50:
        notes.append(f"{counted(data['images'], 'image')} are few: another few would give other numbers.")
    low = [name for name, errors in result["parts"].items() if all(value is None for value in errors.values())]
    if low:
        notes.append(f"No error is known of {', '.join(low)}: the float model did not call it.")
    worst = _worst(result["parts"])
    return notes if worst is None else [*notes, worst]


def _worst(parts: Mapping[str, Mapping[str, float | None]]) -> str | None:
    """Which part suffers most at the lowest width."""
    if not parts:
        return None
    bits = list(by_bits(next(iter(parts.values()))))[-1]
    errors = {name: value for name, one in parts.items() if (value := one[str(bits)]) is not None}
    if not errors:
        return None
    name = max(errors, key=lambda one: errors[one])
    return f"At {width_name(bits)} the {name} has the largest error of its own: {error_text(errors[name])}."
