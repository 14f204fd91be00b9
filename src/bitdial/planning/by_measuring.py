"""measured_search: the plan within budgets whose outputs are nearest to the float model's, found by measuring."""

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from typing import Any

from torch import nn

from bitdial.dial.dial import at_bits, get_bits
from bitdial.dial.plan import BitPlan
from bitdial.errors import ConfigError
from bitdial.planning.cost import Costs
from bitdial.planning.distance import Distance, OutputDistance, kl_divergence
from bitdial.planning.explore import Chosen, Explorer, Improvement
from bitdial.planning.find import check_same_layers, checked_budgets
from bitdial.planning.problem import Pins, Problem, build_problem
from bitdial.planning.solve import solve
from bitdial.prepare.model_call import Batch, evaluating
from bitdial.prepare.model_output import Output
from bitdial.sensitivity.result import check_count

log = logging.getLogger(__name__)
PLANS = 50  # of the first integer programs that are measured


@dataclass(frozen=True, kw_only=True)
class MeasuredSearch:
    """A plan that was found by measuring, beside the uniform plan of the same budgets.

    distance    of the plan's outputs from the reference's: the KL divergence in nats, or what your `distance` gives
    uniform     the highest width that all layers can have within the budgets (pinned ones have theirs); None if none
    reference   what the outputs were compared with, in words
    samples     on how many samples
    measured    how many plans were measured
    stopped     'done': no step or swap helps; 'patience': as many swaps in a row did not help; 'seconds': time was up
    trajectory  each plan that was better than all before it, in order
    """

    plan: BitPlan
    distance: float
    costs: dict[str, float]
    budgets: dict[str, float]
    uniform: BitPlan | None
    uniform_distance: float | None
    uniform_costs: dict[str, float] | None
    reference: str
    samples: int
    measured: int
    seconds: float
    stopped: str
    trajectory: tuple[Improvement, ...]

    def to_dict(self) -> dict[str, Any]:
        """All of it as JSON values."""
        uniform = None if self.uniform is None else self.uniform.to_dict()
        trajectory = [asdict(one) for one in self.trajectory]
        return {**asdict(self), "plan": self.plan.to_dict(), "uniform": uniform, "trajectory": trajectory}


def measured_search(
    model: nn.Module,
    batches: Batch | Iterable[Batch],
    costs: Costs,
    budgets: Mapping[str, float] | float,
    *,
    reference: nn.Module | Sequence[Any] | None = None,
    distance: Distance = kl_divergence,
    output: Output = None,
    groups: Iterable[Iterable[str]] = (),
    pinned: Pins | None = None,
    activation_bits: int | None = None,
    patience: int | None = 100,
    seconds: float | None = None,
    progress: bool = True,
) -> MeasuredSearch:
    """The plan within `budgets` whose outputs are nearest to the reference's, as measured on `batches` of inputs.

    `model` is prepared or live; its setting is put back afterwards. Each layer is measured at each other width, an
    integer program finds plans by the changes, the best are measured, and so are swaps until `patience` of them in a
    row (None: all) do not help. After `seconds` the best so far is returned. Without a time limit, the same inputs
    give the same plan.

    batches    inputs without labels, 512 to 1,024 samples; a batch is a tensor, or a tuple or dict of arguments
    costs      of `measure_costs`, on the prepared model
    budgets    {quantity of `costs.of`: at most}; a number is bytes
    reference  the float model, or its outputs in a list, one for each batch; None is `model` at its highest width
    distance   a function (output, reference's output) of a batch that returns a number, less is nearer; the default is
               the KL divergence of class logits of shape (samples, classes)
    output     the part of what a model returns that is compared: a key or an attribute, a place, or a function
    groups, pinned, activation_bits    as in `search`
    """
    _check_options(patience, seconds)
    check_same_layers(model, costs)
    given = {"bytes": budgets} if not isinstance(budgets, Mapping) else budgets
    limits = checked_budgets(given, costs)
    if not limits:
        raise ConfigError("give at least one budget, such as {'bytes': costs.of(4)['bytes']}")
    losses = {name: {b: float(bits[0] - b) for b in bits} for name, bits in costs.bit_choices.items()}
    equal = dict.fromkeys(costs.layers, 1.0)
    problem = build_problem(costs, losses, equal, groups=groups, pinned=pinned, activation_bits=activation_bits)
    most_bits = tuple(solve(problem, limits))  # BudgetError before anything takes time
    uniform = uniform_choices(problem, limits)
    with at_bits(model, get_bits(model)), evaluating(model):
        measure = OutputDistance(model, batches, reference, distance=distance, output=output)
        if reference is None:
            log.info("no reference was given: outputs are compared with those of %s", measure.reference)
        explorer = Explorer(
            problem, limits, measure, measure_from=measure.from_plan, seconds=seconds, progress=progress
        )
        stopped = explorer.explore(most_bits if uniform is None else uniform, plans=PLANS, patience=patience)
    best = explorer.best
    assert best is not None
    plan, whole = problem.plan(best), None if uniform is None else problem.plan(uniform)
    return MeasuredSearch(
        plan=plan,
        distance=explorer.known[best],
        costs=costs.of(plan),
        budgets={name: float(limit) for name, limit in limits.items()},
        uniform=whole,
        uniform_distance=None if uniform is None else explorer.known[uniform],
        uniform_costs=None if whole is None else costs.of(whole),
        reference=measure.reference,
        samples=measure.samples,
        measured=explorer.measured,
        seconds=explorer.elapsed(),
        stopped=stopped,
        trajectory=tuple(explorer.trajectory),
    )


def uniform_choices(problem: Problem, limits: Mapping[str, Fraction]) -> Chosen | None:
    """The highest width for all units within `limits`; a unit that lacks it has its next lower one, or its lowest."""
    for bits in sorted({pair[0] for unit in problem.units for pair in unit.choices}, reverse=True):
        chosen = tuple(
            next((c for c, pair in enumerate(unit.choices) if pair[0] <= bits), len(unit.choices) - 1)
            for unit in problem.units
        )
        if all(problem.cost(name, chosen) <= limit for name, limit in limits.items()):
            return chosen
    return None


def _check_options(patience: int | None, seconds: float | None) -> None:
    if patience is not None:
        check_count("patience", patience, 1)
    if seconds is not None and (
        isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds < math.inf
    ):
        raise ConfigError(f"seconds={seconds!r} is not a time limit; give a number above 0, or None for no limit")
