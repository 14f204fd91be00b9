"""The way from a uniform plan to a better one by measuring: steps of single layers, integer programs, swaps.

    1. steps       each unit (a layer, or layers that share bits) at each lower width, all others at their highest,
                   and how far that is from all at their highest
    2. programs    with the measured changes as losses, the best plan within the budgets, and the best ones with a
                   unit held at another width; those of least predicted loss are measured
    3. again       around the best plan so far: each unit one step up and one step down, and programs with the changes,
                   until nothing is gained
    4. swaps       one unit down and another up, also one alone, by what the steps predict, until none helps; then 3.

Why step 1 does not begin at the uniform plan: changes add up while they are small. Where the uniform plan is far from
the float model, no layer alone brings it back, and the changes of single layers there say little of many together.
Around the highest widths they add up well, and what is still wrong about the sum is measured in steps 2 to 4. Distances
there are from the outputs at the highest widths, not from the reference's. Errors of a unit and errors that are there
already meet at random: a small step may seem to gain something, which a larger one of the same unit would not.

Why step 1 does not take a small change at its word: the least change anywhere makes activations round otherwise
everywhere behind it. That costs about the same for every unit and width, and many units together do not pay it many
times. But rounding errors have a power of about 4^-bits. So a change counts with no more than its share, in proportion
to 4^-bits - 4^-highest, of what the same unit loses at a lower width, where the loss stands out. The same law gives
widths that were not measured, for want of time. The units that the budgets depend on most come first, and one of which
nothing was measured is taken for one in the middle of the others.

A plan is believed only when it has been measured itself, and programs of step 3 go no further than what was measured.
"""

import functools
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from bitdial.dial.plan import BitPlan
from bitdial.planning.problem import Problem
from bitdial.planning.progress import tracked
from bitdial.planning.solve import best_choices

FIRST_STEPS = 0.5  # the share of the time after which the first steps give way to the programs
SOLVING = 0.25  # the share of the time that is left that programs may take, before their plans are measured
SWAPPED = 2  # the widths by which a swap moves a unit, at most
FEWER = 2  # later programs have this part of the plans of the first

Measure = Callable[[BitPlan], float]
Chosen = tuple[int, ...]  # for each unit, the index of its choice
Changes = list[dict[int, float]]  # for each unit, {choice: change of the distance}, the centre's own included


@dataclass(frozen=True)
class Improvement:
    """A plan that was better than all before it: after how many plans and seconds, its distance, and what led to it."""

    plans: int
    seconds: float
    distance: float
    by: str


class OutOfTime(Exception):
    """The time limit has passed; the best so far stands."""


class Explorer:
    """Looks for the plan of least distance within `limits`; `best` is the best so far.

    `measure` gives the distance of a plan; `measure_from(plan)` is such a measure of the distance from that plan, by
    default the same. A plan is measured once by each. After `seconds` no other is begun.
    """

    def __init__(
        self,
        problem: Problem,
        limits: Mapping[str, Fraction],
        measure: Measure,
        *,
        measure_from: Callable[[BitPlan], Measure] | None = None,
        seconds: float | None = None,
        progress: bool = True,
    ):
        self.problem, self.limits, self.progress = problem, limits, progress
        self.known: dict[Chosen, float] = {}
        self.trajectory: list[Improvement] = []
        self.best: Chosen | None = None
        self.measured = 0
        self._measure, self._measure_from = measure, measure_from
        self._seconds = seconds
        self._began = time.perf_counter()
        self._doing = "start"

    def explore(self, start: Chosen, *, plans: int, patience: int | None) -> str:
        """Look, from `start` on, until nothing helps; returns why it ended: 'done', 'patience' or 'seconds'."""
        self.distance(start)
        try:
            self._programs(self._steps_from_the_top(start), plans)
            while True:
                centre = self._best()
                while True:
                    changes = self._steps_around(centre)
                    self._programs(changes, max(plans // FEWER, 1))
                    if centre == self._best():
                        break
                    centre = self._best()
                ended = self._swaps(changes, patience)
                if centre == self._best():
                    return ended
        except OutOfTime:
            return "seconds"

    def distance(self, chosen: Chosen) -> float:
        """What is measured for a plan; OutOfTime if it is too late to begin."""
        if chosen not in self.known:
            value = self.known[chosen] = self._run(self._measure, chosen)
            if self.fits(chosen) and (self.best is None or value < self.known[self.best]):
                self.best = chosen
                self.trajectory.append(Improvement(self.measured, self.elapsed(), value, self._doing))
        return self.known[chosen]

    def _run(self, measure: Measure, chosen: Chosen) -> float:
        self._check_time()
        self.measured += 1
        return measure(self.problem.plan(chosen))

    def fits(self, chosen: Chosen) -> bool:
        """Whether a plan is within the limits."""
        return all(self.problem.cost(name, chosen) <= limit for name, limit in self.limits.items())

    def elapsed(self) -> float:
        """Seconds since the beginning."""
        return time.perf_counter() - self._began

    def _best(self) -> Chosen:
        assert self.best is not None
        return self.best

    def _check_time(self) -> None:
        if self.best is not None and self._seconds is not None and self.elapsed() >= self._seconds:
            raise OutOfTime

    # --- steps ------------------------------------------------------------------------------------

    def _steps_from_the_top(self, start: Chosen) -> Changes:
        """The changes by single units at each lower width, all others at their highest; first that of `start`.

        After a share of the time it ends. What is missing, or more than the law of rounding allows, is by that law.
        """
        top = (0,) * len(start)
        lower = [(u, c) for u in range(len(start)) for c in self._reachable(u) if c]
        spans = [self._span(u) for u in range(len(start))]
        lower.sort(key=lambda one: (abs(one[1] - start[one[0]]), one[1] < start[one[0]], -spans[one[0]], one[0]))
        until = None if self._seconds is None else FIRST_STEPS * self._seconds
        distance = self.distance
        if self._measure_from is not None:
            self._check_time()
            distance = functools.partial(self._run, self._measure_from(self.problem.plan(top)))
        measured = self._changes(top, lower, distance, until)
        found = [self._lawful(u, own) if len(own) > 1 else None for u, own in enumerate(measured)]
        return [self._usual(u, start, found) if own is None else own for u, own in enumerate(found)]

    def _span(self, u: int) -> float:
        """The largest share of a limit that the widths of a unit decide on."""
        costs = self.problem.units[u].costs
        return max(float(max(costs[q]) - min(costs[q])) / max(float(limit), 1e-30) for q, limit in self.limits.items())

    def _usual(self, u: int, start: Chosen, known: Sequence[Mapping[int, float] | None]) -> dict[int, float]:
        """The changes of a unit that was not measured: medians of the others at its widths; without any, `start`."""
        by_bits: dict[int, list[float]] = {}
        for unit, own in zip(self.problem.units, known, strict=True):
            for choice, change in (own or {}).items():
                by_bits.setdefault(unit.choices[choice][0], []).append(change)
        bits = [pair[0] for pair in self.problem.units[u].choices]
        found = {c: statistics.median(by_bits[b]) for c, b in enumerate(bits) if b in by_bits}
        return found if start[u] in found else {start[u]: 0.0}

    def _lawful(self, u: int, changes: Mapping[int, float]) -> dict[int, float]:
        """The changes of a unit from its highest width, none larger than by those of lower widths; missing ones too."""
        bits = [pair[0] for pair in self.problem.units[u].choices]
        power = [4.0**-b - 4.0 ** -bits[0] for b in bits]
        found = self._extrapolated(u, 0, changes, range(len(bits)))
        for choice in range(1, len(bits)):
            lower = [max(changes[c], 0.0) * power[choice] / power[c] for c in changes if c > choice]
            found[choice] = min(lower + ([changes[choice]] if choice in changes else []), default=found[choice])
        return found

    def _steps_around(self, centre: Chosen) -> Changes:
        """The changes by single units, one step down and one up."""
        near = [(u, c) for u, own in enumerate(centre) for c in (own + 1, own - 1) if c in self._reachable(u)]
        return self._changes(centre, near, self.distance)

    def _changes(
        self,
        centre: Chosen,
        steps: list[tuple[int, int]],
        distance: Callable[[Chosen], float],
        until: float | None = None,
    ) -> Changes:
        """What (unit, choice) alone changes, all others as in `centre`; no step is begun after `until` seconds."""
        self._doing = "steps"
        changes: Changes = [{c: 0.0} for c in centre]
        base = distance(centre)
        for u, choice in tracked(steps, "layers", show=self.progress):
            if until is not None and self.elapsed() >= until:
                break
            changes[u][choice] = distance((*centre[:u], choice, *centre[u + 1 :])) - base
        return changes

    def _reachable(self, u: int) -> list[int]:
        """The choices of a unit that fit the limits with all others at their cheapest."""
        unit = self.problem.units[u]
        spare = {q: limit - self.problem.least(q) + min(unit.costs[q]) for q, limit in self.limits.items()}
        return [c for c in range(len(unit.choices)) if all(unit.costs[q][c] <= spare[q] for q in spare)]

    def _extrapolated(
        self, u: int, centre: int, changes: Mapping[int, float], choices: Iterable[int]
    ) -> dict[int, float]:
        """The changes of a unit with more of its `choices`, those on a side of `centre` where one was measured."""
        bits = [pair[0] for pair in self.problem.units[u].choices]
        found = dict(changes)
        for choice in choices:
            side = [c for c in changes if (c > centre) == (choice > centre) and c != centre]
            if choice in changes or not side:
                continue
            nearest = min(side, key=lambda c: abs(c - choice))
            power = 4.0 ** -bits[choice] - 4.0 ** -bits[centre]
            ratio = power / (4.0 ** -bits[nearest] - 4.0 ** -bits[centre])
            known = changes[nearest]  # a loss that fell with the bits, or rose with them, is no trend to go on with
            found[choice] = ratio * (max(known, 0.0) if choice > centre else min(known, 0.0))
        return found

    # --- programs ---------------------------------------------------------------------------------

    def _programs(self, changes: Changes, plans: int) -> None:
        """Measure the plan that `changes` lead to, and the best of those beside it, up to `plans` in all."""
        self._doing = "programs"
        best = self._solved(changes, [sorted(own) for own in changes])
        if best is None:
            return
        self.distance(best)
        for chosen in tracked(self._beside(changes, best)[: plans - 1], "plans", show=self.progress):
            self.distance(chosen)

    def _beside(self, changes: Changes, best: Chosen) -> list[Chosen]:
        """The best plans with one unit held at another width than in `best`, by their predicted loss.

        With a time limit, solving takes at most a part of what is left of it, the nearest widths first; the rest is for
        measuring.
        """
        options = [sorted(own) for own in changes]
        until = None if self._seconds is None else self.elapsed() + SOLVING * (self._seconds - self.elapsed())
        others = [(u, c) for u, own in enumerate(options) for c in own if c != best[u]]
        found: dict[Chosen, float] = {}
        for u, choice in sorted(others, key=lambda one: abs(one[1] - best[one[0]])):
            if until is not None and self.elapsed() >= until:
                break
            chosen = self._solved(changes, [*options[:u], [choice], *options[u + 1 :]])
            if chosen is not None:
                found[chosen] = sum(changed[c] for changed, c in zip(changes, chosen, strict=True))
        return sorted(found, key=lambda chosen: (found[chosen], chosen))

    def _solved(self, changes: Changes, options: list[list[int]]) -> Chosen | None:
        """The plan of least predicted loss with one of `options` for each unit; None if none fits."""
        units = [
            replace(
                unit,
                choices=tuple(unit.choices[c] for c in own),
                loss=tuple(changed[c] for c in own),
                plain=tuple(unit.plain[c] for c in own),
                costs={q: tuple(values[c] for c in own) for q, values in unit.costs.items()},
            )
            for unit, changed, own in zip(self.problem.units, changes, options, strict=True)
        ]
        picked = best_choices(Problem(units=tuple(units), constant=self.problem.constant), self.limits)
        return None if picked is None else tuple(own[c] for own, c in zip(options, picked, strict=True))

    # --- swaps ------------------------------------------------------------------------------------

    def _swaps(self, changes: Changes, patience: int | None) -> str:
        """Try swaps, again after each pass that gained something; returns 'done' or 'patience'."""
        self._doing = "swaps"
        while True:
            before, failed, ended = self._best(), 0, "done"
            for move in tracked(self._moves(changes), "swaps", show=self.progress):
                chosen = self._moved(move)
                if chosen is None or chosen in self.known:
                    continue
                best = self._best()
                self.distance(chosen)
                failed = failed + 1 if best == self._best() else 0
                if failed == patience:
                    ended = "patience"
                    break
            if before == self._best():
                return ended

    def _moves(self, changes: Changes) -> list[tuple[tuple[int, int], ...]]:
        """(unit, step down) once or twice, by the predicted change: one unit down and another up, or one alone."""
        centre = self._best()
        gains: dict[tuple[int, int], float] = {}
        for u, own in enumerate(centre):
            seen = {c: value - changes[u].get(own, 0.0) for c, value in changes[u].items()}
            near = [c for c in range(own - SWAPPED, own + SWAPPED + 1) if c != own and c in self._reachable(u)]
            whole = self._extrapolated(u, own, seen, near)
            gains |= {(u, c - own): whole.get(c, 0.0) for c in near}
        moves: list[tuple[tuple[int, int], ...]] = [(one,) for one in gains]
        moves += [(down, up) for down in gains for up in gains if down[1] > 0 > up[1] and down[0] != up[0]]
        return sorted(moves, key=lambda move: (sum(gains[one] for one in move), move))

    def _moved(self, move: tuple[tuple[int, int], ...]) -> Chosen | None:
        """The best plan with `move` made; None if it has no such width or does not fit."""
        chosen = list(self._best())
        for u, step in move:
            chosen[u] += step
            if not 0 <= chosen[u] < len(self.problem.units[u].choices):
                return None
        return tuple(chosen) if self.fits(tuple(chosen)) else None
