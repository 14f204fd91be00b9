"""search: the best plan within budgets. candidates: many such plans, to be measured."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from torch import nn

from bitdial.config import check_choice
from bitdial.dial.dial import dialled_layers, fixed_widths
from bitdial.dial.plan import BitPlan
from bitdial.errors import BudgetError, ConfigError
from bitdial.planning.cost import Costs, as_written
from bitdial.planning.problem import LayerLosses, Pins, Problem, build_problem, layer_losses, loss_weights
from bitdial.planning.progress import tracked
from bitdial.planning.solve import solve
from bitdial.sensitivity.result import Sensitivity, check_count


@dataclass(frozen=True)
class Candidate:
    """A plan that a search found, the loss it predicts for it, its costs and the budgets it was found for."""

    plan: BitPlan
    predicted_loss: float
    costs: dict[str, float]
    budgets: dict[str, float]

    def to_dict(self) -> dict[str, Any]:
        """All of it as JSON values."""
        own = {"predicted_loss": self.predicted_loss, "costs": dict(self.costs), "budgets": dict(self.budgets)}
        return {"plan": self.plan.to_dict(), **own}


def search(
    model: nn.Module,
    sensitivity: Sensitivity | Mapping[str, float],
    costs: Costs,
    budgets: Mapping[str, float],
    *,
    objective: str = "error",
    groups: Iterable[Iterable[str]] = (),
    pinned: Pins | None = None,
    activation_bits: int | None = None,
) -> Candidate:
    """The plan of least predicted loss among all that keep within `budgets` ({quantity of `costs.of`: at most}).

    The loss is sum_l s_l * ||W_l - Q_b(W_l)||^2 (`objective="error"`) or sum_l s_l * (highest bits - b_l) (`"bits"`,
    the paper's objective as meant). `sensitivity` is {layer: s_l}, for example the Hessian trace divided by the number
    of weights; a negative one counts as 0, and such a layer gets what the others leave. Layers of a group share their
    bits, as do layers on one weight; `pinned` layers have theirs, and so do layers with a width of their own unless
    `pinned` gives them another, or None, which sets them free. Activation bits of the others are the weight bits, or
    `activation_bits`. If no plan fits, BudgetError names the nearest value that can be met.
    """
    losses = layer_losses(model, objective)
    check_same_layers(model, costs)
    problem = build_problem(costs, losses, sensitivity, groups=groups, pinned=pinned, activation_bits=activation_bits)
    return _find(problem, checked_budgets(budgets, costs), costs, losses, sensitivity)


def candidates(
    model: nn.Module,
    sensitivity: Sensitivity | Mapping[str, float],
    costs: Costs,
    budgets: Mapping[str, Sequence[float] | int] | None = None,
    *,
    alternatives_at: Mapping[str, float] | None = None,
    objective: str = "error",
    groups: Iterable[Iterable[str]] = (),
    pinned: Pins | None = None,
    activation_bits: int | None = None,
    progress: bool = True,
) -> list[Candidate]:
    """The plans of a sweep over budgets and of the alternatives at one of them, each once, as `search` finds them.

    `budgets` is {quantity: values to sweep over, or how many of them, evenly from the least to the most that a plan can
    cost}; of several quantities every combination is tried. By default it is 60 average bits; an empty one sweeps over
    nothing. `alternatives_at` are budgets at
    which each layer (or group) is also pinned to each width that the best plan does not give it (the paper's
    Algorithm 2). Combinations that no plan meets are left out; if none remains, the error is that of the last.
    """
    losses = layer_losses(model, objective)
    check_same_layers(model, costs)
    problem = build_problem(costs, losses, sensitivity, groups=groups, pinned=pinned, activation_bits=activation_bits)
    sweep: dict[str, Sequence[float]] = {}
    for name, values in ({"average_bits": 60} if budgets is None else budgets).items():
        check_quantity(name, costs)
        sweep[name] = spread(problem, name, values) if isinstance(values, int) else values
    found: dict[BitPlan, Candidate] = {}
    problems: list[BudgetError] = []

    def add(problem: Problem, limits: dict[str, Fraction]) -> Candidate | None:
        try:
            one = _find(problem, limits, costs, losses, sensitivity)
        except BudgetError as error:
            problems.append(error)
            return None
        return found.setdefault(one.plan, one)

    for limits in tracked(_combinations(sweep, costs), "sweep", show=progress):
        add(problem, limits)
    if alternatives_at is not None:
        limits = checked_budgets(alternatives_at, costs)
        best = add(problem, limits)
        others = [] if best is None else _others(problem, best.plan)
        for alternative in tracked(others, "alternatives", show=progress):
            add(alternative, limits)
    if not found and problems:
        raise problems[-1]
    return list(found.values())


def spread(problem: Problem, quantity: str, count: int) -> list[float]:
    """`count` budgets of a quantity, evenly from the least to the most that a plan can cost; none below the least."""
    check_count(f"the number of {quantity} budgets", count, 2)
    least, most = problem.least(quantity), problem.most(quantity)
    values = [least + (most - least) * i / (count - 1) for i in range(count)]
    return sorted({math.ceil(value * 10**6) / 10**6 for value in values})


def _find(
    problem: Problem,
    limits: dict[str, Fraction],
    costs: Costs,
    losses: LayerLosses,
    sensitivity: Sensitivity | Mapping[str, float],
) -> Candidate:
    """Solve, then evaluate the plan by itself, from the layers rather than the solver's table."""
    chosen = solve(problem, limits)
    plan = problem.plan(chosen)
    exact = costs.exact(dict(plan))
    exact["bytes"] += costs.float_bytes
    for name, limit in limits.items():
        assert exact[name] <= limit, f"{name}: the plan costs {exact[name]}, the budget is {limit}"
    weight = loss_weights(sensitivity, list(costs.layers))
    loss = math.fsum(weight[name] * losses[name][plan[name][0]] for name in costs.layers)
    assert math.isclose(loss, problem.loss(chosen), rel_tol=1e-9), "the plan's loss is not what was minimised"
    return Candidate(plan, loss, costs.of(plan), {name: float(limit) for name, limit in limits.items()})


def _others(problem: Problem, best: BitPlan) -> list[Problem]:
    """The problem with each unit pinned to each width that `best` does not give it."""
    return [
        problem.pinned(unit, choice)
        for unit in problem.units
        for choice, pair in enumerate(unit.choices)
        if pair != best[unit.layers[0]]
    ]


def _combinations(budgets: Mapping[str, Sequence[float]], costs: Costs) -> list[dict[str, Fraction]]:
    combined: list[dict[str, float]] = [{}] if budgets else []
    for name, values in budgets.items():
        combined = [{**one, name: value} for one in combined for value in values]
    return [checked_budgets(one, costs) for one in combined]


def checked_budgets(budgets: Mapping[str, float], costs: Costs) -> dict[str, Fraction]:
    """The budgets as they are written; ConfigError for what is none."""
    for name, value in budgets.items():
        check_quantity(name, costs)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ConfigError(f"the budget {name}={value!r} is not a number")
    return {name: as_written(value) for name, value in budgets.items()}


def check_quantity(name: str, costs: Costs) -> None:
    """Raise ConfigError unless a budget can be set for the quantity."""
    if name == "latency" and costs.latency is None:
        raise ConfigError(
            "a latency budget needs times: measure_costs(model, sample, latency={layer: {bits: s}}), or --latency-table"
        )
    check_choice("budget", name, costs.quantities)


def check_same_layers(model: nn.Module, costs: Costs) -> None:
    """Raise ConfigError unless the costs are those of `model`, prepared or live."""
    found = dialled_layers(model)
    layers = {name: (layer.bit_choices, fixed_widths(found).get(name)) for name, layer in found.items()}
    measured = {name: (choices, costs.fixed_bits.get(name)) for name, choices in costs.bit_choices.items()}
    if layers != measured:
        odd = next(iter(layers.items() ^ measured.items()))[0]
        raise ConfigError(
            f"the costs were measured on another model: they differ at layer {odd!r}; call measure_costs on this one"
        )
