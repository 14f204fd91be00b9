"""Measured fronts: what is evaluated, which plans are kept, under which names; and the file they travel in."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import bitdial
from bitdial import BitPlan, at_bits, get_bits, measure_costs
from bitdial.errors import BitdialError, ConfigError
from bitdial.planning import (
    Candidate,
    MeasuredFront,
    MeasuredPlan,
    candidates,
    compare_fronts,
    evaluate_plans,
    mean_accuracy,
    measure_front,
)

pytest.importorskip("highspy")

WIDTHS = (4, 3, 2)


@pytest.fixture(scope="module")
def model() -> nn.Module:
    torch.manual_seed(0)
    net = bitdial.build_model("cifar_resnet", blocks=1, width=4, in_channels=1)
    return bitdial.prepare(net, bitdial.QuantConfig(bit_choices=WIDTHS), torch.rand(8, 1, 8, 8))


@pytest.fixture(scope="module")
def costs(model: nn.Module) -> Any:
    return measure_costs(model, torch.zeros(1, 1, 8, 8))


@pytest.fixture(scope="module")
def found(model: nn.Module, costs: Any) -> list[Candidate]:
    sensitivity = {name: 1.0 + place for place, name in enumerate(costs.layers)}
    return candidates(model, sensitivity, costs, {"average_bits": 9}, progress=False)


def by_bits(accuracies: dict[str, float]) -> Any:
    """A measure that gives a model the accuracy that `accuracies` has for its average bits, to three digits."""

    def measure(model: nn.Module, batches: list[Any]) -> float:
        assert len(batches) == 2
        costs = measure_costs(model, torch.zeros(1, 1, 8, 8))
        return accuracies[f"{costs.of(get_bits(model))['average_bits']:.3f}"]

    return measure


BATCHES = [(torch.zeros(5, 1, 8, 8), torch.zeros(5)), (torch.zeros(3, 1, 8, 8), torch.zeros(3))]


def rising(found: list[Candidate]) -> dict[str, float]:
    """An accuracy for each average that grows with it, but for two averages that are beaten."""
    averages = sorted({f"{one.costs['average_bits']:.3f}" for one in found} | {"2.000", "3.000", "4.000"})
    values = {average: 0.5 + 0.01 * place for place, average in enumerate(averages)}
    return values | {averages[2]: 0.1, averages[-1]: 0.2}


def test_front_has_the_plans_that_no_other_beats(model: nn.Module, costs: Any, found: list[Candidate]) -> None:
    accuracy = rising(found)
    before = get_bits(model)
    front = measure_front(model, found, costs, BATCHES, by_bits(accuracy), label="net", progress=False)
    assert get_bits(model) == before
    assert (front.label, front.quantity, front.samples) == ("net", "average_bits", 8)
    everything = {one.plan for one in found} | {BitPlan(dict.fromkeys(costs.layers, bits)) for bits in WIDTHS}
    assert {one.plan for one in front.candidates} == everything
    for one in front.candidates:
        assert one.accuracy == accuracy[f"{one.costs['average_bits']:.3f}"]
        beaten = any(
            other.costs["average_bits"] <= one.costs["average_bits"] and other.accuracy > one.accuracy
            for other in front.candidates
        )
        assert (one.name is None) == beaten
        assert one.costs == costs.of(one.plan)
    assert [one.costs["average_bits"] for one in front.uniform] == [2, 3, 4]
    assert {one.predicted_loss is None for one in front.candidates if one.plan not in [f.plan for f in found]} <= {True}
    for one in front.front:
        number, unit = str(one.name).split()
        assert (float(number), unit) == (pytest.approx(one.costs["average_bits"], abs=0.005), "bits")


def test_budgets_name_the_best_plan_within_them(model: nn.Module, costs: Any, found: list[Candidate]) -> None:
    front = measure_front(model, found, costs, BATCHES, by_bits(rising(found)), label="net", progress=False)
    assert list(front.within) == ["2.0 bits", "2.5 bits", "3.0 bits", "3.5 bits", "4.0 bits"]
    for name, best in front.within.items():
        within = [one for one in front.candidates if one.costs["average_bits"] <= float(name.split()[0])]
        assert best.accuracy == max(one.accuracy for one in within)
        assert front.plans[name] == best.plan
    assert front.plans.keys() == {*front.within, *(one.name for one in front.front)}
    assert front.summary()["names"] == list(front.plans)
    assert json.loads(json.dumps(front.summary())) == front.summary()


def test_uniform_settings_stay_off_the_front_where_told(model: nn.Module, costs: Any, found: list[Candidate]) -> None:
    middle = BitPlan(dict.fromkeys(costs.layers, 3))
    others = [one for one in found if len(set(one.plan.values())) > 1]

    def measure(model: nn.Module, batches: list[Any]) -> float:
        return float(get_bits(model) == middle)

    on = measure_front(model, others, costs, BATCHES, measure, label="net", progress=False)
    assert on.front[-1].plan == middle
    assert on.front[-1].name == "3.00 bits"
    off = measure_front(model, others, costs, BATCHES, measure, label="net", uniform_on_front=False, progress=False)
    assert {one.plan for one in off.candidates} == {one.plan for one in others}
    assert [one.accuracy for one in off.uniform] == [0, 1, 0]


def test_a_front_weighs_one_number(model: nn.Module, costs: Any, found: list[Candidate]) -> None:
    """Measures follow the contract of `evaluate`; of several numbers, none is the one to weigh."""
    several = evaluate_plans(model, found[:2], BATCHES, lambda m, b: {"a": 1, "training": m.training}, progress=False)
    assert list(several.values()) == [{"a": 1.0, "training": 0.0}] * 2
    with pytest.raises(ConfigError, match="weighs one number, more is better; the measure returned top1, top5"):
        measure_front(model, found, costs, BATCHES, lambda *_: {"top1": 0.5, "top5": 1.0}, label="net", progress=False)


def test_names_tell_plans_apart(model: nn.Module, costs: Any, found: list[Candidate]) -> None:
    def front_of(averages: list[float]) -> list[str | None]:
        plans = [BitPlan({n: (4, 4 if i < place else 2) for i, n in enumerate(costs.layers)}) for place in range(4)]
        made = [Candidate(plan, 1.0, {"average_bits": a, "bytes": b}, {})
                for b, (plan, a) in enumerate(zip(plans, averages, strict=False))]  # fmt: skip
        ranks = {one.plan: b / 10 for b, one in enumerate(made)}
        front = measure_front(model, made, costs, BATCHES, lambda m, _: ranks.get(get_bits(m), 0.0), label="net",
                              quantity="bytes", uniform_on_front=False, progress=False)  # fmt: skip
        return [one.name for one in front.front]

    assert front_of([2.5, 2.514, 3]) == ["2.50 bits", "2.51 bits", "3.00 bits"]
    assert front_of([2.501, 2.502, 3]) == ["2.501 bits", "2.502 bits", "3.000 bits"]
    assert front_of([2.5, 2.5, 3]) == ["2.50 bits (1)", "2.50 bits (2)", "3.00 bits (1)"]


def test_correlation_is_that_of_searched_plans(model: nn.Module, costs: Any, found: list[Candidate]) -> None:
    losses = {one.plan: one.predicted_loss for one in found}
    perfect = measure_front(
        model, found, costs, BATCHES, lambda m, _: -losses.get(get_bits(m), 1e9), label="net", progress=False
    )
    assert perfect.correlation == {"spearman": pytest.approx(-1), "pearson": pytest.approx(-1)}
    assert len(perfect.predictions[0]) == len(found)
    flat = measure_front(model, found, costs, BATCHES, lambda m, _: 0.5, label="net", progress=False)
    assert flat.correlation == {"spearman": None, "pearson": None}


def test_a_file_gives_back_what_was_saved(model: nn.Module, costs: Any, found: list[Candidate], tmp_path: Path) -> None:
    front = measure_front(model, found, costs, BATCHES, by_bits(rising(found)), label="net", progress=False)
    front.save(tmp_path / "front.json")
    assert MeasuredFront.load(tmp_path / "front.json") == front
    with pytest.raises(BitdialError, match="cannot write"):
        front.save(tmp_path)
    values = json.loads((tmp_path / "front.json").read_text())
    wrong: list[Any] = [
        [], 1, {}, {**values, "quantity": "colour"}, {**values, "label": 3}, {**values, "candidates": [1]},
        {**values, "candidates": [{**values["candidates"][0], "accuracy": "high"}]},
        {**values, "candidates": [{**values["candidates"][0], "costs": {"bytes": 1}}]},
        {**values, "candidates": [{**values["candidates"][0], "plan": {"layers": {"a": 99}, "default": None}}]},
        {**values, "candidates": [{**values["candidates"][0], "extra": 1}]},
    ]  # fmt: skip
    for number, one in enumerate(wrong):
        (tmp_path / "wrong.json").write_text(json.dumps(one))
        with pytest.raises(ConfigError, match=r"wrong\.json is not what"):
            MeasuredFront.load(tmp_path / "wrong.json")
        assert number < len(wrong)
    (tmp_path / "wrong.json").write_text("{")
    with pytest.raises(ConfigError, match="not a JSON file"):
        MeasuredFront.load(tmp_path / "wrong.json")
    with pytest.raises(ConfigError, match="cannot read"):
        MeasuredFront.load(tmp_path / "missing.json")


def test_a_plan_of_another_model_is_refused_before_anything_runs(
    model: nn.Module, costs: Any, found: list[Candidate]
) -> None:
    other = Candidate(BitPlan({"fc": 4}), 1.0, {"average_bits": 4.0}, {})
    with pytest.raises(BitdialError, match="names 'fc'"):
        measure_front(model, [*found, other], costs, BATCHES, lambda *_: pytest.fail("it ran"), label="net")
    with pytest.raises(BitdialError, match="names 'fc'"), at_bits(model, other.plan):
        pass


def test_sweep_by_number_goes_from_the_least_to_the_most(model: nn.Module, costs: Any) -> None:
    sensitivity = dict.fromkeys(costs.layers, 1.0)
    swept = candidates(model, sensitivity, costs, {"bytes": 5}, progress=False)
    assert swept[0].costs["bytes"] == costs.of(2)["bytes"]
    assert swept[-1].costs["bytes"] == costs.of(4)["bytes"]
    assert all(one.costs["bytes"] <= one.budgets["bytes"] for one in swept)
    for wrong, words in (({"bytes": 1}, "at least 2"), ({"latency": 5}, "needs times"), ({"colour": 5}, "colour")):
        with pytest.raises(ConfigError, match=words):
            candidates(model, sensitivity, costs, wrong, progress=False)


def test_fronts_compare_over_the_budgets_that_all_can_meet() -> None:
    def front(label: str, points: dict[float, float]) -> MeasuredFront:
        plans = [
            MeasuredPlan(plan=BitPlan(default=4), costs={"average_bits": cost}, accuracy=accuracy)
            for cost, accuracy in points.items()
        ]
        return MeasuredFront(label=label, quantity="average_bits", samples=1, candidates=tuple(plans), uniform=())

    one, other = front("one", {2.0: 0.5, 3.0: 0.7}), front("other", {2.5: 0.6, 4.0: 0.6})
    assert compare_fronts([one, other]) == {"one": pytest.approx((0.5 * 0.5 + 1.0 * 0.7) / 1.5), "other": 0.6}
    assert compare_fronts([front("one", {2.0: 0.5}), front("other", {2.0: 0.6})]) == {}


def test_mean_accuracy_is_the_area_under_the_steps() -> None:
    points = [(2.0, 0.5), (3.0, 0.8), (2.5, 0.4), (3.5, 0.7)]
    assert mean_accuracy(points, 2, 4) == pytest.approx((0.5 + 0.8) / 2)
    assert mean_accuracy(points, 2.5, 3.25) == pytest.approx((0.5 * 0.5 + 0.25 * 0.8) / 0.75)
    assert mean_accuracy(points, 3.2, 9) == pytest.approx(0.8)
    fine = [mean_accuracy(points, low, low + 1e-3) for low in torch.arange(2, 4, 1e-3, dtype=torch.float64).tolist()]
    assert mean_accuracy(points, 2, 4) == pytest.approx(sum(fine) / len(fine), rel=1e-3)
    for least, most in ((1.9, 4), (3, 3), (4, 3)):
        with pytest.raises(ConfigError, match="no front from"):
            mean_accuracy(points, least, most)


def test_uniform_settings_leave_layers_with_a_width_of_their_own_there(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = bitdial.build_model("cifar_resnet", blocks=1, width=4, in_channels=1)
    config = bitdial.QuantConfig(bit_choices=WIDTHS, keep_first_last=4)
    model = bitdial.prepare(net, config, torch.rand(8, 1, 8, 8))
    costs = measure_costs(model, torch.zeros(1, 1, 8, 8))
    assert set(costs.fixed_bits.values()) == {4}
    found = candidates(model, dict.fromkeys(costs.layers, 1.0), costs, {"average_bits": 5}, progress=False)
    front = measure_front(model, found, costs, BATCHES, lambda model, _: 0.5, label="net", progress=False)
    assert [one.uniform_width for one in front.uniform] == [2, 3, 4]
    assert [one.uniform_name for one in front.uniform] == [
        "2 bits, fixed layers at theirs",
        "3 bits, fixed layers at theirs",
        "4 bits everywhere",
    ]
    for one in front.uniform:
        with at_bits(model, one.uniform_width):
            assert get_bits(model) == one.plan
        assert one.costs == costs.of(one.uniform_width)
    assert {one.plan for one in front.uniform} & {one.plan for one in found}  # the same plans, so measured once
    front.save(tmp_path / "front.json")
    assert MeasuredFront.load(tmp_path / "front.json") == front
    written = json.loads((tmp_path / "front.json").read_text())
    assert all("width" not in one for one in written["candidates"])
    for one in written["uniform"]:
        del one["width"]  # as files had it before
    written["uniform"][-1]["plan"]["layers"] = {name: [4, 4] for name in costs.layers}
    (tmp_path / "front.json").write_text(json.dumps(written))
    assert MeasuredFront.load(tmp_path / "front.json").uniform[-1].uniform_width == 4
    written["uniform"][0]["width"] = "2"
    (tmp_path / "front.json").write_text(json.dumps(written))
    with pytest.raises(ConfigError, match="the width of a uniform setting"):
        MeasuredFront.load(tmp_path / "front.json")


def test_a_uniform_setting_is_not_named_after_a_width_that_no_layer_has() -> None:
    one = MeasuredPlan(plan=BitPlan({"a": 4, "b": 4}), costs={"average_bits": 4}, accuracy=0.5, width=2)
    assert one.uniform_name == "2 bits, fixed layers at theirs"
