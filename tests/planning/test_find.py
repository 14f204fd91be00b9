"""The search against brute force: every kind of budget, both objectives, groups and pins; and what must hold always."""

import itertools
import json
import logging
import math
import random
import subprocess
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from bitdial import (
    BitPlan,
    QuantConfig,
    Rule,
    accuracy,
    at_bits,
    get_bits,
    load,
    load_trainable,
    prepare,
    save,
    set_bits,
)
from bitdial.errors import BitdialError, BudgetError, ConfigError, MissingDependencyError, PlanError, QuantizationError
from bitdial.planning import Candidate, candidates, evaluate_plans, pareto_front, quantization_errors, search
from bitdial.planning.cost import QUANTITIES, Costs, LayerCosts, as_written, measure_costs
from bitdial.planning.problem import LayerLosses, Problem, build_problem, layer_losses, monotone
from bitdial.planning.solve import solve

pytest.importorskip("highspy")

# --- instances made of numbers, and brute force over them ---------------------------------------


class Instance:
    """Random layers, losses, sensitivities, groups and pins; everything is a whole number, so ties are exact."""

    def __init__(self, seed: int, *, layers: int = 5, widths: tuple[int, ...] = (8, 4, 2), odd_latency: bool = False):
        self.rng = rng = random.Random(seed)
        self.widths = widths
        self.names = [f"layer{i}" for i in range(layers)]
        alike = rng.random() < 0.3  # layers that differ in nothing tie
        size = rng.randint(1, 50)
        parts = {}
        for name in self.names:
            size = size if alike else rng.randint(1, 50)
            parts[name] = LayerCosts(
                weights=size,
                out_channels=1,
                macs=size * (3 if alike else rng.randint(1, 9)),
                inputs=size if alike else rng.randint(1, 40),
                scale_bytes=rng.randint(0, 9),
                norm_bytes=rng.randint(0, 9),
                quantises_input=alike or rng.random() < 0.8,
            )
        self.costs = Costs(
            layers=parts,
            bit_choices=dict.fromkeys(self.names, widths),
            float_bytes=rng.randint(0, 100),
            latency={name: self._times(odd_latency) for name in self.names},
        )
        errors = self._errors()
        self.losses: LayerLosses = {name: errors if alike else self._errors() for name in self.names}
        self.sensitivity: dict[str, float] = {name: 2 if alike else rng.randint(-2, 9) for name in self.names}
        self.groups = [rng.sample(self.names, 2) for _ in range(rng.choice([0, 0, 1, 2]))]
        self.pinned: dict[str, Any] = {}
        if rng.random() < 0.3:
            self.pinned[rng.choice(self.names)] = rng.choice([*widths, (widths[0], widths[-1])])

    def _times(self, odd: bool) -> dict[Any, float]:
        times = [self.rng.randint(0, 20) / 10 for _ in self.widths]
        times = times if odd else sorted(times, reverse=True)
        table: dict[Any, float] = dict(zip(self.widths, times, strict=True))
        return table | {(self.widths[0], self.widths[-1]): times[0]}

    def _errors(self) -> dict[int, float]:
        values = sorted(self.rng.randint(0, 30) for _ in self.widths)
        return {b: float(v) for b, v in zip(self.widths, values, strict=True)}

    def problem(self, sensitivity: dict[str, float] | None = None) -> Problem:
        chosen = sensitivity or self.sensitivity
        return build_problem(self.costs, self.losses, chosen, groups=self.groups, pinned=self.pinned)

    def plans(self) -> list[BitPlan]:
        """Every plan that keeps to groups and pins."""
        found = []
        for pairs in itertools.product([(b, b) for b in self.widths] + self._odd_pairs(), repeat=len(self.names)):
            plan = dict(zip(self.names, pairs, strict=True))
            shared = all(len({plan[n] for n in group}) == 1 for group in self.groups)
            held = all(plan[n] == (b if isinstance(b, tuple) else (b, b)) for n, b in self.pinned.items())
            if shared and held and all(p[0] == p[1] or n in self._tied_to_pinned() for n, p in plan.items()):
                found.append(BitPlan(plan))
        return found

    def _odd_pairs(self) -> list[tuple[int, int]]:
        return [b for b in self.pinned.values() if isinstance(b, tuple)]

    def _tied_to_pinned(self) -> set[str]:
        reached = set(self.pinned)
        for _ in self.names:
            reached |= {n for group in self.groups if reached & set(group) for n in group}
        return reached

    def loss(self, plan: BitPlan, sensitivity: dict[str, float] | None = None) -> float:
        chosen = sensitivity or self.sensitivity
        return math.fsum(max(chosen[n], 0) * self.losses[n][plan[n][0]] for n in self.names)

    def cost(self, plan: BitPlan, quantity: str) -> Fraction:
        constant = self.costs.float_bytes if quantity == "bytes" else 0
        return self.costs.exact(dict(plan))[quantity] + constant

    def budgets(self, names: list[str]) -> dict[str, Fraction]:
        """Budgets at the cost of some plan or between those of two."""
        plans = self.plans()
        found = {}
        for name in names:
            one, other = (self.cost(self.rng.choice(plans), name) for _ in range(2))
            found[name] = self.rng.choice([one, (one + other) / 2])
        return found

    def feasible(self, budgets: dict[str, Fraction]) -> list[BitPlan]:
        return [p for p in self.plans() if all(self.cost(p, name) <= limit for name, limit in budgets.items())]


SEEDS = st.integers(0, 2**32)
KINDS = [[name] for name in QUANTITIES] + [["several"]]


def names_of(kind: list[str], rng: random.Random) -> list[str]:
    return rng.sample(QUANTITIES, rng.randint(2, 4)) if kind == ["several"] else kind


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind[0])
@settings(max_examples=25, deadline=None)
@given(seed=SEEDS, odd_latency=st.booleans())
def test_optimal_against_brute_force(kind: list[str], seed: int, odd_latency: bool) -> None:
    one = Instance(seed, odd_latency=odd_latency)
    budgets = one.budgets(names_of(kind, one.rng))
    feasible = one.feasible(budgets)
    if not feasible:
        with pytest.raises(BudgetError):
            solve(one.problem(), budgets)
        return
    problem = one.problem()
    chosen = solve(problem, budgets)
    plan = problem.plan(chosen)
    assert plan in feasible
    assert one.loss(plan) == problem.loss(chosen) == min(map(one.loss, feasible))


@settings(max_examples=25, deadline=None)
@given(seed=SEEDS)
def test_optimal_where_losses_span_many_orders_of_magnitude(seed: int) -> None:
    """At a generous budget the optimum is far below the largest loss, which must not drown it."""
    one = Instance(seed)
    one.losses = {n: monotone({b: 10 ** one.rng.uniform(-9, 3) for b in one.widths}) for n in one.names}
    one.sensitivity = {n: 10 ** one.rng.uniform(-4, 2) for n in one.names}
    budgets = one.budgets(["average_bits"])
    problem = one.problem()
    best = min(map(one.loss, one.feasible(budgets)))
    assert problem.loss(solve(problem, budgets)) == pytest.approx(best, rel=1e-8)


@settings(max_examples=25, deadline=None)
@given(seed=SEEDS)
def test_the_same_plan_each_time_and_whatever_the_order_of_budgets(seed: int) -> None:
    one = Instance(seed)
    budgets = one.budgets(one.rng.sample(QUANTITIES, 2))
    if one.feasible(budgets):
        again = dict(reversed(budgets.items()))
        assert solve(one.problem(), budgets) == solve(one.problem(), again) == solve(one.problem(), budgets)


@settings(max_examples=100, deadline=None)
@given(seed=SEEDS, rise=st.integers(1, 12))
def test_raising_one_sensitivity_never_lowers_its_bits(seed: int, rise: int) -> None:
    one = Instance(seed)
    budgets = one.budgets(names_of(one.rng.choice(KINDS), one.rng))
    if not one.feasible(budgets):
        return
    before, name = one.problem(), one.rng.choice(one.names)
    after = one.problem({**one.sensitivity, name: one.sensitivity[name] + rise})
    was, now = (p.plan(solve(p, budgets))[name][0] for p in (before, after))
    assert now >= was


@settings(max_examples=60, deadline=None)
@given(seed=SEEDS)
def test_more_budget_never_raises_the_loss(seed: int) -> None:
    one = Instance(seed)
    names = names_of(one.rng.choice(KINDS), one.rng)
    tight = one.budgets(names)
    if not one.feasible(tight):
        return
    wide = {name: limit + one.rng.randint(0, 3) * abs(limit) / 4 for name, limit in tight.items()}
    problem = one.problem()
    assert problem.loss(solve(problem, wide)) <= problem.loss(solve(problem, tight))


@settings(max_examples=40, deadline=None)
@given(seed=SEEDS)
def test_an_infeasible_budget_names_the_nearest(seed: int) -> None:
    one = Instance(seed)
    name = one.rng.choice(QUANTITIES)
    least = min(one.cost(plan, name) for plan in one.plans())
    with pytest.raises(BudgetError, match=name) as caught:
        solve(one.problem(), {name: least - Fraction(1, 1000)})
    nearest = caught.value.nearest[name]
    assert nearest == pytest.approx(float(least))
    problem = one.problem()
    assert problem.cost(name, solve(problem, {name: as_written(nearest)})) == least  # asked for, it can be met


@settings(max_examples=40, deadline=None)
@given(seed=SEEDS)
def test_budgets_that_can_be_met_alone_but_not_together(seed: int) -> None:
    one = Instance(seed, odd_latency=True)
    plans, names = one.plans(), ["latency", "bytes"]
    budgets = {name: min(one.cost(plan, name) for plan in plans) for name in names}
    if one.feasible(budgets):
        return
    with pytest.raises(BudgetError, match="not all together") as caught:
        solve(one.problem(), budgets)
    for name, other in (names, names[::-1]):
        expected = min(one.cost(plan, name) for plan in plans if one.cost(plan, other) <= budgets[other])
        assert caught.value.nearest[name] == pytest.approx(float(expected))


def test_three_budgets_of_which_two_conflict() -> None:
    """Leaving out one of three is not enough where the others cannot be met together either."""
    costs = Costs(
        layers={"a": LayerCosts(weights=8, out_channels=1, macs=1, inputs=1, scale_bytes=0, norm_bytes=0,
                                quantises_input=True)},
        bit_choices={"a": (8, 4, 2)},
        float_bytes=0,
        latency={"a": {8: 1.0, 4: 2.0, 2: 3.0}},
    )  # fmt: skip
    problem = build_problem(costs, {"a": {8: 0.0, 4: 1.0, 2: 2.0}}, {"a": 1})
    limits = {"latency": Fraction(1), "bytes": Fraction(2), "average_bits": Fraction(2)}
    with pytest.raises(BudgetError, match="not all together") as caught:
        solve(problem, limits)
    assert caught.value.nearest == {"latency": 3}
    two = {"latency": Fraction(2), "bytes": Fraction(2)}
    with pytest.raises(BudgetError, match=r"latency <= 2 \(the least is 3\), or bytes <= 2 \(the least is 4\)"):
        solve(problem, two)


def test_ties_go_to_the_earlier_layers_and_the_fewer_bits() -> None:
    one = Instance(0, layers=6)
    one.costs = Costs(
        layers=dict.fromkeys(one.names, one.costs.layers["layer0"]),
        bit_choices=one.costs.bit_choices,
        float_bytes=0,
    )
    one.losses = {name: {8: 1.0, 4: 2.0, 2: 8.0} for name in one.names}
    one.sensitivity, one.groups, one.pinned = dict.fromkeys(one.names, 1.0), [], {}
    problem = one.problem()
    plan = problem.plan(solve(problem, {"layer_average_bits": Fraction(5)}))
    assert [plan[name][0] for name in one.names] == [8, 4, 4, 4, 4, 4]


def test_bits_that_gain_nothing_are_not_spent() -> None:
    one = Instance(0, layers=6)
    one.sensitivity, one.groups, one.pinned = dict.fromkeys(one.names, 1.0), [], {}
    shapes = [{8: 1.0, 4: 1.0, 2: 1.0}, {8: 1.0, 4: 1.0, 2: 5.0}, {8: 0.0, 4: 1.0, 2: 1.0}]
    one.losses = {name: shapes[i % 3] for i, name in enumerate(one.names)}
    problem = one.problem()
    for budgets in ({}, {"bytes": problem.most("bytes")}):
        plan = problem.plan(solve(problem, budgets))
        assert [plan[name][0] for name in one.names] == [2, 4, 8, 2, 4, 8]


@pytest.mark.parametrize("bits", [2.3, 3.7, 4.9, 7.6])
@pytest.mark.parametrize("span", [0.0, 1.0, 10.0])
def test_optimal_in_a_larger_network(bits: float, span: float) -> None:
    """30 layers, against dynamic programming; losses within one or over twenty orders of magnitude."""
    rng = random.Random(f"{bits} {span}")
    names, widths = [f"layer{i}" for i in range(30)], (8, 6, 4, 2)
    sizes = {name: rng.randint(1, 15) for name in names}
    part = {"out_channels": 1, "macs": 1, "inputs": 1, "scale_bytes": 0, "norm_bytes": 0, "quantises_input": True}
    costs = Costs(
        layers={name: LayerCosts(weights=sizes[name], **part) for name in names},
        bit_choices=dict.fromkeys(names, widths),
        float_bytes=0,
    )
    losses = {n: monotone({b: sizes[n] * 4.0**-b * rng.uniform(0.9, 1.1) for b in widths}) for n in names}
    sensitivity = {name: 10 ** rng.uniform(-span, span) for name in names}
    problem = build_problem(costs, losses, sensitivity)
    plan = problem.plan(solve(problem, {"average_bits": as_written(bits)}))
    # Compared without the loss at 8 bits, beside which the rest can vanish.
    extra = {n: {b: sensitivity[n] * (losses[n][b] - losses[n][8]) for b in widths} for n in names}
    best = least_sum(extra, sizes, as_written(bits) * sum(sizes.values()))
    assert math.fsum(extra[name][plan[name][0]] for name in names) == pytest.approx(best, rel=1e-8, abs=0)


def least_sum(losses: LayerLosses, sizes: dict[str, int], limit: Fraction) -> float:
    """By a table: for each sum of size x bits, the least sum of losses."""
    least = {0: 0.0}
    for name, by_bits in losses.items():
        grown: dict[int, float] = {}
        for spent, loss in least.items():
            for b, more in by_bits.items():
                now = spent + b * sizes[name]
                grown[now] = min(grown.get(now, math.inf), loss + more)
        least = grown
    return min(loss for spent, loss in least.items() if spent <= limit)


def test_the_nearest_value_can_be_asked_for_although_floats_are_rounded() -> None:
    part = LayerCosts(weights=1, out_channels=1, macs=1, inputs=1, scale_bytes=0, norm_bytes=0, quantises_input=True)
    names = ["a", "b", "c"]
    costs = Costs(layers=dict.fromkeys(names, part), bit_choices=dict.fromkeys(names, (8, 4, 2)), float_bytes=0)
    losses: LayerLosses = {name: {8: 0.0, 4: 1.0, 2: 2.0} for name in names}
    problem = build_problem(costs, losses, dict.fromkeys(names, 1.0), pinned={"a": 4})
    with pytest.raises(BudgetError) as caught:
        solve(problem, {"average_bits": Fraction(2)})
    nearest = caught.value.nearest["average_bits"]
    assert 8 / 3 < Fraction(8, 3) <= as_written(nearest)
    solve(problem, {"average_bits": as_written(nearest)})


def test_layers_without_sensitivity_get_what_is_left() -> None:
    one = Instance(3)
    one.sensitivity, one.groups, one.pinned = dict.fromkeys(one.names, -1.0), [], {}
    one.losses = {name: {8: 0.0, 4: 1.0, 2: 5.0} for name in one.names}
    problem = one.problem()
    assert problem.plan(solve(problem, {})) == BitPlan(dict.fromkeys(one.names, 8))
    one.sensitivity["layer3"] = 1.0
    problem = one.problem()
    costs = one.costs.layers
    room = Fraction(2) + Fraction(6 * costs["layer3"].weights, sum(layer.weights for layer in costs.values()))
    plan = problem.plan(solve(problem, {"average_bits": room}))
    assert plan["layer3"] == (8, 8)
    assert all(plan[name] == (2, 2) for name in one.names if name != "layer3")


def test_a_plan_that_only_the_solver_takes_for_feasible_is_cut_off() -> None:
    """BitOps near 10^16, where one too many is within any tolerance of floats."""
    layer = {"out_channels": 1, "weights": 1, "inputs": 1, "scale_bytes": 0, "norm_bytes": 0, "quantises_input": True}
    costs = Costs(
        layers={"a": LayerCosts(macs=10**16 + 1, **layer), "b": LayerCosts(macs=10**16, **layer)},
        bit_choices={"a": (4, 2), "b": (4, 2)},
        float_bytes=0,
    )
    losses: LayerLosses = {"a": {4: 0.0, 2: 9.0}, "b": {4: 0.0, 2: 1.0}}
    problem = build_problem(costs, losses, {"a": 1, "b": 1})
    limit = Fraction(16 * (2 * 10**16 + 1) - 1)  # one short of both at 4 bits
    plan = problem.plan(solve(problem, {"bitops": limit}))
    assert plan == BitPlan({"a": 4, "b": 2})


# --- models -------------------------------------------------------------------------------------


class Net(nn.Module):
    """Five quantised layers, two of them on one weight, between a float stem and a float head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(2, 4, 3, padding=1, bias=False)
        self.a = nn.Conv2d(4, 6, 3, padding=1)
        self.norm = nn.BatchNorm2d(6)
        self.b = nn.Conv2d(6, 6, 3, groups=3)
        self.left = nn.Linear(6, 6)
        self.right = nn.Linear(6, 6)
        self.right.weight = self.left.weight
        self.c = nn.Linear(6, 9)
        self.head = nn.Linear(9, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.b(torch.relu(self.norm(self.a(torch.relu(self.stem(x)))))).relu().mean(dim=(2, 3))
        return self.head(self.c(self.right(self.left(x).relu()).relu()).relu())


LAYERS = ["a", "b", "left", "right", "c"]
BATCH = torch.randn(6, 2, 7, 7, generator=torch.Generator().manual_seed(0))
SENSITIVITY = {"a": 0.5, "b": 2.0, "left": 0.1, "right": -0.3, "c": 1.0}


def prepared(**config: Any) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return prepare(Net(), QuantConfig(**{"start": "3std", "bit_choices": (8, 4, 3, 2), **config}), BATCH).eval()


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return prepared()


@pytest.fixture(scope="module")
def costs(model: nn.Module) -> Costs:
    return measure_costs(model, BATCH[:1], latency={n: {b: float(b) for b in (8, 4, 3, 2)} for n in LAYERS})


def every_plan(costs: Costs, budgets: dict[str, float], **held: int) -> list[BitPlan]:
    """All plans within `budgets` in which left and right, who share a weight, share their bits."""
    found = []
    for widths in itertools.product((8, 4, 3, 2), repeat=4):
        plan = BitPlan(dict(zip(["a", "b", "left", "c"], widths, strict=True)) | {"right": widths[2]})
        spent = costs.of(plan)
        if all(spent[n] <= limit for n, limit in budgets.items()) and all(plan[n][0] == b for n, b in held.items()):
            found.append(plan)
    return found


BUDGETS: list[dict[str, float]] = [
    {"average_bits": 3.1},
    {"layer_average_bits": 4.5},
    {"bytes": 960},
    {"bitops": 90_000},
    {"activation_bytes": 230},
    {"latency": 20},
    {"average_bits": 5, "layer_average_bits": 4, "bytes": 960, "bitops": 150_000, "activation_bytes": 250},
    {},
]


@pytest.mark.parametrize("budgets", BUDGETS, ids=str)
@pytest.mark.parametrize("objective", ["error", "bits"])
def test_search_on_a_model(model: nn.Module, costs: Costs, objective: str, budgets: dict[str, float]) -> None:
    found = search(model, SENSITIVITY, costs, budgets, objective=objective)
    plans = every_plan(costs, budgets)
    assert found.plan in plans
    assert 0 < len(plans) < 4**4 or not budgets  # or the budget asks nothing
    errors = quantization_errors(model)

    def loss(plan: BitPlan) -> float:
        if objective == "bits":
            return sum(max(s, 0) * (8 - plan[n][0]) for n, s in SENSITIVITY.items())
        return sum(max(s, 0) * errors[n][plan[n][0]] for n, s in SENSITIVITY.items())

    assert found.predicted_loss == pytest.approx(min(map(loss, plans)), rel=1e-8)
    assert found.predicted_loss == pytest.approx(loss(found.plan))
    assert found.costs == costs.of(found.plan)
    assert found.budgets == budgets
    assert get_bits(model) == BitPlan(dict.fromkeys(LAYERS, 8))
    set_bits(model, found.plan)  # it is a plan of this model
    set_bits(model, 8)


def test_groups_and_pins_on_a_model(model: nn.Module, costs: Costs) -> None:
    found = search(model, SENSITIVITY, costs, {"average_bits": 4}, groups=[("a", "c")], pinned={"b": 3})
    plans = [p for p in every_plan(costs, {"average_bits": 4}, b=3) if p["a"] == p["c"]]
    assert found.plan in plans
    errors = quantization_errors(model)
    best = min(sum(max(s, 0) * errors[n][p[n][0]] for n, s in SENSITIVITY.items()) for p in plans)
    assert found.predicted_loss == pytest.approx(best)


def test_activation_bits_apart_from_weight_bits(model: nn.Module) -> None:
    plain = measure_costs(model, BATCH[:1])
    found = search(model, SENSITIVITY, plain, {"average_bits": 3}, activation_bits=8, pinned={"c": (2, 4)})
    assert found.plan["c"] == (2, 4)
    assert {found.plan[n][1] for n in LAYERS if n != "c"} == {8}
    with pytest.raises(PlanError, match="bits=5"):
        search(model, SENSITIVITY, plain, {}, activation_bits=5)


def test_more_sensitive_is_not_fewer_bits(model: nn.Module, costs: Costs) -> None:
    """Erratum 6: as printed, the paper's objective would give the most sensitive layer the fewest."""
    for objective, name in itertools.product(("error", "bits"), ["a", "b", "c"]):
        sensitivity = {**dict.fromkeys(LAYERS, 1.0), name: 1000.0}
        plan = search(model, sensitivity, costs, {"layer_average_bits": 3.5}, objective=objective).plan
        assert plan[name][0] == max(pair[0] for pair in plan.values())


@pytest.mark.parametrize("scheme", ["double_rounding", "nested", "truncate", "adabits", "lsq", "dorefa"])
def test_quantization_errors(scheme: str) -> None:
    model = prepared(scheme=scheme)
    errors = quantization_errors(model)
    for name in LAYERS:
        layer: Any = model.get_submodule(name)
        source = layer.weight.double().tanh() if scheme in ("adabits", "dorefa") else layer.weight.double()
        for bits in (8, 4, 3, 2):
            value = layer.weight_quantizer(layer.weight, bits).double()
            assert errors[name][bits] == pytest.approx(float(((source - value) ** 2).sum().detach()))
        assert errors[name][8] < errors[name][2]


def test_a_width_that_errs_more_than_a_lower_one_counts_with_the_lower_ones_error() -> None:
    assert monotone({8: 3.0, 6: 1.0, 4: 2.0, 2: 9.0}) == {8: 1.0, 6: 1.0, 4: 2.0, 2: 9.0}


def test_budgets_are_read_as_written(model: nn.Module, costs: Costs) -> None:
    """2.2 times 5 layers are 11 bits, on whichever side of 2.2 the float lies."""
    for limit in (2.2, 2.4, 2.6, 2.8):
        found = search(model, dict.fromkeys(LAYERS, 1.0), costs, {"layer_average_bits": limit}, objective="bits")
        assert found.costs["layer_average_bits"] == limit


WRONG: list[tuple[dict[str, Any], type[BitdialError], str]] = [
    ({"sensitivity": {**SENSITIVITY, "a": float("nan")}}, ConfigError, "'a': its sensitivity is nan"),
    ({"sensitivity": {**SENSITIVITY, "b": float("inf")}}, ConfigError, "'b': its sensitivity is inf"),
    ({"sensitivity": {"a": 1.0}}, ConfigError, "'b' has no sensitivity"),
    ({"sensitivity": {**SENSITIVITY, "stem": 1.0}}, ConfigError, "name 'stem'"),
    ({"budgets": {"size": 3}}, ConfigError, "budget='size' is not known; choose one of 'average_bits'"),
    ({"budgets": {"bytes": float("nan")}}, ConfigError, "bytes=nan is not a number"),
    ({"budgets": {"bytes": "3"}}, ConfigError, "bytes='3' is not a number"),
    ({"budgets": {"average_bits": 1.9}}, BudgetError, r"average_bits <= 1.9 \(the least is 2\)"),
    ({"budgets": {"bytes": 10, "bitops": 5}}, BudgetError, "bytes <= 10 .* or bitops <= 5"),
    ({"budgets": {"average_bits": 2}, "pinned": {"a": 8}}, BudgetError, "release pinned layers"),
    ({"objective": "loss"}, ConfigError, "objective='loss' is not known"),
    ({"groups": [("a", "stem")]}, PlanError, "a group names 'stem'"),
    ({"pinned": {"stem": 8}}, PlanError, "pinned names 'stem'"),
    ({"pinned": {"a": 5}}, PlanError, "'a': bits=5 is not in bit_choices"),
    ({"pinned": {"a": 8, "b": 4}, "groups": [("a", "b")]}, PlanError, "'a', 'b' share their bits but are pinned"),
    ({"pinned": {"left": 8, "right": 4}}, PlanError, "'left', 'right' share their bits"),
]


@pytest.mark.parametrize("change, kind, message", WRONG, ids=[message[:30] for _, _, message in WRONG])
def test_wrong_arguments(
    model: nn.Module, costs: Costs, change: dict[str, Any], kind: type[BitdialError], message: str
) -> None:
    arguments: dict[str, Any] = {"sensitivity": SENSITIVITY, "budgets": {"average_bits": 4}, **change}
    with pytest.raises(kind, match=message):
        search(model, arguments.pop("sensitivity"), costs, arguments.pop("budgets"), **arguments)


def test_a_latency_budget_needs_times(model: nn.Module) -> None:
    with pytest.raises(ConfigError, match="latency budget needs times"):
        search(model, SENSITIVITY, measure_costs(model, BATCH[:1]), {"latency": 3})


def test_costs_of_another_model(model: nn.Module, costs: Costs) -> None:
    with pytest.raises(ConfigError, match="another model"):
        search(prepared(bit_choices=(8, 4)), SENSITIVITY, costs, {"average_bits": 4})
    with pytest.raises(BitdialError, match="no quantised layer"):
        search(Net(), SENSITIVITY, costs, {"average_bits": 4})


def test_weights_that_are_not_finite(costs: Costs) -> None:
    broken = prepared()
    with torch.no_grad():
        broken.get_submodule("b").weight[0] = float("nan")  # type: ignore[index, operator]
    with pytest.raises(QuantizationError, match="layer 'b'"):
        layer_losses(broken, "error")


def test_without_highspy_the_extra_is_named(model: nn.Module, costs: Costs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "highspy", None)
    with pytest.raises(MissingDependencyError, match=r"highspy is not installed.*bitdial\[search\]"):
        search(model, SENSITIVITY, costs, {"average_bits": 4})


# --- candidates, accuracy, front ----------------------------------------------------------------


def test_the_sweep_of_candidates(model: nn.Module, costs: Costs) -> None:
    found = candidates(model, SENSITIVITY, costs, progress=False)
    assert len({one.plan for one in found}) == len(found) > 10
    assert found[0].plan == BitPlan(dict.fromkeys(LAYERS, 2))
    assert found[-1].plan == BitPlan(dict.fromkeys(LAYERS, 8))
    losses = [one.predicted_loss for one in found]
    assert losses == sorted(losses, reverse=True)
    for one in found:
        assert one.costs["average_bits"] <= one.budgets["average_bits"]
        assert search(model, SENSITIVITY, costs, one.budgets).plan == one.plan


def test_the_alternatives_of_algorithm_2(model: nn.Module, costs: Costs) -> None:
    """Each layer held at each width that the first solution does not give it, where the budget allows that."""
    limit = {"layer_average_bits": 4.0}
    found = candidates(model, SENSITIVITY, costs, {}, alternatives_at=limit, objective="bits", progress=False)
    best = search(model, SENSITIVITY, costs, limit, objective="bits").plan
    assert found[0].plan == best
    expected = {best}
    for name, bits in itertools.product(LAYERS, (8, 4, 3, 2)):
        if bits != best[name][0]:
            try:
                one = search(model, SENSITIVITY, costs, limit, objective="bits", pinned={name: bits})
            except BudgetError:
                continue
            expected.add(one.plan)
    assert {one.plan for one in found} == expected
    assert len(found) > 4


def test_a_sweep_over_two_quantities(model: nn.Module, costs: Costs) -> None:
    swept = {"average_bits": [1.0, 3.0, 5.0], "bitops": [60_000, 200_000]}
    found = candidates(model, SENSITIVITY, costs, swept, progress=False)
    assert 1 < len(found) <= 4  # budgets of 1 bit are left out
    assert all(one.costs[name] <= limit for one in found for name, limit in one.budgets.items())
    with pytest.raises(BudgetError, match="average_bits <= 1"):
        candidates(model, SENSITIVITY, costs, {"average_bits": [1.0]}, progress=False)


def test_progress_is_shown_only_if_asked_for(
    model: nn.Module, costs: Costs, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    swept = {"average_bits": [3.0]}
    candidates(model, SENSITIVITY, costs, swept, progress=False)
    assert capfd.readouterr() == ("", "")  # nor does HiGHS speak
    candidates(model, SENSITIVITY, costs, swept, progress=True)
    assert "sweep" in "".join(capfd.readouterr())
    monkeypatch.setitem(sys.modules, "rich.progress", None)
    with caplog.at_level(logging.INFO):
        assert len(candidates(model, SENSITIVITY, costs, swept, progress=True)) == 1
    assert "rich is not installed" in caplog.text


def test_a_candidate_as_json(model: nn.Module, costs: Costs) -> None:
    one = search(model, SENSITIVITY, costs, {"average_bits": 3})
    stored = one.to_dict()
    assert BitPlan.from_dict(stored.pop("plan")) == one.plan
    assert stored == {"predicted_loss": one.predicted_loss, "costs": one.costs, "budgets": {"average_bits": 3.0}}


def test_a_plan_from_the_search_to_a_live_model(model: nn.Module, costs: Costs, tmp_path: Path) -> None:
    found = candidates(model, SENSITIVITY, costs, {"average_bits": [2.5, 3.0]}, progress=False)
    plans = {f"{one.budgets['average_bits']} bits": one.plan for one in found}
    save(model, tmp_path / "file", plans=plans)
    live = load(tmp_path / "file", Net())
    for name, plan in plans.items():
        set_bits(live, name)
        assert get_bits(live) == plan
        with at_bits(model, plan), torch.no_grad():
            assert torch.equal(live(BATCH), model(BATCH))
    assert list(plans) == ["2.5 bits", "3.0 bits"]
    again = search(load_trainable(tmp_path / "file", Net()), SENSITIVITY, costs, {"average_bits": 8})
    assert again.predicted_loss < 1e-9  # the values of the file's codes have no error at the highest width


@pytest.mark.slow
def test_the_benchmark_runs(tmp_path: Path) -> None:
    options = ["--model", "resnet20", "--budgets", "3", "--generations", "2", "--out", str(tmp_path / "rows.json")]
    script = Path(__file__).resolve().parents[2] / "benchmarks" / "search.py"
    ran = subprocess.run([sys.executable, str(script), *options], timeout=300, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-2000:]
    record = json.loads((tmp_path / "rows.json").read_text())
    assert {"command", "seed", "device", "versions"} <= set(record)
    rows = {(row["instance"], row["search"]): row for row in record["rows"]}
    assert len(rows) == 10
    for (_, name), row in rows.items():
        if "optimal" in row:
            assert row["excess_mean"] >= 0
            assert name != "ilp" or row["optimal"] == row["budgets"] == 3


def test_accuracy_of_plans(model: nn.Module) -> None:
    low, high = BitPlan(default=2), BitPlan({"a": 2}, default=8)
    set_bits(model, BitPlan(default=(4, 8)))
    before = get_bits(model)
    with torch.no_grad():
        targets = model(BATCH).argmax(dim=1)
    given = iter([(BATCH, targets)])  # is gone through once
    plans = [low, Candidate(high, 0.0, {}, {}), low, before]
    found = evaluate_plans(model, plans, given, accuracy, progress=False)
    assert list(found) == [low, high, before]
    assert found[before] == 1.0
    assert get_bits(model) == before
    set_bits(model, low)
    assert found[low] == accuracy(model, [(BATCH, targets)])
    set_bits(model, 8)


def test_a_plan_of_another_model_is_refused_before_anything_runs(model: nn.Module) -> None:
    def never(model: nn.Module, batches: object) -> float:
        pytest.fail("must not run")

    with pytest.raises(PlanError, match="names 'other'"):
        evaluate_plans(model, [BitPlan(default=8), BitPlan({"other": 4}, default=4)], [], never, progress=False)
    for plan in (BitPlan(default=8), 8):
        with pytest.raises(PlanError, match="is one setting where several are taken"):
            evaluate_plans(model, plan, [], never, progress=False)  # type: ignore[arg-type]


@given(points=st.dictionaries(st.integers(), st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=12))
def test_the_front_is_what_nothing_beats(points: dict[int, tuple[float, float]]) -> None:
    front = pareto_front(points)

    def beats(one: tuple[float, float], other: tuple[float, float]) -> bool:
        return one != other and one[0] <= other[0] and one[1] >= other[1]

    assert all(points[key] == value for key, value in front.items())
    assert set(front.values()) == {p for p in points.values() if not any(beats(q, p) for q in points.values())}
    assert len(set(front.values())) == len(front)
    assert list(front.values()) == sorted(front.values())


def test_of_equal_points_the_first_stays_and_nan_is_refused() -> None:
    assert pareto_front({"x": (1, 0.5), "y": (1, 0.5), "z": (2, 0.5)}) == {"x": (1, 0.5)}
    assert pareto_front({}) == {}
    with pytest.raises(ConfigError, match="'x': its cost or accuracy is NaN"):
        pareto_front({"x": (1, float("nan"))})


# --- layers with a width of their own -----------------------------------------------------------


def test_layers_with_a_width_of_their_own_are_pinned_unless_told_otherwise() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    config = QuantConfig(bit_choices=(8, 4, 2), keep_first_last=8, start="lsq", rules=(Rule(pattern="1", bits=4),))
    fixed = prepare(net, config, torch.randn(16, 8))
    costs, even = measure_costs(fixed, torch.zeros(1, 8)), dict.fromkeys("0123", 1.0)
    found = search(fixed, even, costs, {"average_bits": 5.5})
    assert found.plan == BitPlan({"0": 8, "1": 4, "2": 2, "3": 8})
    assert search(fixed, even, costs, {"average_bits": 8}).plan == BitPlan({"0": 8, "1": 4, "2": 8, "3": 8})
    with pytest.raises(BudgetError, match=r"the least is 5\.5"):
        search(fixed, even, costs, {"average_bits": 5})
    released = search(fixed, even, costs, {"average_bits": 4}, pinned={"3": 2})
    assert released.plan == BitPlan({"0": 8, "1": 4, "2": 2, "3": 2})
    free = search(fixed, even, costs, {"average_bits": 8}, pinned={"1": None})
    assert free.plan == BitPlan({"0": 8, "1": 8, "2": 8, "3": 8})
    assert search(fixed, even, costs, {"average_bits": 2}, pinned=dict.fromkeys("013")).costs["average_bits"] == 2
    with pytest.raises(PlanError, match="pinned names 'x'"):
        search(fixed, even, costs, {"average_bits": 8}, pinned={"x": None})
    apart = search(fixed, even, costs, {"average_bits": 5.5}, activation_bits=4)
    assert apart.plan == BitPlan({"0": 8, "1": 4, "2": (2, 4), "3": 8})
    grouped = search(fixed, even, costs, {"average_bits": 8}, groups=[("1", "2")])
    assert grouped.plan == BitPlan({"0": 8, "1": 4, "2": 4, "3": 8})
    told = search(fixed, even, costs, {"average_bits": 8}, groups=[("0", "1")], pinned={"1": 2})
    assert told.plan == BitPlan({"0": 2, "1": 2, "2": 8, "3": 8})
    with pytest.raises(PlanError, match=r"'0', '1' share their bits but are pinned to .*each a width of its own"):
        search(fixed, even, costs, {"average_bits": 8}, groups=[("0", "1")])
    swept = candidates(fixed, even, costs, {"average_bits": 9}, alternatives_at={"average_bits": 6}, progress=False)
    assert {one.plan for one in swept} == {BitPlan({"0": 8, "1": 4, "2": bits, "3": 8}) for bits in (8, 4, 2)}
    other = prepare(net, QuantConfig(bit_choices=(8, 4, 2), keep_first_last=False), torch.randn(16, 8))
    with pytest.raises(ConfigError, match="measured on another model"):
        search(other, even, costs, {"average_bits": 8})
