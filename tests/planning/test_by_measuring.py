"""measured_search on tiny networks, where every plan can be tried: how near it comes, what it keeps to and says."""

import itertools
import json
import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bitdial import BitPlan, QuantConfig, at_bits, get_bits, load, measure_costs, measured_search, prepare, save
from bitdial.errors import BudgetError, ConfigError, PlanError, QuantizationError
from bitdial.planning import MeasuredSearch, explore
from bitdial.planning.cost import Costs
from bitdial.planning.distance import kl_divergence

pytest.importorskip("highspy")

WIDTHS = (8, 4, 3, 2)


def make_net(seed: int) -> nn.Module:
    """Layers of different sizes and sensitivities."""
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise((6, 12, 5, 16, 4)):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    net = nn.Sequential(*layers[:-1]).eval()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.mul_(1 + 3 * torch.rand(()))
    return net


class Case:
    """A network, its prepared model, its costs and inputs."""

    def __init__(self, seed: int) -> None:
        self.net = make_net(seed)
        self.x = torch.randn(48, 6)
        config = QuantConfig(bit_choices=WIDTHS, keep_first_last=False)
        self.model = prepare(self.net, config, self.x).eval()
        self.costs = measure_costs(self.model, self.x[:1])

    @property
    def batches(self) -> list[Tensor]:
        return [self.x[:20], self.x[20:]]

    def search(self, budgets: Any, **settings: Any) -> MeasuredSearch:
        settings = {"reference": self.net, "progress": False, **settings}
        return measured_search(self.model, self.batches, self.costs, budgets, **settings)

    def distance(self, plan: BitPlan) -> float:
        with torch.no_grad(), at_bits(self.model, plan):
            return kl_divergence(self.model(self.x), self.net(self.x))

    def every(self, limit: float, quantity: str = "bytes", act: int | None = None) -> list[float]:
        """The distances of all plans within the limit, the least first."""
        plans = [
            BitPlan({name: (b, act or b) for name, b in zip(self.costs.layers, bits, strict=True)})
            for bits in itertools.product(WIDTHS, repeat=len(self.costs.layers))
        ]
        return sorted(self.distance(plan) for plan in plans if self.costs.of(plan)[quantity] <= limit)


@pytest.fixture(scope="module")
def case() -> Case:
    return Case(4)


def test_it_ends_at_or_beside_the_best_of_all_plans() -> None:
    places = []
    for seed in range(3):
        one = Case(seed)
        limit = one.costs.of(4)["bytes"]
        for act in (None, 8):
            found = one.search(limit, activation_bits=act)
            assert found.costs["bytes"] <= limit
            assert found.costs == one.costs.of(found.plan)
            assert found.distance == pytest.approx(one.distance(found.plan), rel=1e-5)
            every = one.every(limit, act=act)
            assert found.measured < len(every)
            places.append(sum(value < found.distance * (1 - 1e-5) for value in every))
    assert max(places) <= 1
    assert places.count(0) >= 5


def test_budgets_of_any_quantity_hold_exactly(case: Case) -> None:
    budgets = {"average_bits": 3.5, "bitops": case.costs.of((3, 8))["bitops"], "layer_average_bits": 4}
    for quantity, limit in budgets.items():
        found = case.search({quantity: limit}, activation_bits=8)
        assert found.costs[quantity] <= limit
        assert found.budgets == {quantity: limit}
        assert found.distance <= case.every(limit, quantity, act=8)[2] * (1 + 1e-5)
    both = case.search(budgets, activation_bits=8)
    assert all(both.costs[quantity] <= limit for quantity, limit in budgets.items())
    least = case.costs.of((2, 8))["bytes"]
    lowest = case.search(least, activation_bits=8)
    assert set(lowest.plan.values()) == {(2, 8)}
    with pytest.raises(BudgetError, match=f"the least is {least}"):
        case.search(least - 1, activation_bits=8)


def test_the_uniform_plan_is_the_highest_width_that_fits(case: Case) -> None:
    limit = case.costs.of(4)["bytes"]
    for bits, extra in ((4, 0), (4, 1), (3, -1)):
        found = case.search(limit + extra)
        assert found.uniform is not None
        assert set(found.uniform.values()) == {(bits, bits)}
        assert found.uniform_costs == case.costs.of(bits)
        assert found.uniform_distance == pytest.approx(case.distance(BitPlan(default=bits)), rel=1e-5)
        assert found.distance <= found.uniform_distance
    top = case.search(case.costs.of(8)["bytes"])
    assert set(top.plan.values()) == {(8, 8)} or top.distance < case.distance(BitPlan(default=8))


def test_a_latency_table_that_no_single_width_meets() -> None:
    """Where each layer has another fast width, there is no uniform plan, but a plan."""
    one = Case(1)
    names = list(one.costs.layers)
    table: dict[str, Any] = {
        name: {b: 0.0 if b == fast else 5.0 for b in WIDTHS} for name, fast in zip(names, (8, 4, 4, 2), strict=True)
    }
    costs = Costs(
        layers=one.costs.layers, bit_choices=one.costs.bit_choices, float_bytes=one.costs.float_bytes, latency=table
    )
    found = measured_search(one.model, one.batches, costs, {"latency": 1}, reference=one.net, progress=False)
    assert [bits[0] for bits in found.plan.values()] == [8, 4, 4, 2]
    assert (found.uniform, found.uniform_distance, found.uniform_costs) == (None, None, None)
    assert json.loads(json.dumps(found.to_dict()))["uniform"] is None


def test_groups_pins_and_activation_bits(case: Case) -> None:
    names = list(case.costs.layers)
    limit = case.costs.of((4, 8))["bytes"] + 50
    found = case.search(limit, groups=[names[:2]], pinned={names[3]: (8, 4)}, activation_bits=8)
    assert found.plan[names[0]] == found.plan[names[1]]
    assert found.plan[names[3]] == (8, 4)
    assert {act for name, (_, act) in found.plan.items() if name != names[3]} == {8}
    assert found.uniform is not None
    assert found.uniform[names[3]] == (8, 4)
    with pytest.raises(PlanError, match="pinned names 'none'"):
        case.search(limit, pinned={"none": 4})


def test_the_same_input_gives_the_same_plan_live_or_prepared(case: Case, tmp_path: Path) -> None:
    limit = case.costs.of(4)["bytes"]
    save(case.model, tmp_path / "net.safetensors")
    before = get_bits(case.model)
    found = case.search(limit)
    assert get_bits(case.model) == before
    again = case.search(limit)
    for kernels in ("float", "integer"):
        live = load(tmp_path / "net.safetensors", case.net, kernels=kernels)
        there = measured_search(live, case.batches, case.costs, limit, reference=case.net, progress=False)
        assert there.plan == found.plan
        assert there.distance == pytest.approx(found.distance, rel=1e-3)
    whole, other = found.to_dict(), again.to_dict()
    for one in (whole, other):
        del one["seconds"]
        for step in one["trajectory"]:
            del step["seconds"]
    assert whole == other


def test_what_a_result_says(case: Case) -> None:
    found = case.search(case.costs.of(4)["bytes"])
    assert (found.samples, found.stopped, found.reference) == (48, "done", "the given model")
    steps = found.trajectory
    assert (steps[0].plans, steps[0].by, steps[0].distance) == (1, "start", found.uniform_distance)
    assert steps[-1].distance == found.distance
    assert all(a.distance > b.distance and a.plans < b.plans for a, b in itertools.pairwise(steps))
    assert steps[-1].plans <= found.measured
    written = json.loads(json.dumps(found.to_dict()))
    assert BitPlan.from_dict(written["plan"]) == found.plan
    assert BitPlan.from_dict(written["uniform"]) == found.uniform
    assert written["trajectory"][-1]["distance"] == found.distance
    assert set(written) == set(MeasuredSearch.__dataclass_fields__)


def test_a_search_ends_when_its_time_is_up(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    now = itertools.count(0, 0.25)
    monkeypatch.setattr(explore.time, "perf_counter", lambda: float(next(now)))
    limit = case.costs.of(4)["bytes"]
    short = case.search(limit, seconds=5)
    assert short.stopped == "seconds"
    assert short.costs["bytes"] <= limit
    whole = case.search(limit)
    assert whole.stopped == "done"
    assert short.measured < whole.measured
    assert short.uniform_distance is not None
    assert whole.distance <= short.distance <= short.uniform_distance


def test_without_a_reference_the_highest_width_is_it(case: Case, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="bitdial"):
        found = case.search(case.costs.of(8)["bytes"], reference=None)
    assert (found.reference, found.distance) == ("the model at its highest width", 0)
    assert "no reference was given" in caplog.text


def test_own_distance_decides(case: Case) -> None:
    """A distance that likes low bits of one layer finds them, whatever the outputs are."""
    names = list(case.costs.layers)

    def fewest(output: Tensor, reference: Tensor) -> float:
        return float(get_bits(case.model)[names[0]][0]) + 0.01 * get_bits(case.model)[names[1]][0]

    found = case.search(case.costs.of(4)["bytes"], distance=fewest)
    assert found.plan[names[0]] == found.plan[names[1]] == (2, 2)


def test_one_layer_alone() -> None:
    torch.manual_seed(0)
    net, x = nn.Linear(4, 3), torch.randn(9, 4)
    model = prepare(nn.Sequential(net), QuantConfig(bit_choices=WIDTHS, keep_first_last=False), x).eval()
    costs = measure_costs(model, x[:1])
    found = measured_search(model, x, costs, costs.of(4)["bytes"], reference=nn.Sequential(net), progress=False)
    assert list(found.plan.values()) in ([(4, 4)], [(3, 3)], [(2, 2)])
    assert found.measured <= 8


def test_bad_input_is_named(case: Case) -> None:
    limit = case.costs.of(4)["bytes"]
    other = Case(0)
    costs = Costs(
        layers=case.costs.layers, bit_choices=dict.fromkeys(case.costs.layers, (8, 4)), float_bytes=0
    )  # of another preparation
    cases: list[tuple[Any, Any, dict[str, Any], type[Exception], str]] = [
        ([], limit, {}, ConfigError, "no batch to measure on"),
        (case.x * math.nan, limit, {"reference": case.net}, QuantizationError, "holds NaN"),
        (case.x * math.nan, limit, {}, QuantizationError, "holds NaN"),
        (case.x, {}, {}, ConfigError, "give at least one budget"),
        (case.x, {"bits": 3}, {}, ConfigError, "budget"),
        (case.x, "4", {}, ConfigError, "budget bytes='4' is not a number"),
        (case.x, 10, {}, BudgetError, "bytes <= 10 .the least is"),
        (case.x, limit, {"distance": lambda a, b: "near"}, ConfigError, "returned 'near' where a number"),
        (case.x, limit, {"output": lambda y: y[:, None]}, ConfigError, r"\(48, 1, 4\)"),
        (case.x, limit, {"seconds": 0}, ConfigError, "seconds=0 is not a time limit"),
        (case.x, limit, {"seconds": math.nan}, ConfigError, "is not a time limit"),
        (case.x, limit, {"seconds": True}, ConfigError, "is not a time limit"),
        (case.x, limit, {"patience": 0}, ConfigError, "patience must be a whole number of at least 1"),
    ]
    before = get_bits(case.model)
    for batches, budgets, settings, error, words in cases:
        with pytest.raises(error, match=words):
            measured_search(case.model, batches, case.costs, budgets, progress=False, **settings)
        assert get_bits(case.model) == before
    with pytest.raises(ConfigError, match="costs were measured on another model"):
        measured_search(case.model, case.x, costs, limit, progress=False)
    with pytest.raises(PlanError, match="no quantised layer"):
        measured_search(other.net, case.x, case.costs, limit, progress=False)
