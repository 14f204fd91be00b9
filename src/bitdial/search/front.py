"""From candidates to the front: measure them on held-out data, keep those that nothing beats."""

from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any, TypeVar

from torch import nn

from bitdial.errors import ConfigError
from bitdial.plan import BitPlan, at_bits, resolve_plan
from bitdial.search.find import Candidate
from bitdial.search.progress import tracked

Key = TypeVar("Key", bound=Hashable)


def evaluate_plans(
    model: nn.Module,
    plans: Iterable[BitPlan | Candidate],
    batches: Iterable[Any],
    measure: Callable[[nn.Module, list[Any]], float],
    *,
    progress: bool = True,
) -> dict[BitPlan, float]:
    """`measure(model, batches)` with `model`, prepared or live, at each of `plans`; its setting is put back afterwards.

    `measure` is `bitdial.accuracy` or anything like it. `batches` should be held out of training, and not be the test
    set if the front is used to choose.
    """
    chosen = list(dict.fromkeys(one.plan if isinstance(one, Candidate) else one for one in plans))
    for plan in chosen:
        resolve_plan(model, plan)  # before anything takes time
    held_out = list(batches)
    found: dict[BitPlan, float] = {}
    for plan in tracked(chosen, "plans", show=progress):
        with at_bits(model, plan):
            found[plan] = measure(model, held_out)
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
