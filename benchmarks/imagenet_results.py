"""The section of the results page on pretrained ImageNet models: calibrated widths, and mixed plans."""

import json
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from result_rows import Cells, table

Row = dict[str, Any]
CALIBRATED, MIXED, AGREEMENT = "imagenet-calibrated.json", "imagenet-mixed.json", "imagenet-agreement.json"
EFFORTS = {"none": "round to nearest", "quick": "quick", "medium": "medium", "full": "full"}
TEXT = """## Pretrained on ImageNet, calibrated

Published weights, one file for all widths, no labels and no training pipeline: `calibrate` on other images of the same
classes, first and last layers at 8 bits, weights and activations at the same width. Top-1 in percent on 2,000 images of
the validation set; in brackets the difference to the float model. The standard error of one accuracy is near 1 point;
models are compared on the same images. "agreement" is for how many images the answer is the float model's. Rows:
`results/imagenet-calibrated.json`, by `python benchmarks/imagenet_calibrated.py`.
"""
MIXED_TEXT = """### Mixed plans at the bytes of uniform 4 bits

Weights of 8, 6, 4, 3 or 2 bits by layer, activations of 8 bits, as many bytes as 4 bits for all weights but those of
the first and last layer, which have 8 in the uniform plan and any width in the others. "measured" is
`measured_search` on calibration images, "hessian" the search by Hessian traces, "random" the mean over random plans of
the same bytes. "p" is McNemar's exact test against the uniform plan, on the same images. Rows:
`results/imagenet-mixed.json`, by `python benchmarks/imagenet_mixed.py`.
"""
AGREEMENT_TEXT = """### One calibrated file on every engine

Top-1 on the same images by float kernels, by integer kernels, and by onnxruntime from the exported file. "same class"
is for how many images the answer is that of integer kernels; "exact" says that their logits are those of `code_exact`,
bit for bit, on the first images. Rows: `results/imagenet-agreement.json`, by `python benchmarks/imagenet_agreement.py`.
"""


def read_rows(path: Path) -> list[Row]:
    """The rows of a file; none if it is not there."""
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else []


def section(rows: Iterable[Row], mixed: Iterable[Row], agreement: Iterable[Row] = ()) -> str:
    """All tables that have rows."""
    made = ((TEXT, _calibrated, rows), (AGREEMENT_TEXT, _agreement, agreement), (MIXED_TEXT, _mixed, mixed))
    return "\n".join(f"{text}\n{make(found)}" for text, make, given in made if (found := list(given)))


def _calibrated(rows: list[Row]) -> str:
    widths = sorted({int(bits) for row in rows for bits in row["top1"]}, reverse=True)
    head = ["model", "scheme", "effort", "images", "float", *(f"{b} bits" for b in widths), "agreement", "s", "device"]
    order = sorted(
        rows, key=lambda row: (row["model"], row["scheme"], row["apart"], list(EFFORTS).index(row["effort"]))
    )
    return table(head, (_cells(row) for row in order))


def _cells(row: Row) -> Cells:
    effort = EFFORTS[row["effort"]] + (f", {row['iterations']} iterations" if row["iterations"] else "")
    by_width = {f"{bits} bits": f"{top1:.2f} ({top1 - row['float_top1']:+.2f})" for bits, top1 in row["top1"].items()}
    return {
        "model": row["model"],
        "scheme": f"`{row['scheme']}`"
        + (f", {a}-bit activations" if (a := row.get("activation_bits")) else "")
        + (f", groups of {row['group_size']}" if row["group_size"] else ""),
        "effort": effort + (", a file per width" if row["apart"] else ""),
        "images": f"{row['images']:,}",
        "float": f"{row['float_top1']:.2f}",
        **by_width,
        "agreement": " / ".join(f"{value:.1f}" for value in row["agreement"].values()),
        "s": f"{row['seconds']:.0f}" + (" (other work beside it)" if row.get("busy") else ""),
        "device": row["device"] + (f", {row['threads']} threads" if row["device"] == "cpu" else ""),
    }


def _agreement(rows: list[Row]) -> str:
    engines = {"float": "float kernels", "integer": "integer kernels", "onnxruntime": "onnxruntime"}
    same = {name: f"same class, {engines[name]}" for name in ("float", "onnxruntime")}
    head = ["model", "bits", "images", *engines.values(), "exact", *same.values()]
    return table(
        head,
        (
            {
                "model": row["model"],
                "bits": str(row["bits"]),
                "images": f"{row['images']:,}",
                **{title: f"{row['top1'][name]:.2f}" for name, title in engines.items()},
                "exact": "yes" if row["integer_is_exact"] else "no",
                **{title: f"{row['same_class'][name]:.2f}" for name, title in same.items()},
            }
            for row in rows
        ),
    )


def _mixed(rows: list[Row]) -> str:
    head = ["model", "effort", "method", "MB", "float", "uniform", "plan", "p", "images to search", "s"]
    groups: dict[tuple[str, str, str], list[Row]] = {}
    for row in sorted(rows, key=lambda row: (row["model"], row["effort"], row["method"])):
        groups.setdefault((row["model"], row["effort"], row["method"]), []).append(row)
    return table(head, (_plan_cells(runs) for runs in groups.values()))


def _plan_cells(runs: list[Row]) -> Cells:
    """One plan, or the mean over several."""
    first, several = runs[0], len(runs) > 1
    mean = statistics.mean(row["top1"] for row in runs)
    return {
        "model": first["model"],
        "effort": EFFORTS.get(first["effort"], first["effort"]),
        "method": first["method"] + (f", mean of {len(runs)}" if several else ""),
        "MB": f"{statistics.mean(row['bytes'] for row in runs) / 1e6:.2f}",
        "float": f"{first['float_top1']:.2f}",
        "uniform": f"{first['uniform_top1']:.2f}",
        "plan": f"{mean:.2f}",
        "p": "" if several else f"{first['p_value']:.1g}",
        "images to search": str(first.get("samples", "")),
        "s": f"{statistics.mean(row['seconds'] for row in runs):.0f}",
    }
