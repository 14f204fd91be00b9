"""The page of benchmarks/gallery.py, docs/gallery.md: a table of its rows, and below it what stays float and why."""

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
ROWS, PAGE = ROOT / "results" / "gallery.json", ROOT / "docs" / "gallery.md"
BEGIN, END = "<!-- rows: written by benchmarks/gallery.py -->", "<!-- end of rows -->"
LONGEST = 300  # characters of a message
Row = dict[str, Any]


def reasons(row: Row) -> list[str]:
    """What stays float and why, and what could not be done."""
    found = [f"in float: {reason}" for reason in row.get("float_layers") or {}]
    if row.get("norms", 0) > row.get("switched_norms", 0):
        found.append("batch norms that are the same at all widths")
    for problem in row["problems"]:
        how = "refused" if "refused" in problem else "crashed"
        found.append(f"{problem['step']} {how}: {problem[how][:LONGEST]}")
    return found


def note(row: Row) -> str:
    """The reasons in one line."""
    return "; ".join(reasons(row))


def line(row: Row) -> str:
    """One row for the terminal."""
    cells = " ".join(f"{cell:10}" for cell in _cells(row)[2:])
    return f"{row['model']:24} {row['source']:20} {cells} {row.get('seconds')} s\n    {row['note']}"


def page(record: dict[str, Any], text: str) -> str:
    """`text` with the rows of `record` between its markers."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{_made_by(record)}\n{_table(record['rows'])}\n{_notes(record['rows'])}\n{END}{after}"


def write(record: dict[str, Any]) -> None:
    """Put the rows into the page."""
    PAGE.write_text(page(record, PAGE.read_text(encoding="utf-8")), encoding="utf-8")


def current() -> str:
    """The page as the committed rows make it."""
    return page(json.loads(ROWS.read_text(encoding="utf-8")), PAGE.read_text(encoding="utf-8"))


def _made_by(record: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    widths = ", ".join(map(str, record["bit_choices"]))
    passed = sum(row["trained_equals_live"] is True for row in record["rows"])
    return (
        f"{len(record['rows'])} models, {passed} of them through training, file and live model, bit for bit. "
        f"Repeat it by `{record['command']}`, seed {record['seed']}, widths {widths}, "
        f"{record['device']}; {versions}.\n"
    )


def _table(rows: list[Row]) -> str:
    head = "| model | from | integers | trained = live | integer kernels | ONNX | code-exact |\n"
    return head + 7 * "|---" + "|\n" + "".join(f"| {' | '.join(_cells(row))} |\n" for row in rows)


def _cells(row: Row) -> list[str]:
    share = row["quantised_share"]
    return [
        row["model"], row["source"], "" if share is None else f"{100 * share:.0f} %",
        _answer(row["trained_equals_live"]), _answer(row.get("integer_equals_exact")),
        _number(row["onnx_max_difference"]), _number(row.get("exact_difference")),
    ]  # fmt: skip


def _answer(value: bool | None) -> str:
    return {True: "equal", False: "**differ**", None: ""}[value]


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.1e}" if value else "0"


def _notes(rows: list[Row]) -> str:
    """Each reason once, with the models that it is of."""
    models: dict[str, list[str]] = {}
    for row in rows:
        for reason in reasons(row):
            models.setdefault(reason, []).append(row["model"])
    lines = [f"| {reason.replace('|', '/')} | {_named(found, len(rows))} |\n" for reason, found in models.items()]
    return "| what, and why | models |\n|---|---|\n" + "".join(lines)


def _named(models: list[str], count: int) -> str:
    return f"{len(models)} of {count}" if len(models) > 8 else ", ".join(models)
