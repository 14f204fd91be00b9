"""The way from a uniform plan to a better one by measuring: steps of single layers, integer programs, swaps.

    1. steps       each unit (a layer, or layers that share bits) at its other widths, all else at the centre; at first
                   the centre is the uniform plan
    2. programs    with the measured changes as losses, the best plan within the budgets, and the best ones with each
                   unit held at each other width; those of least predicted loss are measured
    3. again       around the best plan so far, each unit one step up and one step down, until nothing is gained
    4. swaps       one unit down and another up, also one alone, by what the steps predict, until none helps; then 3.

Measured changes add up only roughly, and less so the further a plan is from the centre. So a plan is believed only when
it has been measured itself, and the programs of step 3 go no further than one step from what was measured.

A width that was not measured (time ran out, or a swap went beyond it) takes its loss from the nearest one that was, on
the same side of the centre. Rounding errors have a power of about 4^-bits, so changes are taken in proportion to
4^-bits - 4^-centre: each bit less costs four times as much, and there is little left to gain at the top.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction

from bitdial.dial.plan import BitPlan
from bitdial.planning.problem import Problem
from bitdial.planning.progress import tracked
from bitdial.planning.solve import best_choices

FIRST_STEPS = 0.5  # the share of the time after which the first steps give way to the programs
FEWER = 5  # later programs have this part of the plans of the first

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

    `measure` gives the distance of a plan. A plan is measured once. After `seconds` no other is begun.
    """

    def __init__(
        self,
        problem: Problem,
        limits: Mapping[str, Fraction],
        measure: Callable[[BitPlan], float],
        *,
        seconds: float | None = None,
        progress: bool = True,
    ):
        self.problem, self.limits, self.progress = problem, limits, progress
        self.known: dict[Chosen, float] = {}
        self.trajectory: list[Improvement] = []
        self.best: Chosen | None = None
        self._measure = measure
        self._seconds = seconds
        self._began = time.perf_counter()
        self._doing = "start"

    def explore(self, start: Chosen, *, plans: int, patience: int | None) -> str:
        """Look, from `start` on, until nothing helps; returns why it ended: 'done', 'patience' or 'seconds'."""
        self.distance(start)
        try:
            everywhere = max(len(unit.choices) for unit in self.problem.units)
            changes = self._programs(start, everywhere, plans, time_share=FIRST_STEPS)
            while True:
                centre = self._best()
                while True:
                    changes = self._programs(centre, 1, max(plans // FEWER, 1))
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
            self._check_time()
            value = self.known[chosen] = self._measure(self.problem.plan(chosen))
            if self.fits(chosen) and (self.best is None or value < self.known[self.best]):
                self.best = chosen
                self.trajectory.append(Improvement(len(self.known), self.elapsed(), value, self._doing))
        return self.known[chosen]

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

    def _programs(self, centre: Chosen, reach: int, plans: int, time_share: float = 1.0) -> Changes:
        """Measure steps around `centre`, then the plans that they lead to; returns the changes."""
        changes = self._steps(centre, reach, time_share)
        self._doing = "programs"
        for chosen in tracked(self._promising(changes, plans), "plans", show=self.progress):
            self.distance(chosen)
        return changes

    def _steps(self, centre: Chosen, reach: int, time_share: float) -> Changes:
        """The changes by single units, up to `reach` widths from `centre`; ends at a share of the time, nearest first.

        What it had no time for is extrapolated; a unit of which nothing was measured has no other choice.
        """
        self._doing = "steps"
        base = self.known[centre]
        changes: Changes = [{c: 0.0} for c in centre]
        near_first = [
            (u, centre[u] + sign * step)
            for step in range(1, reach + 1)
            for u in range(len(centre))
            for sign in (1, -1)  # choices go from many bits to few: down, then up
            if centre[u] + sign * step in self._reachable(u)
        ]
        for u, choice in tracked(near_first, "layers", show=self.progress):
            if self._seconds is not None and time_share < 1 and self.elapsed() >= time_share * self._seconds:
                break
            changes[u][choice] = self.distance((*centre[:u], choice, *centre[u + 1 :])) - base
        return [self._extrapolated(u, centre[u], own, reach) for u, own in enumerate(changes)]

    def _reachable(self, u: int) -> list[int]:
        """The choices of a unit that fit the limits with all others at their cheapest."""
        unit = self.problem.units[u]
        spare = {q: limit - self.problem.least(q) + min(unit.costs[q]) for q, limit in self.limits.items()}
        return [c for c in range(len(unit.choices)) if all(unit.costs[q][c] <= spare[q] for q in spare)]

    def _extrapolated(self, u: int, centre: int, changes: Mapping[int, float], reach: int) -> dict[int, float]:
        """The changes of a unit up to `reach` widths from `centre`, on a side of it where one was measured."""
        bits = [pair[0] for pair in self.problem.units[u].choices]
        found = dict(changes)
        for choice in range(max(centre - reach, 0), min(centre + reach + 1, len(bits))):
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

    def _promising(self, changes: Changes, count: int) -> list[Chosen]:
        """Up to `count` plans of least predicted loss: the best, and the best with each unit at each other width."""
        options = [sorted(own) for own in changes]
        best = self._solved(changes, options)
        if best is None:
            return []
        found = {best: self._predicted(changes, best)}
        for u, choice in [(u, c) for u, own in enumerate(options) for c in own if c != best[u]]:
            self._check_time()
            held = [*options[:u], [choice], *options[u + 1 :]]
            chosen = self._solved(changes, held)
            if chosen is not None:
                found.setdefault(chosen, self._predicted(changes, chosen))
        return sorted(found, key=lambda chosen: (found[chosen], chosen))[:count]

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

    def _predicted(self, changes: Changes, chosen: Chosen) -> float:
        return sum(own[c] for own, c in zip(changes, chosen, strict=True))

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
        """(unit, step) once or twice, by the predicted change: one unit down and another up, or one alone."""
        centre = self._best()
        gains: dict[tuple[int, int], float] = {}
        for u, own in enumerate(centre):
            seen = {c: value - changes[u].get(own, 0.0) for c, value in changes[u].items()}
            whole = self._extrapolated(u, own, seen, 1)
            gains |= {(u, step): whole.get(own + step, 0.0) for step in (1, -1)}
        moves: list[tuple[tuple[int, int], ...]] = [(one,) for one in gains]
        moves += [((u, 1), (v, -1)) for u in range(len(centre)) for v in range(len(centre)) if u != v]
        return sorted(moves, key=lambda move: (sum(gains[one] for one in move), move))

    def _moved(self, move: tuple[tuple[int, int], ...]) -> Chosen | None:
        """The best plan with `move` made; None if it has no such width or does not fit."""
        chosen = list(self._best())
        for u, step in move:
            chosen[u] += step
            if not 0 <= chosen[u] < len(self.problem.units[u].choices):
                return None
        return tuple(chosen) if self.fits(tuple(chosen)) else None
