"""The plans of mixed-precision training: what is drawn, how often, and that a run draws the same when it is resumed."""

import math
from collections import Counter
from pathlib import Path

import pytest
import torch

from bitdial import BitPlan, JointStep, TrainConfig, get_bits, hessian_trace, train
from bitdial.errors import CheckpointError, ConfigError
from bitdial.train.hasb import PlanSampler, roulette, sensitive_layers, sigma_at

LAYERS = ["a", "b", "c", "d"]
SENSITIVITY = {"conv": 3.0, "hidden": 1.0}


# --- the roulette -------------------------------------------------------------------------------


def test_probabilities_by_hand() -> None:
    torch.testing.assert_close(roulette((8, 6, 4, 2), sensitive=False), torch.full((4,), 0.25, dtype=torch.float64))
    expected = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64)
    torch.testing.assert_close(roulette((8, 6, 4, 2), sensitive=True), expected)


def test_a_layer_at_the_mean_is_sensitive() -> None:
    assert sensitive_layers({"a": 1.0, "b": 2.0, "c": 3.0, "d": 2.0}) == {"b", "c", "d"}
    assert sensitive_layers({"a": -1.0, "b": -3.0}) == {"a"}


def chi_square(counts: Counter[int], probabilities: dict[int, float]) -> float:
    total = sum(counts.values())
    return sum((counts[b] - total * p) ** 2 / (total * p) for b, p in probabilities.items())


def test_frequencies() -> None:
    """Chi-square with three degrees of freedom: 16.27 is the 0.999 quantile; the draws are the same at every run."""
    sampler = PlanSampler(LAYERS, (8, 6, 4, 2), sensitive={"b"}, seed=3)
    sigma, steps = 0.6, 4000
    counts = {(bits, name): Counter[int]() for bits in (6, 4) for name in LAYERS}
    for step in range(steps):
        plans = sampler.plans(step, sigma)
        for bits, name in counts:
            counts[bits, name][plans[bits][name][0]] += 1
    for (bits, name), seen in counts.items():
        drawn = dict(zip((8, 6, 4, 2), roulette((8, 6, 4, 2), sensitive=name == "b").tolist(), strict=True))
        expected = {b: sigma * p + (1 - sigma) * (b == bits) for b, p in drawn.items()}
        assert chi_square(seen, expected) < 16.27, (bits, name, seen)
        other = dict(zip((8, 6, 4, 2), roulette((8, 6, 4, 2), sensitive=name != "b").tolist(), strict=True))
        wrong = {b: sigma * p + (1 - sigma) * (b == bits) for b, p in other.items()}
        assert chi_square(seen, wrong) > 16.27, "the test could not tell the two roulettes apart"


def test_layers_are_drawn_independently() -> None:
    sampler = PlanSampler(LAYERS, (4, 3, 2), sensitive=set(), seed=0)
    plans = [sampler.plans(step, 1.0)[3] for step in range(3000)]
    for first, second in (("a", "b"), ("b", "d")):
        pairs = Counter((plan[first][0], plan[second][0]) for plan in plans)
        assert len(pairs) == 9
        expected = len(plans) / 9
        assert sum((count - expected) ** 2 / expected for count in pairs.values()) < 26.12  # 8 degrees, 0.999


def test_the_outermost_passes_are_pure() -> None:
    sampler = PlanSampler(LAYERS, (8, 6, 4, 2), sensitive=set(LAYERS), seed=0)
    for step in range(50):
        plans = sampler.plans(step, 1.0)
        assert list(plans) == [8, 6, 4, 2]
        assert (plans[8], plans[2]) == (BitPlan(default=8), BitPlan(default=2))


def test_without_sigma_all_passes_are_pure() -> None:
    sampler = PlanSampler(LAYERS, (8, 6, 4, 2), sensitive=set(), seed=0)
    for bits, plan in sampler.plans(7, 0.0).items():
        assert all(plan[name] == (bits, bits) for name in LAYERS)


def test_plans_are_a_function_of_seed_and_step() -> None:
    one, same = (PlanSampler(LAYERS, (4, 3, 2), sensitive={"a"}, seed=5) for _ in range(2))
    same.plans(11, 0.5)  # what was drawn before does not matter
    assert [one.plans(step, 0.5) for step in range(20)] == [same.plans(step, 0.5) for step in range(20)]
    other = PlanSampler(LAYERS, (4, 3, 2), sensitive={"a"}, seed=6)
    assert [one.plans(step, 0.5) for step in range(20)] != [other.plans(step, 0.5) for step in range(20)]
    assert len({one.plans(step, 1.0)[3] for step in range(20)}) > 10


def test_sigma_by_hand() -> None:
    values = [sigma_at(epoch, sigma=0.5, epochs=4, warmup=1) for epoch in range(4)]
    assert values == [0.0, 0.25, 0.375, 0.5]  # not compounded


# --- in training --------------------------------------------------------------------------------


def config(**changes) -> TrainConfig:
    settings = {"epochs": 2, "sampling": "hasb", "sigma": 1.0, "sigma_warmup": 0, "lr": 1e-3, "alrs": "off"}
    return TrainConfig(**{**settings, **changes})


def test_a_step_runs_the_plans_that_it_announces(make_model, make_images, monkeypatch) -> None:
    model = make_model((8, 6, 4, 2))
    step = JointStep(model, config(), steps_per_epoch=3, sensitivity=SENSITIVITY)
    seen = []
    conv = model.get_submodule("conv")
    conv.register_forward_hook(lambda *_: seen.append(get_bits(model)))
    announced = []
    for _ in range(3):
        announced += [BitPlan({name: plan[name] for name in SENSITIVITY}) for plan in step.plans().values()]
        step(*make_images(8))
    assert seen == announced
    assert len(set(seen)) > 4  # mixed ones among them


def test_scales_and_norms_that_a_plan_leaves_out_stay(make_model, make_images) -> None:
    model = make_model((4, 3, 2))
    step = JointStep(model, config(epochs=50, sigma=1.0), steps_per_epoch=1, sensitivity=SENSITIVITY)
    while step.plans()[3]["conv"] != (4, 4):  # a step in which no pass has the convolution at 3 bits
        step.step += 1
    before = {name: value.clone() for name, value in model.state_dict().items()}
    step(*make_images(8))
    after = model.state_dict()
    still = {name for name in before if torch.equal(before[name], after[name])}
    assert {"conv.act_quantizer.scales.3", "norm1.sets.3.weight", "norm1.sets.3.running_mean"} <= still
    assert not {"conv.act_quantizer.scales.4", "conv.act_quantizer.scales.2", "norm1.sets.4.weight"} & still


@pytest.mark.parametrize("steps", [1, 3, 4])
def test_a_resumed_run_draws_the_same_plans(tmp_path: Path, make_model, make_data, stop_after, steps: int) -> None:
    whole = make_model((4, 3, 2))
    train(whole, make_data(), config(), sensitivity=SENSITIVITY, progress=False)
    interrupted, stopped = stop_after
    every = config(checkpoint_every=1)
    with pytest.raises(stopped):
        train(
            make_model((4, 3, 2)), interrupted(make_data(), steps), every,
            sensitivity=SENSITIVITY, checkpoint=tmp_path / "run.ckpt", progress=False,
        )  # fmt: skip
    resumed = make_model((4, 3, 2), seed=1)
    train(resumed, make_data(), every, sensitivity=SENSITIVITY, checkpoint=tmp_path / "run.ckpt", progress=False)
    for (name, mine), theirs in zip(whole.state_dict().items(), resumed.state_dict().values(), strict=True):
        assert torch.equal(mine, theirs), name
    with pytest.raises(CheckpointError, match="sensitivity"):
        train(
            make_model((4, 3, 2)), make_data(), every,
            sensitivity={"conv": 1.0, "hidden": 3.0}, checkpoint=tmp_path / "run.ckpt", progress=False,
        )  # fmt: skip


def test_random_sampling_needs_no_sensitivity_and_knows_no_layer_from_another(make_model) -> None:
    step = JointStep(make_model((8, 4, 2)), config(sampling="random"), steps_per_epoch=3)
    assert step.sampler is not None
    assert (step.sampler.probabilities == 1 / 3).all()


def test_hasb_asks_for_sensitivities(make_model) -> None:
    with pytest.raises(ConfigError, match="sampling='hasb' needs the sensitivity"):
        JointStep(make_model(), config(), steps_per_epoch=1)


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"conv": 1.0}, "'hidden' has no sensitivity"),
        ({**SENSITIVITY, "hidden": math.nan}, "'hidden': its sensitivity is nan"),
        ({**SENSITIVITY, "hidden": "much"}, "'hidden': its sensitivity is much"),
        ({**SENSITIVITY, "head": 1.0}, "name 'head', which is not a quantised layer"),
        ([1.0, 2.0], "sensitivity is a list; give what hessian_trace returns"),
    ],
)
def test_sensitivities_are_checked(make_model, given: object, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        JointStep(make_model(), config(), steps_per_epoch=1, sensitivity=given)


def test_what_was_measured_can_be_passed_as_it_is(make_model, make_images) -> None:
    model = make_model((8, 4, 2))
    found = hessian_trace(model, [make_images(16)], most_samples=2, progress=False)
    step = JointStep(model, config(), steps_per_epoch=1, sensitivity=found)
    assert step.sensitivity == {name: entry.normalized for name, entry in found.layers.items()}


@pytest.mark.parametrize(
    "wrong", [{"sampling": "all"}, {"sigma": 1.5}, {"sigma": math.nan}, {"sigma_warmup": -1}, {"seed": 0.5}]
)
def test_settings_are_checked(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        config(**wrong)


def test_layers_with_a_width_of_their_own_are_not_drawn() -> None:
    sampler = PlanSampler(LAYERS, (8, 6, 4, 2), sensitive=set(), seed=3, fixed={"end": 8})
    alone = PlanSampler(LAYERS, (8, 6, 4, 2), sensitive=set(), seed=3)
    for step in range(50):
        for bits, plan in sampler.plans(step, 1.0).items():
            other = alone.plans(step, 1.0)[bits]
            assert bits in (8, 2) or plan["end"] == (8, 8)
            assert [plan[name] for name in LAYERS] == [other[name] for name in LAYERS]
