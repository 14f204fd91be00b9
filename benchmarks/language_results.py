"""The section of the results page on language models: perplexity by width, one line for each file."""

from collections.abc import Iterable
from typing import Any

from result_rows import Cells, table

Row = dict[str, Any]
FILE = "smollm2-135m.json"
APART = ("method", "weights", "group_size", "activations", "rotated", "tokens", "seed", "float_perplexity", "device")
WEIGHED = {"importance": "", "scale_importance": " for scales"}
TEXT = """## Language models

SmolLM2-135M-Instruct; its float weights are a Q4_1 file read as float32. Each line is one file for all its widths, in
groups of inputs that share a scale. Perplexity on English Wikipedia, of text that nothing was calibrated or trained on;
in brackets, how many times the float model's it is. "float" activations: weights only. "tokens" is what was calibrated
or trained on. Rows: `results/smollm2-135m.json`, by `python benchmarks/perplexity.py` and `bitdial train llm`.
"""


def section(rows: Iterable[Row]) -> str:
    """The table; nothing if there are no rows."""
    files: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        files.setdefault(
            (*map(row.get, APART), *row["bit_choices"], *(str(row.get(name)) for name in WEIGHED)), []
        ).append(row)
    if not files:
        return ""
    widths = sorted({row["bits"] for some in files.values() for row in some}, reverse=True)
    head = ["method", "weights", "activations", "tokens", "float", *(f"{bits} bits" for bits in widths), "s", "device"]
    order = sorted(files.values(), key=lambda some: (some[0]["activations"], some[0]["tokens"]))
    return f"{TEXT}\n{table(head, map(_cells, order))}"


def _cells(rows: list[Row]) -> Cells:
    first = rows[0]
    weighed = ", ".join(
        f"{bits} bits count {value:g}{where}"
        for name, where in WEIGHED.items()
        for bits, value in (first.get(name) or {}).items()
    )
    by_width = {
        f"{row['bits']} bits": f"{row['perplexity']:.2f} ({row['perplexity'] / row['float_perplexity']:.3f})"
        for row in rows
    }
    return {
        "method": first["method"]
        + (f" ({weighed})" if weighed else "")
        + (f", rotated {how}" if (how := first.get("rotated")) else ""),
        "weights": f"`{first['weights']}`" + (f", groups of {size}" if (size := first["group_size"]) else ""),
        "activations": {"auto": "static"}.get(first["activations"], first["activations"]),
        "tokens": f"{first['tokens']:,}",
        "float": f"{first['float_perplexity']:.2f}",
        **by_width,
        "s": "" if first["seconds"] is None else f"{first['seconds']:.0f}",
        "device": first["device"] or "cpu",
    }
