"""Mixed precision on the results page: rows of the recipes that end in -mixed, read, checked and put into tables.

A row is one plan. The rows of one run share all settings and the seed; runs that share all settings are one line.
"""

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import paper_numbers as paper
import result_rows
from paper_numbers import Widths
from result_rows import Cells, Row, WrongRows, mean, signed, table

from bitdial.planning import mean_accuracy
from bitdial.planning.correlation import spearman

FILES = ("cifar10-resnet20-mixed.json", "cifar10-mobilenetv2-mixed.json")
MODELS = {"resnet20": "ResNet20", "mobilenetv2": "MobileNetV2"}
SAMPLINGS = {"hasb": "HASB", "random": "random sampling"}  # in the order of lines

OF_A_PLAN = {"budget", "average_bits", "plan", "top1", "predicted_loss", "bytes", "bitops"}
OF_A_RUN = {"uniform_top1", "start_top1", "device", "versions", "command", "epoch_seconds"}
NEEDED = OF_A_PLAN | OF_A_RUN | {"sampling", "scheme", "bit_choices", "seed", "epochs", "lr", "alrs", "split"}
DEFAULTS = {"model": "resnet20", "scheme": "double_rounding", "alrs": "relative", "transitions": "full"}
COLUMNS = {"model", "sampling", "bit_choices", "epochs", "lr", "split"}

TEXT = """## Mixed precision

From `results/cifar10-resnet20-mixed.json` and `results/cifar10-mobilenetv2-mixed.json`: a multi-precision file, the
start, trained on with sampled plans and then searched, by

```bash
bitdial train cifar10-resnet20-mixed --start-from FILE --sampling hasb --data DIR --out runs/mixed \\
    --results results/cifar10-resnet20-mixed.json
```

"3 bits" is the plan that the search picks within an average of 3 bits over the weights; accuracy does not enter the
search. "front" is the best accuracy within a budget, averaged over all budgets. "order" is the rank correlation of
predicted loss and measured accuracy over the plans of a run; -1 is a perfect prediction. The plans are of all budgets,
so a part of it is that more bits are better. "uniform" is the same network with one width everywhere; in brackets, the
difference to the start.
"""


@dataclass(frozen=True)
class Run:
    """The plans of one run, by rising budget."""

    settings: dict[str, Any]
    seed: int
    plans: list[Row]

    @property
    def widths(self) -> Widths:
        """The widths of the network, descending."""
        return tuple(self.settings["bit_choices"])

    def searched(self, budget: float) -> float | None:
        """The accuracy of the plan within an average of `budget` bits; None if that was not searched for."""
        return next((row["top1"] for row in self.plans if abs(row["budget"] - budget) < 1e-6), None)

    def uniform(self, bits: int) -> float:
        """The accuracy with one width everywhere."""
        return float(self.plans[0]["uniform_top1"][str(bits)])

    def start(self, bits: int) -> float:
        """The same of the file that the run started from."""
        return float(self.plans[0]["start_top1"][str(bits)])

    def area(self) -> float:
        """The area under the front over its width."""
        points = [(row["average_bits"], row["top1"]) for row in self.plans]
        return mean_accuracy(points, self.widths[-1], self.widths[0])

    def order(self) -> float | None:
        """The rank correlation of prediction and measurement."""
        return spearman([row["predicted_loss"] for row in self.plans], [row["top1"] for row in self.plans])

    def front(self) -> list[tuple[float, float]]:
        """The best accuracy within each budget."""
        return [
            (one["budget"], max(row["top1"] for row in self.plans if row["average_bits"] <= one["budget"]))
            for one in self.plans
        ]


@dataclass(frozen=True)
class Runs:
    """Runs that share all settings but the seed; `settings` leaves out what has its default."""

    settings: dict[str, Any]
    runs: list[Run]

    def get(self, name: str) -> Any:
        """A setting, or its default."""
        return self.settings.get(name, DEFAULTS.get(name))

    @property
    def widths(self) -> Widths:
        """The widths of the network, descending."""
        return self.runs[0].widths

    @property
    def unusual(self) -> dict[str, Any]:
        """The settings that have no column and are not as usual."""
        return {name: value for name, value in sorted(self.settings.items()) if name not in COLUMNS}

    def label(self, shared: Mapping[str, Any]) -> str:
        """How plans were sampled, and what is not as usual, but for what is `shared`."""
        sampling = self.get("sampling")
        return ", ".join([SAMPLINGS.get(sampling, sampling), *_listed(self.unusual, shared)])


def shared_settings(groups: Sequence[Runs]) -> dict[str, Any]:
    """What is not as usual in all of `groups` alike."""
    return {k: v for k, v in groups[0].unusual.items() if all(one.unusual.get(k) == v for one in groups)}


def _listed(settings: Mapping[str, Any], shared: Mapping[str, Any]) -> list[str]:
    return [f"{name}={value}" for name, value in settings.items() if name not in shared]


def read_rows(path: Path) -> list[Row]:
    """The rows at `path`, checked."""
    rows = result_rows.read_json(path, [])
    if not isinstance(rows, list):
        raise WrongRows(f"{path.name} is not a list of rows")
    for number, row in enumerate(rows):
        if not isinstance(row, dict) or (missing := sorted(NEEDED - set(row))):
            raise WrongRows(f"{path.name}, row {number}: lacks {missing if isinstance(row, dict) else 'all fields'}")
        if row.get("model", "resnet20") not in MODELS or row["split"] not in ("test", "holdout"):
            raise WrongRows(f"{path.name}, row {number}: its model or split is not known")
        widths = {str(bits) for bits in row["bit_choices"]}
        if set(row["uniform_top1"]) != widths or set(row["start_top1"]) != widths:
            raise WrongRows(f"{path.name}, row {number}: the widths of an accuracy are not those of bit_choices")
    return rows


def group(rows: Iterable[Row]) -> list[Runs]:
    """Rows by settings and by run, in a fixed order: HASB first, longer runs and plain ones first."""
    runs: dict[tuple[str, int], dict[float, Row]] = {}
    for row in rows:
        plans = runs.setdefault((json.dumps(_settings(row), sort_keys=True), row["seed"]), {})
        if row["budget"] in plans:
            raise WrongRows(
                f"two rows of seed {row['seed']} have all settings and the budget {row['budget']:g} in common; take "
                "one of the runs out"
            )
        plans[row["budget"]] = row
    found: dict[str, list[Run]] = {}
    for (text, seed), plans in sorted(runs.items()):
        run = Run(json.loads(text), seed, [plans[budget] for budget in sorted(plans)])
        lowest = run.widths[-1]
        if run.plans[0]["average_bits"] > lowest:
            raise WrongRows(f"a run of seed {seed} has no plan within {lowest} bits, the lowest width")
        found.setdefault(text, []).append(run)
    return sorted((Runs(each[0].settings, each) for each in found.values()), key=_order)


def _settings(row: Row) -> Row:
    rest = {k: v for k, v in row.items() if k not in OF_A_PLAN | OF_A_RUN | {"seed", "runs_at_once"}}
    return {k: v for k, v in rest.items() if k not in DEFAULTS or DEFAULTS[k] != v}


def _order(one: Runs) -> tuple[object, ...]:
    samplings, sampling = list(SAMPLINGS), one.get("sampling")
    place = samplings.index(sampling) if sampling in samplings else len(samplings)
    return (len(one.settings), -one.get("epochs"), place, json.dumps(one.settings, sort_keys=True))


# --- tables -------------------------------------------------------------------------------------


def section(rows: Iterable[Row]) -> str:
    """All tables: by model, by widths, those of the test set first; nothing if there are no rows."""
    groups = group(rows)
    places = {(one.get("split") != "test", one.get("model"), one.widths) for one in groups}
    models, parts = list(MODELS), []
    for held, model, widths in sorted(places, key=lambda place: (place[0], models.index(place[1]), -len(place[2]))):
        mine = [o for o in groups if (o.get("split") != "test", o.get("model"), o.widths) == (held, model, widths)]
        where = "held-out images" if held else "mixed"
        title = f"### {MODELS[model]}, {where}, widths {', '.join(map(str, widths))}\n"
        parts.append(title)
        if shared := _listed(shared_settings(mine), {}):
            parts.append(f"All runs: {', '.join(shared)}.\n")
        parts += [plans_table(mine), uniform_table(mine)]
        if not held and model == "resnet20" and widths == paper.THREE:
            parts.append(targets_table(mine))
    return "\n".join(parts)


def shown_budgets(widths: Widths) -> list[float]:
    """The quarters between the outermost widths, the widths between them, and 3 bits."""
    low, high = widths[-1], widths[0]
    whole = {float(bits) for bits in (3, *widths) if low < bits < high}
    return sorted({low + (high - low) * share / 4 for share in (1, 2, 3)} | whole)


def plans_table(groups: list[Runs]) -> str:
    """Searched plans at a few budgets, the area under the front, the correlation; the start where it has that width."""
    budgets = shown_budgets(groups[0].widths)
    lines = []
    for one in groups:
        cells = _first_cells(one, groups)
        for budget in budgets:
            values = [value for run in one.runs if (value := run.searched(budget)) is not None]
            cells[f"{budget:g} bits"] = mean(values) if values else ""
        orders = [value for run in one.runs if (value := run.order()) is not None]
        cells |= {"front": mean([run.area() for run in one.runs]), "order": mean(orders) if orders else ""}
        lines.append(cells)
        shared = [bits for bits in one.widths if float(bits) in budgets]
        starts = {f"{bits} bits": mean([run.start(bits) for run in one.runs]) for bits in shared}
        lines.append({"plans": "· start, uniform", **starts})
    return table(["plans", "lr", "epochs", "runs (seeds)", *(f"{b:g} bits" for b in budgets), "front", "order"], lines)


def uniform_table(groups: list[Runs]) -> str:
    """One width everywhere, against the start."""
    lines = []
    for one in groups:
        cells = _first_cells(one, groups)
        for bits in one.widths:
            change = statistics.fmean(run.uniform(bits) - run.start(bits) for run in one.runs)
            cells[f"{bits} bits"] = f"{mean([run.uniform(bits) for run in one.runs])} ({signed(change)})"
        lines.append(cells | {"uniform, plans of": cells["plans"]})
    return table(["uniform, plans of", "lr", "epochs", "runs (seeds)", *(f"{b} bits" for b in groups[0].widths)], lines)


def targets_table(groups: list[Runs]) -> str:
    """What was set out for {4,3,2} before the runs, for each setting of HASB: means of differences within a seed."""
    lines = []
    for one in (one for one in groups if one.get("sampling") == "hasb"):
        searched = [(run, value) for run in one.runs if (value := run.searched(3.0)) is not None]
        other = next((o for o in groups if o.settings == one.settings | {"sampling": "random"}), None)
        areas = {run.seed: run.area() for run in other.runs} if other else {}
        fronts = [run.area() - areas[run.seed] for run in one.runs if run.seed in areas]
        aims = {
            "plan of 3 bits less uniform 3 bits: at least +0.30": (0.3, [v - run.uniform(3) for run, v in searched]),
            "plan of 3 bits less the start's 3 bits: at least 0": (0.0, [v - run.start(3) for run, v in searched]),
        }
        for bits in one.widths:
            changes = [run.uniform(bits) - run.start(bits) for run in one.runs]
            aims[f"uniform {bits} bits less the start's: at least -0.30"] = -0.3, changes
        aims["HASB's front less that of random sampling: above 0"] = 1e-6, fronts
        for text, (least, values) in aims.items():
            line = {
                "plans": one.label(shared_settings(groups)),
                "epochs": str(one.get("epochs")),
                "target": text,
                "seeds": str(len(values)),
            }
            if values:
                difference = round(statistics.fmean(values), 6)
                line |= {"measured": signed(difference), "met": "yes" if difference >= least else "no"}
            lines.append(line)
    return table(["plans", "epochs", "target", "seeds", "measured", "met"], lines)


def _first_cells(one: Runs, groups: Sequence[Runs]) -> Cells:
    seeds = ", ".join(str(run.seed) for run in one.runs)
    numbers = {"lr": f"{one.get('lr'):g}", "epochs": str(one.get("epochs"))}
    return {"plans": one.label(shared_settings(groups)), **numbers, "runs (seeds)": f"{len(one.runs)} ({seeds})"}
