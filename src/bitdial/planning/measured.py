"""The candidates of a search with their measured accuracy, and those of them worth keeping."""

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from bitdial.dial.plan import BitPlan, resolve_bits
from bitdial.errors import ConfigError, PlanError
from bitdial.files.atomic import read_json, write_json
from bitdial.planning.correlation import pearson, spearman
from bitdial.planning.cost import QUANTITIES, Costs
from bitdial.planning.find import Candidate
from bitdial.planning.front import evaluate_plans, mean_accuracy, pareto_front
from bitdial.prepare.measure import Measure


@dataclass(frozen=True, kw_only=True)
class MeasuredPlan:
    """A plan, its costs and its accuracy (0 to 1); `name`, for one on the front, is its average bits: "2.97 bits".

    `predicted_loss` is what the search minimised; None for a plan that no search found. `width` is that of a uniform
    setting, in which all layers but those with a width of their own have it.
    """

    plan: BitPlan
    costs: dict[str, float]
    accuracy: float
    predicted_loss: float | None = None
    name: str | None = None
    width: int | None = None

    def __post_init__(self) -> None:
        numbers = [self.accuracy, *self.costs.values(), 0 if self.predicted_loss is None else self.predicted_loss]
        if not all(isinstance(v, int | float) and math.isfinite(v) for v in numbers):
            raise ConfigError("a plan's accuracy, costs and predicted loss must be finite numbers")
        if self.name is not None and not isinstance(self.name, str):
            raise ConfigError("a plan's name must be text")
        if self.width is not None and type(self.width) is not int:
            raise ConfigError(f"the width of a uniform setting is {self.width!r}, expected a whole number")

    @property
    def uniform_width(self) -> int:
        """The width of a uniform setting; where `width` does not say it, as in older files, all layers have it."""
        return next(iter(self.plan.values()))[0] if self.width is None else self.width

    @property
    def uniform_name(self) -> str:
        """What a uniform setting is called: "4 bits everywhere", or "4 bits, fixed layers at theirs"."""
        width = self.uniform_width
        everywhere = all(pair == (width, width) for pair in self.plan.values())
        return f"{width} bits{' everywhere' if everywhere else ', fixed layers at theirs'}"

    def to_dict(self) -> dict[str, Any]:
        """All of it as JSON values."""
        values = {**asdict(self), "plan": self.plan.to_dict()}
        return values if self.width is not None else {key: value for key, value in values.items() if key != "width"}


@dataclass(frozen=True, kw_only=True)
class MeasuredFront:
    """Plans measured on `samples` held-out samples, by rising cost.

    label       whose plans they are, such as a file's name
    quantity    the cost against which the front weighs accuracy: a key of `Costs.of`
    candidates  the plans that compete for the front
    uniform     the settings of one width each, for comparison; layers with a width of their own have that
    """

    label: str
    quantity: str
    samples: int
    candidates: tuple[MeasuredPlan, ...]
    uniform: tuple[MeasuredPlan, ...]

    def __post_init__(self) -> None:
        if self.quantity not in QUANTITIES or not isinstance(self.label, str):
            raise ConfigError(f"a front needs a label, and a quantity from {', '.join(QUANTITIES)}")
        for one in (*self.candidates, *self.uniform):
            if self.quantity not in one.costs:
                raise ConfigError(f"the plan {one.plan!r} has no cost {self.quantity}")

    @property
    def front(self) -> list[MeasuredPlan]:
        """The candidates that no other beats, by rising cost."""
        return [one for one in self.candidates if one.name is not None]

    @property
    def within(self) -> dict[str, MeasuredPlan]:
        """By budget ("2.5 bits", "3.0 bits", ...), the most accurate plan of the front with no more average bits."""
        averages = [one.costs["average_bits"] for one in self.front]
        most = max(one.costs["average_bits"] for one in self.candidates)
        budgets = [halves / 2 for halves in range(math.ceil(2 * min(averages)), math.floor(2 * most) + 1)]
        return {
            f"{budget:.1f} bits": max(
                (one for one in self.front if one.costs["average_bits"] <= budget), key=lambda one: one.accuracy
            )
            for budget in budgets
        }

    @property
    def plans(self) -> dict[str, BitPlan]:
        """What a file stores: the plans of `within` by their budgets, and those of the front by their own names."""
        named = {one.name: one.plan for one in self.front if one.name is not None}
        return {**{name: one.plan for name, one in self.within.items()}, **named}

    @property
    def correlation(self) -> dict[str, float | None]:
        """Of predicted loss and measured accuracy over what was searched: -1 is a perfect prediction, 0 none."""
        losses, accuracies = self.predictions
        return {"spearman": spearman(losses, accuracies), "pearson": pearson(losses, accuracies)}

    @property
    def predictions(self) -> tuple[list[float], list[float]]:
        """The predicted losses of the plans that a search found, and their accuracies."""
        pairs = [(one.predicted_loss, one.accuracy) for one in self.candidates if one.predicted_loss is not None]
        return [loss for loss, _ in pairs], [accuracy for _, accuracy in pairs]

    def summary(self) -> dict[str, Any]:
        """The front as JSON values without the plans: what a file keeps in its metrics, beside the plans."""
        rows = [{k: v for k, v in one.to_dict().items() if k != "plan"} for one in self.front]
        return {
            "quantity": self.quantity,
            "samples": self.samples,
            "correlation": self.correlation,
            "plans": rows,
            "names": list(self.plans),
        }

    def to_dict(self) -> dict[str, Any]:
        """All of it as JSON values."""
        return {
            "label": self.label,
            "quantity": self.quantity,
            "samples": self.samples,
            "correlation": self.correlation,
            "candidates": [one.to_dict() for one in self.candidates],
            "uniform": [one.to_dict() for one in self.uniform],
        }

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it to `path` as JSON, atomically; BitdialError if that fails."""
        write_json(path, self.to_dict())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "MeasuredFront":
        """Read what `save` wrote; ConfigError names the file and what is wrong with it."""
        values = read_json(path)
        try:
            parts = {key: tuple(map(_measured_plan, values[key])) for key in ("candidates", "uniform")}
            return cls(label=values["label"], quantity=values["quantity"], samples=values["samples"], **parts)
        except (ConfigError, PlanError, KeyError, TypeError, AttributeError) as problem:
            raise ConfigError(f"{path} is not what `bitdial pareto --out` writes: {problem!r}"[:300]) from problem


def _measured_plan(values: dict[str, Any]) -> MeasuredPlan:
    return MeasuredPlan(**{**values, "plan": BitPlan.from_dict(values["plan"])})


def measure_front(
    model: nn.Module,
    found: Sequence[Candidate],
    costs: Costs,
    batches: Sequence[Any],
    measure: Measure,
    *,
    label: str,
    quantity: str = "average_bits",
    uniform_on_front: bool = True,
    progress: bool = True,
) -> MeasuredFront:
    """Evaluate what `candidates` found, and each width by itself, and say which plans no other beats.

    `model` is prepared or live; `batches` are (inputs, targets), held out of training and not the test set. The plans
    of the front are named by their average bits, such as "2.97 bits"; "3.0 bits" is the best within that budget.
    `measure` returns one number, and more is better. With `uniform_on_front`, a setting of one width can be on it too:
    say False where layers were pinned to others.
    """
    widths = [b for b in next(iter(costs.bit_choices.values())) if all(b in c for c in costs.bit_choices.values())]
    settings = {bits: BitPlan(resolve_bits(costs.bit_choices, bits, costs.fixed_bits)) for bits in widths}
    uniform = {plan: costs.of(plan) for plan in settings.values()}
    losses = {one.plan: one.predicted_loss for one in found}
    considered = {one.plan: one.costs for one in found}
    considered |= {plan: cost for plan, cost in uniform.items() if uniform_on_front and plan not in losses}
    accuracy = evaluate_plans(model, [*considered, *uniform], batches, measure, progress=progress)
    if several := next((value for value in accuracy.values() if isinstance(value, dict)), None):
        raise ConfigError(f"a front weighs one number, more is better; the measure returned {', '.join(several)}")
    front = pareto_front({plan: (cost[quantity], accuracy[plan]) for plan, cost in considered.items()})
    names = dict(zip(front, _names([considered[plan]["average_bits"] for plan in front]), strict=True))

    def measured(plans: dict[BitPlan, dict[str, float]], by_plan: Mapping[BitPlan, int]) -> tuple[MeasuredPlan, ...]:
        return tuple(
            MeasuredPlan(
                plan=plan,
                costs=cost,
                accuracy=accuracy[plan],
                predicted_loss=losses.get(plan),
                name=names.get(plan),
                width=by_plan.get(plan),
            )
            for plan, cost in sorted(plans.items(), key=lambda item: item[1][quantity])
        )

    samples = sum(len(targets) for _, targets in batches)
    return MeasuredFront(
        label=label,
        quantity=quantity,
        samples=samples,
        candidates=measured(considered, {}),
        uniform=measured(uniform, {plan: bits for bits, plan in settings.items()}),
    )


def compare_fronts(fronts: Sequence[MeasuredFront]) -> dict[str, float]:
    """By label, the best accuracy within a budget, averaged over budgets: one number for each front.

    The budgets go from the least for which all have a plan to the most that any plan costs; empty if those are one.
    """
    costs = [[one.costs[front.quantity] for one in front.candidates] for front in fronts]
    least, most = max(map(min, costs)), max(map(max, costs))
    if least >= most:
        return {}
    points = {front.label: [(one.costs[front.quantity], one.accuracy) for one in front.candidates] for front in fronts}
    return {label: mean_accuracy(found, least, most) for label, found in points.items()}


def _names(averages: Sequence[float]) -> list[str]:
    """A name for each average, such as "2.97 bits": with two digits, more if they tell them apart, then a number."""
    for digits in range(2, 6):
        names = [f"{value:.{digits}f} bits" for value in averages]
        if len(set(names)) == len(names):
            return names
    names = [f"{value:.2f} bits" for value in averages]
    return [f"{name} ({names[:place].count(name) + 1})" for place, name in enumerate(names)]
