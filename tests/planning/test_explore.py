"""The way from a plan to a better one, on distances made of numbers: against brute force, within limits, in time."""

import itertools
import random
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest

from bitdial import BitPlan
from bitdial.planning import explore
from bitdial.planning.cost import Costs, LayerCosts
from bitdial.planning.explore import Chosen, Explorer
from bitdial.planning.problem import Problem, build_problem

pytest.importorskip("highspy")

WIDTHS = (8, 6, 4, 2)


def make_problem(sizes: list[int], **settings: Any) -> Problem:
    names = [f"layer{i}" for i in range(len(sizes))]
    layers = {
        name: LayerCosts(
            weights=8 * size, out_channels=1, macs=size, inputs=1, scale_bytes=0, norm_bytes=0, quantises_input=True
        )
        for name, size in zip(names, sizes, strict=True)
    }
    costs = Costs(layers=layers, bit_choices=dict.fromkeys(names, WIDTHS), float_bytes=7)
    losses = {name: {b: float(8 - b) for b in WIDTHS} for name in names}
    return build_problem(costs, losses, dict.fromkeys(names, 1.0), **settings)


def feasible(problem: Problem, limit: int) -> list[Chosen]:
    every = itertools.product(*(range(len(unit.choices)) for unit in problem.units))
    return [chosen for chosen in every if problem.cost("bytes", chosen) <= limit]


def additive(weights: list[float]) -> Callable[[BitPlan], float]:
    return lambda plan: sum(w * 4.0 ** -plan[f"layer{i}"][0] for i, w in enumerate(weights))


def uniform(problem: Problem, place: int = 2) -> Chosen:
    return tuple(min(place, len(unit.choices) - 1) for unit in problem.units)


def explored(problem: Problem, limit: int, measure: Callable[[BitPlan], float], **settings: Any) -> Explorer:
    found = Explorer(problem, {"bytes": Fraction(limit)}, measure, progress=False)
    found.explore(uniform(problem), **{"plans": 50, "patience": None, **settings})
    return found


def test_distances_that_add_up_end_at_the_optimum_of_the_first_program() -> None:
    for seed in range(5):
        rng = random.Random(seed)
        problem = make_problem([rng.randint(1, 20) for _ in range(5)])
        measure = additive([10 ** rng.uniform(-2, 2) for _ in range(5)])
        limit = int(problem.cost("bytes", uniform(problem)))
        found = explored(problem, limit, measure, plans=1)
        least = min(measure(problem.plan(chosen)) for chosen in feasible(problem, limit))
        assert found.known[found.best] == pytest.approx(least, rel=1e-12)  # type: ignore[index]
        singles = 5 * (len(WIDTHS) - 1)
        program = [one for one in found.trajectory if one.plans <= 2 + singles + 1]
        assert program[-1].distance == pytest.approx(least, rel=1e-12)


def test_distances_that_do_not_add_up_end_near_the_optimum_and_within_the_limit() -> None:
    """Products of neighbours make single steps mislead; swaps and new steps make up for it."""
    places, measured, plans = [], [], []
    for seed in range(6):
        rng = random.Random(100 + seed)
        problem = make_problem([rng.randint(1, 9) for _ in range(5)])
        weights = [rng.uniform(0.1, 3) for _ in range(5)]
        pairs = {(i, j): rng.uniform(-6, 20) for i in range(5) for j in range(i)}

        def measure(plan: BitPlan, weights: list[float] = weights, pairs: Any = pairs) -> float:
            noise = [w * 2.0 ** -plan[f"layer{i}"][0] for i, w in enumerate(weights)]
            return sum(noise) + sum(value * noise[i] * noise[j] for (i, j), value in pairs.items())

        limit = int(problem.cost("bytes", uniform(problem)))
        found = explored(problem, limit, measure)
        assert found.best is not None
        assert problem.cost("bytes", found.best) <= limit
        every = sorted(measure(problem.plan(chosen)) for chosen in feasible(problem, limit))
        places.append(every.index(found.known[found.best]))
        measured.append(len(found.known))
        plans.append(len(every))
    assert places.count(0) >= 5
    assert max(places) <= 2
    assert sum(measured) < sum(plans) / 3


def test_first_steps_do_not_gain_by_errors_that_are_there_already() -> None:
    """Each layer adds 2^-bits to one sum, which begins below 0: alone, a layer that goes down brings it nearer to 0."""
    problem = make_problem([5, 4, 3, 2])
    weights = [1.0, 2.0, 3.0, 4.0]

    def total(plan: BitPlan) -> float:
        return sum(w * 2.0 ** -plan[f"layer{i}"][0] for i, w in enumerate(weights))

    limits = {"bytes": problem.cost("bytes", uniform(problem))}
    measure: Callable[[BitPlan], float] = lambda plan: (total(plan) - 0.5) ** 2  # noqa: E731
    plain = Explorer(problem, limits, measure, progress=False)
    apart = Explorer(
        problem, limits, measure, measure_from=lambda top: lambda plan: (total(plan) - total(top)) ** 2, progress=False
    )
    for explorer in (plain, apart):
        explorer.distance(uniform(problem))
    seen = [value for own in plain._steps_from_the_top(uniform(problem)) for value in own.values()]
    assert min(seen) < 0
    steps = apart._steps_from_the_top(uniform(problem))
    for weight, own in zip(weights, steps, strict=True):
        assert own == pytest.approx({c: (weight * (2.0**-b - 2.0**-8)) ** 2 for c, b in enumerate(WIDTHS) if c in own})
        assert set(own) >= {0, 2, 3}
    assert len(apart.known) == 1
    assert apart.measured > 8  # these are measured too, and count


def test_plans_beyond_the_limit_are_measured_as_steps_but_never_best() -> None:
    problem = make_problem([4, 4])
    limit = int(problem.cost("bytes", (2, 2)))
    found = explored(problem, limit, additive([1, 1]))
    assert any(problem.cost("bytes", chosen) > limit for chosen in found.known)
    assert found.best == (2, 2)
    assert [one.by for one in found.trajectory] == ["start"]


def test_what_cannot_fit_is_not_measured() -> None:
    problem = make_problem([100, 1])
    limit = int(problem.cost("bytes", (2, 2)))  # the large layer cannot go up, whatever the other does
    seen: list[BitPlan] = []

    def measure(plan: BitPlan) -> float:
        seen.append(plan)
        return additive([1, 1])(plan)

    explored(problem, limit, measure)
    assert {plan["layer0"][0] for plan in seen} == {8, 4, 2}  # 8 where all are at their highest
    assert len(seen) == len(set(seen))  # each plan once


def test_groups_and_pins_stay_as_they_are() -> None:
    problem = make_problem([3, 3, 5, 2], groups=[["layer0", "layer2"]], pinned={"layer3": (2, 8)})
    found = explored(problem, 60, additive([5, 0.1, 1, 1]))
    assert {len({problem.plan(chosen)[name] for name in ("layer0", "layer2")}) for chosen in found.known} == {1}
    assert {problem.plan(chosen)["layer3"] for chosen in found.known} == {(2, 8)}


def test_swaps_find_what_no_program_says() -> None:
    """One pair of layers is better together at 2 and 8 bits, which neither step alone shows."""
    problem = make_problem([2, 2, 2])

    def measure(plan: BitPlan) -> float:
        bits = tuple(plan[f"layer{i}"][0] for i in range(3))
        return 0.5 if bits == (6, 2, 4) else 1.0 + abs(bits[0] - 4) + abs(bits[1] - 4) + abs(bits[2] - 4)

    found = explored(problem, int(problem.cost("bytes", (2, 2, 2))), measure, plans=1)
    assert found.best == (1, 3, 2)
    assert found.trajectory[-1].by == "swaps"


def test_patience_ends_the_swaps() -> None:
    problem = make_problem([2] * 6)
    limit = int(problem.cost("bytes", uniform(problem)))
    counts = {}
    for patience in (1, 5, None):
        found = Explorer(problem, {"bytes": Fraction(limit)}, additive([1] * 6), progress=False)
        ended = found.explore(uniform(problem), plans=1, patience=patience)
        assert ended == ("done" if patience is None else "patience")
        counts[patience] = len(found.known)
    assert counts[1] < counts[5] < counts[None]
    assert counts[5] - counts[1] == 4


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """A clock that only moves when it is told to."""
    now = [1000.0]
    monkeypatch.setattr(explore.time, "perf_counter", lambda: now[0])

    def wait(seconds: float) -> None:
        now[0] += seconds

    return wait


def test_time_limits_hold_at_every_stage(clock: Callable[[float], None]) -> None:
    """Each plan takes a second. After the limit none is begun, and the best so far stands; the start always counts."""
    problem = make_problem([5, 4, 3, 2, 1])
    limit = int(problem.cost("bytes", uniform(problem)))
    measure = additive([0.01, 0.1, 1, 10, 100])

    def slow(plan: BitPlan) -> float:
        clock(1.0)
        return measure(plan)

    best = []
    for seconds in (0.5, 1, 4, 9, 16, 22, 30, 500):
        found = Explorer(problem, {"bytes": Fraction(limit)}, slow, seconds=seconds, progress=False)
        ended = found.explore(uniform(problem), plans=50, patience=None)
        assert ended == ("done" if seconds == 500 else "seconds")
        assert len(found.known) <= max(seconds, 1)
        assert found.best is not None
        assert found.fits(found.best)
        assert found.known[found.best] == min(v for chosen, v in found.known.items() if found.fits(chosen))
        best.append(found.known[found.best])
    assert best[0] == measure(problem.plan(uniform(problem)))
    assert best[0] == best[2] > best[4] >= best[5]  # at half the time the programs begin, with what was measured
    assert best[-1] == min(measure(problem.plan(chosen)) for chosen in feasible(problem, limit))


def test_widths_that_were_not_measured_follow_the_power_of_rounding() -> None:
    problem = make_problem([1])
    found, every = Explorer(problem, {}, lambda plan: 0.0, progress=False), range(4)
    # bits 8, 6, 4, 2 around 6: from 4 bits to 2, errors of power 4^-bits grow by (4^-2 - 4^-6) / (4^-4 - 4^-6) = 17
    assert found._extrapolated(0, 1, {1: 0.0, 2: 0.3}, every) == pytest.approx({1: 0.0, 2: 0.3, 3: 5.1})
    # around 4: from 6 to 8 bits there is little left to gain
    whole = found._extrapolated(0, 2, {2: 0.0, 1: -0.15, 3: 1.0}, every)
    assert whole == pytest.approx({2: 0.0, 1: -0.15, 3: 1.0, 0: -0.15 * 255 / 240})
    # no trend that fewer bits are better; and nothing of a side that nobody looked at
    assert found._extrapolated(0, 1, {1: 0.0, 2: -0.3}, every) == {1: 0.0, 2: -0.3, 3: 0.0}
    assert found._extrapolated(0, 1, {1: 0.0}, every) == {1: 0.0}
    assert found._extrapolated(0, 1, {1: 0.0, 2: 0.3}, [2]) == {1: 0.0, 2: 0.3}


def test_small_changes_count_with_their_share_of_larger_ones() -> None:
    """Whatever is common to all steps, as a floor of 0.01, is taken off where a lower width stands out from it."""
    problem = make_problem([1])
    found = Explorer(problem, {}, lambda plan: 0.0, progress=False)
    power = [4.0**-b - 4.0**-8 for b in WIDTHS]
    whole = found._lawful(0, {0: 0.0, 1: 0.01, 2: 0.0125, 3: 0.05})
    assert whole == pytest.approx({0: 0.0, 1: 0.05 * power[1] / power[3], 2: 0.05 * power[2] / power[3], 3: 0.05})
    steep = {0: 0.0, 1: 0.001, 2: 0.1, 3: 9.0}  # falls faster than the law: as measured
    assert found._lawful(0, steep) == steep
    assert found._lawful(0, {0: 0.0, 2: 0.1}) == pytest.approx(  # missing ones on both sides
        {0: 0.0, 1: 0.1 * power[1] / power[2], 2: 0.1, 3: 0.1 * power[3] / power[2]}
    )
    assert found._lawful(0, {0: 0.0, 1: 0.01, 2: -0.2, 3: -1.0})[1] == 0  # gains are no measure of losses
    assert found._lawful(0, {0: 0.0, 1: 0.01, 2: -0.2, 3: -1.0})[3] == -1


def test_one_layer_and_limits_that_leave_one_plan() -> None:
    for sizes, place in (([3], 2), ([3], 3), ([3, 5], 3)):
        problem = make_problem(sizes)
        start = uniform(problem, place)
        found = Explorer(problem, {"bytes": problem.cost("bytes", start)}, additive([1] * len(sizes)), progress=False)
        assert found.explore(start, plans=50, patience=None) == "done"
        assert found.best == start


def test_large_units_are_measured_first_and_the_rest_is_taken_for_usual(clock: Callable[[float], None]) -> None:
    """With time for a few steps, layers that were not measured may still have other widths than the start's."""
    problem = make_problem([1, 9, 1, 5, 1])
    limit, seen = int(problem.cost("bytes", uniform(problem))), list[tuple[int, ...]]()

    def slow(plan: BitPlan) -> float:
        clock(1.0)
        seen.append(tuple(pair[0] for pair in plan.values()))
        return additive([5.0, 0.01, 5.0, 0.01, 5.0])(plan)

    found = Explorer(problem, {"bytes": Fraction(limit)}, slow, seconds=10, progress=False)
    found.explore(uniform(problem), plans=5, patience=None)
    assert seen[1:4] == [(8, 8, 8, 8, 8), (8, 4, 8, 8, 8), (8, 8, 8, 4, 8)]
    assert found.best is not None
    assert problem.plan(found.best)["layer4"][0] > 4, "small and not measured in time"
    known = [None, {0: 0.0, 1: 1.0, 2: 2.0, 3: 3.0}, None, {0: 0.0, 1: 3.0, 2: 4.0, 3: 5.0}, None]
    assert found._usual(0, uniform(problem), known) == {0: 0.0, 1: 2.0, 2: 3.0, 3: 4.0}
    assert found._usual(0, uniform(problem), [None] * 5) == {2: 0.0}
