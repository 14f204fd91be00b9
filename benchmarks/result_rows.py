"""Result rows of the CIFAR-10 recipes: read, checked, grouped by their settings, and written as cells of tables."""

import json
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paper_numbers import PaperLine, Widths

Row = dict[str, Any]
Cells = dict[str, str]

# Every field of a row that is not listed here is a setting, so a new setting keeps runs apart without a change here.
OUTCOMES = {"float_top1", "top1", "epoch_seconds", "stored_bits", "device", "versions", "command"}
NOT_SETTINGS = OUTCOMES | {"seed", "stopped", "runs_at_once", "teacher_top1"}
NEEDED = OUTCOMES | {"seed", "scheme", "alrs", "kd", "bit_choices", "epochs"}
# A field with this value says the same as no field.
DEFAULTS = {"model": "resnet20", "split": "test", "kd": "none", "start": "mse", "learn_scales": True}
# Settings that have a column of their own, or are said by the title of a table.
COLUMNS = {"model", "split", "bit_choices", "epochs", "lr", "scheme", "alrs", "kd", "teacher", "teacher_seed"}
DISTILLATION = {"kd", "teacher", "teacher_seed", "distill_weight", "temperature"}
# How long and how fast a method trains. All other settings are components: runs that change one are ablations.
REGIME = {"model", "split", "epochs", "float_epochs", "batch", "lr", "weight_decay"}
# Names of the schemes, in the order of lines.
METHODS = {
    "double_rounding": "Double Rounding",
    "truncate": "`truncate` (Bit-Mixer)",
    "lsq": "`lsq` (MultiQuant)",
    "adabits": "`adabits` (AdaBits)",
    "dorefa": "`dorefa` (Any-Precision)",
    "nested": "`nested` (ours)",
    "centred": "`centred` (ours)",
}
FROZEN = {"learn_scales": False}


class WrongRows(Exception):
    """A file of results is not what the recipe or the benchmark writes."""


@dataclass(frozen=True)
class Group:
    """Runs that share all settings but the seed; `settings` leaves out what has its default."""

    settings: dict[str, Any]
    runs: list[Row]

    def get(self, name: str) -> Any:
        """A setting, or its default."""
        return self.settings.get(name, DEFAULTS.get(name))

    @property
    def widths(self) -> Widths:
        """The widths trained, descending."""
        return tuple(self.settings["bit_choices"])

    @property
    def components(self) -> dict[str, Any]:
        """The settings that an ablation is about."""
        return {k: v for k, v in sorted(self.settings.items()) if k not in COLUMNS | DISTILLATION | REGIME}

    def top1(self) -> dict[int, float]:
        """The mean accuracy by width."""
        return {bits: statistics.fmean(row["top1"][str(bits)] for row in self.runs) for bits in self.widths}

    def kind(self) -> str:
        """The one section that shows these runs."""
        if len(self.widths) == 1:
            return "dedicated"
        plain = self.get("scheme") == "double_rounding" and self.get("kd") == "none"
        if self.components and not (plain and self.components == FROZEN):
            return "ablation"
        if self.get("kd") != "none":
            return "distillation"
        return "double_rounding" if plain else "rivals"


def read_json(path: Path, default: Any) -> Any:
    """The JSON at `path`; `default` if there is no such file or it is empty."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    try:
        return json.loads(text) if text.strip() else default
    except ValueError as problem:
        raise WrongRows(f"{path.name} is not JSON: {problem}") from problem


def read_rows(path: Path) -> list[Row]:
    """The rows at `path`, checked."""
    rows = read_json(path, [])
    if not isinstance(rows, list):
        raise WrongRows(f"{path.name} is not a list of rows")
    for number, row in enumerate(rows):
        if not isinstance(row, dict) or (missing := sorted(NEEDED - set(row))):
            raise WrongRows(f"{path.name}, row {number}: lacks {missing if isinstance(row, dict) else 'all fields'}")
        if set(row["top1"]) != {str(bits) for bits in row["bit_choices"]}:
            raise WrongRows(f"{path.name}, row {number}: the widths of top1 are not those of bit_choices")
        if row.get("split", "test") not in ("test", "holdout"):
            raise WrongRows(f"{path.name}, row {number}: split {row['split']!r} is neither 'test' nor 'holdout'")
    return rows


def read_measured(path: Path) -> list[Row]:
    """The rows of the benchmark whose results are at `path`."""
    found = read_json(path, {"rows": []})
    if not isinstance(found, dict) or not isinstance(found.get("rows"), list):
        raise WrongRows(f"{path.name} has no list of rows")
    return list(found["rows"])


def settings_of(row: Row) -> dict[str, Any]:
    """The settings of a run that differ from the defaults."""
    return {k: v for k, v in row.items() if k not in NOT_SETTINGS and (k not in DEFAULTS or DEFAULTS[k] != v)}


def group(rows: Iterable[Row]) -> list[Group]:
    """Rows that share all settings but the seed, together; groups and their rows in a fixed order."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(key(settings_of(row)), []).append(row)
    for runs in groups.values():
        runs.sort(key=lambda row: (row["seed"], json.dumps(row, sort_keys=True)))
    return sorted((Group(settings_of(runs[0]), runs) for runs in groups.values()), key=_order)


def key(settings: Mapping[str, Any]) -> str:
    """`settings` as text, to compare and to look up."""
    return json.dumps(settings, sort_keys=True)


def _order(one: Group) -> tuple[object, ...]:
    """Schemes as in METHODS; longer runs, learned scales, ALRS and plain runs first."""
    scheme, alrs = one.get("scheme"), one.get("alrs")
    place = list(METHODS).index(scheme) if scheme in METHODS else len(METHODS)
    same = (alrs == "off", alrs != "relative", len(one.settings), key(one.settings))
    return (place, -one.get("epochs"), not one.get("learn_scales"), *same)


# --- cells --------------------------------------------------------------------------------------


def mean(values: list[float], digits: int = 2) -> str:
    """The mean, with the sample standard deviation if there are several values."""
    text = f"{statistics.fmean(values):.{digits}f}"
    return text if len(values) == 1 else f"{text} ± {statistics.stdev(values):.{digits}f}"


def signed(value: float) -> str:
    """A difference of accuracies, always with its sign."""
    return f"{round(value, 2) + 0.0:+.2f}"  # + 0.0: never -0.00


def words(settings: Mapping[str, Any]) -> list[str]:
    """Settings to read; those that have columns of their own are left out."""
    rest = {k: v for k, v in sorted(settings.items()) if k not in COLUMNS}
    return ["frozen scales" if {k: v} == FROZEN else f"{k}={v}" for k, v in rest.items()]


def our_cells(runs: Group, base: Mapping[int, float] | None = None) -> Cells:
    """The cells of one setting, with the difference to `base` where it has the width."""
    teacher, scheme, frozen = runs.get("teacher"), runs.get("scheme"), runs.get("learn_scales") is False
    reached = [row["teacher_top1"] for row in runs.runs if "teacher_top1" in row]
    if runs.get("teacher_seed") is not None:  # one for all
        teacher, reached = f"{teacher} of seed {runs.get('teacher_seed')}", reached[:1]
    if reached:
        teacher = f"{teacher}, {mean(reached)}"
    cells = {
        "method": ", ".join([METHODS.get(scheme, f"`{scheme}`"), *words(runs.settings)]),
        "stored": ", ".join(sorted({str(row["stored_bits"]) for row in runs.runs})),
        "ALRS": "" if frozen else runs.get("alrs"),
        "kd": f"{runs.get('kd')} ({teacher})" if teacher else runs.get("kd"),
        "lr": f"{runs.get('lr'):g}" if runs.get("lr") else "",
        "epochs": str(runs.get("epochs")),
        "runs (seeds)": f"{len(runs.runs)} ({', '.join(str(row['seed']) for row in runs.runs)})",
        "float": mean([row["float_top1"] for row in runs.runs]),
        "rate 0": "" if frozen else rate_zero(runs),
    }
    for bits, value in runs.top1().items():
        difference = f" ({signed(value - base[bits])})" if base and bits in base else ""
        cells[f"{bits} bits"] = mean([row["top1"][str(bits)] for row in runs.runs]) + difference
    return cells


def rate_zero(runs: Group) -> str:
    """The share of steps at which ALRS gave rate 0: one number, or one for each width if they differ."""
    if runs.get("alrs") == "off" or not all(row.get("stopped") for row in runs.runs):
        return ""
    shares = [f"{100 * statistics.fmean(row['stopped'][str(b)] for row in runs.runs):.0f}" for b in runs.widths]
    return (shares[0] if len(set(shares)) == 1 else " / ".join(shares)) + " %"


def paper_cells(line: PaperLine) -> Cells:
    """The cells of one line of the paper."""
    cells = {"method": f"*paper:* {line.method}", "stored": str(line.stored), "ALRS": "on" if line.alrs else "off"}
    cells |= {"kd": "yes" if line.kd else "none", "lr": "0.0005", "epochs": "90", "float": f"{line.float_top1:.2f}"}
    return cells | {f"{bits} bits": f"{value:.2f}" for bits, value in line.by_bits().items()}


def table(columns: Iterable[str], lines: Iterable[Cells]) -> str:
    """A Markdown table; cells that a line lacks are empty."""
    head = list(columns)
    cells = [head, ["---"] * len(head), *([line.get(column, "") for column in head] for line in lines)]
    return "".join("| " + " | ".join(line) + " |\n" for line in cells)
