"""An optimizer of one's own: groups keep their rates, and a checkpoint holds all of it or says what it cannot."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bitdial.errors import CheckpointError, ConfigError
from bitdial.train import ArrayData, JointStep, TrainConfig, train

MakeModel = Callable[..., nn.Module]
MakeData = Callable[..., ArrayData]
Named = list[tuple[str, nn.Parameter]]


def parameters(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def grouped(named: Named) -> Any:
    slow = [p for name, p in named if name.startswith("head")]
    rest = [p for name, p in named if not name.startswith("head")]
    groups = [{"params": rest, "weight_decay": 1e-2}, {"params": slow, "lr": 0.0}]
    return torch.optim.SGD(groups, lr=1e-2, momentum=0.9), lambda step: 0.5**step


def test_the_built_in_ones_can_be_made_by_hand(make_model: MakeModel, make_data: MakeData) -> None:
    built, own = make_model(), make_model()
    config = TrainConfig(epochs=2, lr=1e-2, weight_decay=1e-3, optimizer="adamw", warmup_steps=2)
    train(built, make_data(), config, progress=False)
    asked: list[Named] = []

    def make(named: Named) -> torch.optim.Optimizer:
        asked.append(named)
        return torch.optim.AdamW(named, lr=1e-2, weight_decay=1e-3)

    train(own, make_data(), config, optimizer=make, progress=False)
    torch.testing.assert_close(parameters(own), parameters(built), rtol=1e-5, atol=1e-7)
    names = dict(own.named_parameters())
    assert [name for name, _ in asked[0]] == [name for name in names if "quantizer" not in name]


def test_groups_have_rates_of_their_own_times_the_schedule(make_model: MakeModel, make_data: MakeData) -> None:
    model = make_model()
    before = model.head.weight.detach().clone(), model.conv.weight.detach().clone()
    step = JointStep(model, TrainConfig(epochs=1, lr=1e-3), steps_per_epoch=3, optimizer=grouped)
    for number, batch in enumerate(make_data().batches(0)):
        report = step(batch.inputs, batch.targets)
        assert report.lr == 1e-3 * 0.5**number  # the scales' rate follows the schedule too
        assert [group["lr"] for group in step.weight_optimizer.param_groups] == [1e-2 * 0.5**number, 0.0]
    assert torch.equal(model.head.weight, before[0])
    assert not torch.equal(model.conv.weight, before[1])


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda named: torch.optim.SGD(named[1:], lr=0.1), "the optimizer leaves out 'stem.weight'; give it a group"),
        (lambda named: torch.optim.SGD(named[3:], lr=0.1), "leaves out 'stem.weight' and 2 more"),
        (lambda named: torch.optim.SGD([*(p for _, p in named), nn.Parameter(torch.ones(1))]), "has other parameters"),
        (lambda named: torch.optim.LBFGS([p for _, p in named]), "steps without a closure"),
        (lambda named: None, "it returned None"),
        (torch.optim.SGD([torch.zeros(1)]), "optimizer is of type SGD; it must be a function that makes one"),
        (lambda named: (torch.optim.SGD(named), 0.5), "the schedule 0.5 must be a function"),
        (lambda named: (torch.optim.SGD(named), lambda step: -1.0), "the schedule gives -1.0 at step 0"),
    ],
)
def test_what_is_no_optimizer_of_the_weights(make: Any, words: str, make_model: MakeModel, make_data: MakeData) -> None:
    with pytest.raises(ConfigError, match=words):
        train(make_model(), make_data(), TrainConfig(epochs=1), optimizer=make, progress=False)


class Counting(torch.optim.Optimizer):
    """Keeps plain numbers in its state and in its groups, and moves by them."""

    def __init__(self, named: Any):
        super().__init__(named, {"lr": 1e-2, "k": 0, "betas": (0.5, 0.25)})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["k"] += 1
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p]["n"] = self.state[p].get("n", 0) + 1
                    self.state[p].setdefault("mean", torch.zeros_like(p)).lerp_(p.grad, group["betas"][0])
                    p -= group["lr"] * self.state[p]["mean"] / (self.state[p]["n"] + group["k"])


@pytest.mark.parametrize("make", [grouped, Counting, lambda named: torch.optim.NAdam(named, lr=1e-3)])
@pytest.mark.parametrize("at", [2, 4])
def test_a_resumed_run_equals_one_that_never_stopped(
    at: int, make: Any, make_model: MakeModel, make_data: MakeData, stop_after: Any, tmp_path: Path
) -> None:
    stopping, stopped = stop_after
    config = TrainConfig(epochs=2, lr=1e-2, checkpoint_every=1)
    whole = make_model()
    train(whole, make_data(), config, optimizer=make, progress=False)
    with pytest.raises(stopped):
        train(
            make_model(), stopping(make_data(), at), config, optimizer=make, checkpoint=tmp_path / "c", progress=False
        )
    model = make_model(seed=1)
    train(model, make_data(), config, optimizer=make, checkpoint=tmp_path / "c", progress=False)
    assert torch.equal(parameters(model), parameters(whole))
    for other in (None, lambda named: torch.optim.SGD(named, lr=0.3)):
        with pytest.raises(CheckpointError, match="another optimizer"):
            train(make_model(), make_data(), config, optimizer=other, checkpoint=tmp_path / "c", progress=False)


def test_a_checkpoint_says_what_it_cannot_hold(make_model: MakeModel, make_data: MakeData, tmp_path: Path) -> None:
    class Hook(Counting):
        def step(self, closure: Any = None) -> None:
            self.state[self.param_groups[0]["params"][0]]["hook"] = print

    config = TrainConfig(epochs=1)
    train(make_model(), make_data(), config, optimizer=Hook, progress=False)  # without a checkpoint it may
    with pytest.raises(CheckpointError, match="what the optimizer Hook keeps as 'hook', a builtin_function_or_method"):
        train(make_model(), make_data(), config, optimizer=Hook, checkpoint=tmp_path / "c", progress=False)
