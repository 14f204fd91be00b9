"""From candidates to the front: measure them on held-out data, keep those that nothing beats."""

from collections.abc import Hashable, Iterable, Mapping
from typing import Any, TypeVar

from torch import nn

from bitdial.dial.dial import at_bits, resolve_plan
from bitdial.dial.plan import BitPlan, listed
from bitdial.errors import ConfigError
from bitdial.planning.find import Candidate
from bitdial.planning.progress import tracked
from bitdial.prepare.measure import Measure, Measured, take_measure

Key = TypeVar("Key", bound=Hashable)


def evaluate_plans(
    model: nn.Module,
    plans: Iterable[BitPlan | Candidate],
    batches: Iterable[Any],
    measure: Measure,
    *,
    progress: bool = True,
) -> dict[BitPlan, Any]:
    """`measure(model, batches)` with `model`, prepared or live, at each of `plans`; its setting is put back afterwards.

    `measure` is `bitdial.accuracy`, or one of your own as for `evaluate`: it returns a number or a dict of numbers.
    `batches` should be held out of training, and not be the test set if the front is used to choose.
    """
    chosen = list(dict.fromkeys(one.plan if isinstance(one, Candidate) else one for one in listed(plans)))
    for plan in chosen:
        resolve_plan(model, plan)  # before anything takes time
    held_out = list(batches)
    found: dict[BitPlan, Measured] = {}
    for plan in tracked(chosen, "plans", show=progress):
        with at_bits(model, plan):
            found[plan] = take_measure(model, held_out, measure)
    return found


def pareto_front(points: Mapping[Key, tuple[float, float]]) -> dict[Key, tuple[float, float]]:
    """Those of `points` ({anything: (cost, accuracy)}) that no other beats, by rising cost.

    A point is beaten by one that costs no more and is no less accurate, and better in one of the two. Of equal points
    the first stays.
    """
    for key, (cost, accuracy) in points.items():
        if cost != cost or accuracy != accuracy:
            raise ConfigError(f"{key!r}: its cost or accuracy is NaN")
    front: dict[Key, tuple[float, float]] = {}
    best = -float("inf")
    for key, (cost, accuracy) in sorted(points.items(), key=lambda item: (item[1][0], -item[1][1])):
        if accuracy > best:
            front[key] = (cost, accuracy)
            best = accuracy
    return front


def mean_accuracy(points: Iterable[tuple[float, float]], least: float, most: float) -> float:
    """The best accuracy of `points` (cost, accuracy) within a budget, averaged over budgets from `least` to `most`.

    It is the area under the front over its width: one number by which two fronts compare over the same budgets.
    """
    front = list(pareto_front(dict(enumerate(points))).values())
    if not front or front[0][0] > least or not least < most:
        raise ConfigError(
            f"there is no front from {least!r} to {most!r}: no point costs as little, or that is no range"
        )
    ends = [cost for cost, _ in front[1:]] + [most]
    return sum(
        accuracy * max(min(end, most) - max(cost, least), 0.0)
        for (cost, accuracy), end in zip(front, ends, strict=True)
    ) / (most - least)
