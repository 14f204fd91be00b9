"""Sampled plans through slots: the same training, bit for bit, as with separate parameters.

On a GPU the steps through slots are recorded as CUDA graphs; elsewhere they run under Triton's interpreter, see
`test_interpreter.py`.
"""

import copy
import logging
import os
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from bitdial import QuantConfig, Rule, add_transitions, prepare
from bitdial.kernels import training as fused
from bitdial.train import JointStep, TrainConfig
from bitdial.train.checkpoint import load_checkpoint, save_checkpoint
from bitdial.train.gpu.fuse import FastModel
from bitdial.train.gpu.plan_slots import unsupported_reason
from bitdial.train.reduction import GradientReducer

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BITS = (4, 3, 2)  # plans of the middle width are mixed
STEPS = 6 if DEVICE == "cuda" else 2  # on a GPU the first three are run, the others replayed


@pytest.fixture(autouse=True)
def exact_convolutions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Float32, and the same sums at every run."""
    monkeypatch.setattr(fused, "CONVOLUTION_TYPES", (torch.float32,))
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)


class Net(nn.Module):
    """A residual addition, a grouped convolution, which the kernels leave to cuDNN, and a quantised linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.first_norm = nn.Conv2d(3, 2, 3, padding=1, bias=False), nn.BatchNorm2d(2)
        self.second, self.second_norm = nn.Conv2d(2, 2, 3, padding=1, bias=False), nn.BatchNorm2d(2)
        self.third, self.third_norm = nn.Conv2d(2, 4, 3, groups=2, bias=False), nn.BatchNorm2d(4)
        self.hidden, self.last = nn.Linear(4, 2), nn.Linear(2, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.first_norm(self.first(x)))
        x = torch.relu(self.second_norm(self.second(x)) + x)
        x = torch.relu(self.third_norm(self.third(x)))
        return self.last(torch.relu(self.hidden(x.mean(dim=(2, 3)))))


def images(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(3, 3, 4, 4, generator=generator).to(DEVICE)
    return x, torch.randint(4, (3,), generator=generator).to(DEVICE)


def network(*, transitions: str | None = None, **settings: Any) -> nn.Module:
    torch.manual_seed(0)
    model = prepare(Net().to(DEVICE), QuantConfig(bit_choices=BITS, **settings), images(0)[0])
    return add_transitions(model, transitions) if transitions else model


def stepper(model: nn.Module, *, slots: bool, **settings: Any) -> JointStep:
    chosen = {"sampling": "random", "sigma": 0.9, "sigma_warmup": 0, "lr": 1e-2, "cuda_graph": slots, "autocast": None}
    chosen |= settings
    step = JointStep(model, TrainConfig(epochs=2, **chosen), steps_per_epoch=8)
    if DEVICE == "cpu":
        step.fast = FastModel(model, fused=True)
        step.slots = step._make_slots() if slots else None
    assert (step.slots is not None) == slots
    return step


def everything(step: JointStep) -> dict[str, Tensor]:
    """Parameters, statistics and the states of the optimizers, by name."""
    names = {p: n for n, p in step.model.named_parameters()}
    found = dict(step.model.state_dict())
    for key, optimizer in (("weights", step.weight_optimizer), ("scales", step.scale_optimizers[BITS[0]])):
        for parameter, state in optimizer.state.items():
            found |= {f"{key} {names[parameter]} {n}": v for n, v in state.items() if isinstance(v, Tensor)}
    return {name: value.detach().clone() for name, value in found.items()}


def assert_same(separate: dict[str, Tensor], slotted: dict[str, Tensor]) -> None:
    for name, value in slotted.items():
        if name in separate:
            assert torch.equal(separate[name], value), name
        else:  # no plan has picked it yet: it has no state, which is a state of 0
            assert not bool(value.any()), name
    assert separate.keys() <= slotted.keys()


class Case(NamedTuple):
    """How a model is quantised and trained. After a second step, each optimizer has read its state back from slots."""

    quantisation: dict[str, Any]
    training: dict[str, Any]
    steps: int = 1


CASES = {
    "transitional norms": Case({"transitions": "full"}, {}, steps=2),
    "transitions of statistics only, signed, sgd": Case(
        {"transitions": "statistics", "activations": "signed"}, {"optimizer": "sgd", "weight_decay": 0.1}, steps=2
    ),
    "nested, per tensor, adamw, own rates": Case(
        {"scheme": "nested", "per_channel": False}, {"optimizer": "adamw", "alrs": "channel"}, steps=2
    ),
    "lsq, a scale per width, absolute steps": Case(
        {"scheme": "lsq"}, {"scale_step": "absolute", "scale_lr": 1e-3, "alrs": "off"}
    ),
    "weight-only": Case({"activations": "float"}, {}),
    "a rate for each channel": Case({}, {"alrs": "channel"}),
    "frozen scales": Case({}, {"learn_scales": False}),
}


@pytest.mark.interpreter(only=True)
@pytest.mark.parametrize("case", CASES)
def test_slots_equal_separate_parameters(case: str) -> None:
    quantisation, training, few = CASES[case]
    steps = STEPS if DEVICE == "cuda" else few
    model = network(**quantisation)
    twin = copy.deepcopy(model)
    separate, slotted = stepper(model, slots=False, **training), stepper(twin, slots=True, **training)
    for number in range(steps):
        reports = [step(*images(number)) for step in (separate, slotted)]
        for bits in BITS:
            for name in ("loss", "correct", "weight_scale_peaks", "act_scale_peaks", "scale_rate"):
                mine, other = (torch.as_tensor(getattr(report, name)[bits]).cpu() for report in reports)
                assert torch.equal(mine, other), (number, bits, name)
        assert_same(everything(separate), everything(slotted))
    drawn = [set(separate.sampler.plans(number, 0.9)[3].values()) for number in range(steps) if separate.sampler]
    assert any(len(widths) > 1 for widths in drawn), "a plan was a mixed one"


@pytest.mark.interpreter(only=True)
def test_a_model_without_anything_for_a_slot() -> None:
    """Weight-only, no norm: widths change in the tables alone."""
    torch.manual_seed(0)
    layers = [nn.Linear(48, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)]
    plain = nn.Sequential(nn.Flatten(), *layers).to(DEVICE)
    model = prepare(plain, QuantConfig(bit_choices=BITS, activations="float"), images(0)[0])
    twin = copy.deepcopy(model)
    separate, slotted = stepper(model, slots=False), stepper(twin, slots=True)
    for number in range(STEPS):
        losses = [step(*images(number)).loss for step in (separate, slotted)]
        assert all(torch.equal(losses[0][bits], losses[1][bits]) for bits in BITS)
    assert_same(everything(separate), everything(slotted))


@pytest.mark.interpreter(only=True)
def test_clipping_counts_what_is_in_slots() -> None:
    """Not bit for bit: the norm of all gradients is a sum in another order."""
    model = network()
    twin = copy.deepcopy(model)
    settings = {"optimizer": "sgd", "clip_norm": 0.05}
    separate, slotted = stepper(model, slots=False, **settings), stepper(twin, slots=True, **settings)
    for step in (separate, slotted):
        step(*images(0))
    for name, value in everything(separate).items():
        torch.testing.assert_close(everything(slotted)[name], value, rtol=1e-4, atol=1e-6)


@pytest.mark.interpreter(only=True)
@pytest.mark.parametrize("transitions", ["full", "statistics"])
def test_a_checkpoint_goes_on_as_if_never_stopped(tmp_path: Path, transitions: str) -> None:
    model = network(transitions=transitions)
    twin = copy.deepcopy(model)
    whole = stepper(model, slots=True)
    half = STEPS if DEVICE == "cuda" else 1
    for number in range(2 * half):
        if number == half:
            save_checkpoint(tmp_path / "c", whole)
        whole(*images(number))
    resumed = stepper(twin, slots=True)
    for number in range(max(half - 1, 1)):
        resumed(*images(number + 20))  # what it does before must not matter
    load_checkpoint(tmp_path / "c", resumed)
    for number in range(half, 2 * half):
        resumed(*images(number))
    assert everything(whole).keys() == everything(resumed).keys()
    for name, value in everything(whole).items():
        assert torch.equal(value, everything(resumed)[name]), name


@pytest.mark.interpreter(only=True)
@pytest.mark.skipif(not dist.is_available(), reason="torch without process groups")
def test_slots_in_a_process_group_are_those_without() -> None:
    """Their gradients and statistics go through the collectives of one process, which change nothing."""
    model = network(transitions="full")
    twin = copy.deepcopy(model)
    alone = stepper(model, slots=True)
    for number in range(STEPS if DEVICE == "cuda" else 1):
        alone(*images(number))
    dist.init_process_group("nccl" if DEVICE == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        grouped = stepper(twin, slots=True)
        if DEVICE == "cpu":  # where `stepper` makes the slots after the step
            grouped.reducer = GradientReducer(grouped._learned())
        assert grouped.reducer is not None
        for number in range(STEPS if DEVICE == "cuda" else 1):
            grouped(*images(number))
        assert grouped.reducer.uniform
        assert_same(everything(alone), everything(grouped))
        grouped.graphs.clear()
    finally:
        dist.destroy_process_group()


def test_where_slots_do_not_serve(caplog: pytest.LogCaptureFixture) -> None:
    for quantisation, training, reason in (
        ({"activations": "asymmetric"}, {}, "zero-points"),
        ({"rules": (Rule(type="Linear", quantize=True, activations="dynamic"),)}, {}, "a scale for each token"),
        ({"scheme": "dorefa"}, {}, "derives its scales"),
        ({}, {"scale_state": "per_bits"}, "scale_state='shared'"),
        ({}, {"update": "accumulated", "alrs": "off"}, "update='separate'"),
    ):
        model = network(**quantisation)
        config = TrainConfig(sampling="random", **training)
        with caplog.at_level(logging.INFO):
            step = JointStep(model, config, steps_per_epoch=8)
            step.fast = FastModel(model, fused=True)
            assert step._make_slots() is None
        assert reason in caplog.text
        caplog.clear()
        step(*images(0))


@pytest.mark.parametrize("changes", [{"affine": False}, {"track_running_stats": False}, {"momentum": None}], ids=str)
def test_norms_that_slots_do_not_serve(changes: dict[str, Any]) -> None:
    """A count of batches that all sets shared would make averages over all batches wrong."""
    net = Net()
    net.third_norm = nn.BatchNorm2d(4, **changes)
    model = prepare(net, QuantConfig(bit_choices=BITS), images(0)[0].cpu())
    assert "a norm has" in str(unsupported_reason(model, FastModel(model, fused=True), TrainConfig(sampling="random")))
