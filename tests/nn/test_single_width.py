"""A prepared model in a plain training loop says once that it trains one width; on purpose, it says nothing."""

import copy
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from bitdial import JointStep, TrainConfig, accuracy, at_bits, evaluate, load_trainable, prepare, save, set_bits, train
from bitdial.nn.single_width import PASSES
from bitdial.prepare.config import QuantConfig

INPUTS, TARGETS = torch.randn(8, 6, generator=torch.Generator().manual_seed(0)), torch.arange(8) % 3


def float_net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 5), nn.ReLU(), nn.Linear(5, 3))


def prepared(*bit_choices: int) -> nn.Module:
    return prepare(float_net(), QuantConfig(bit_choices=bit_choices or (8, 4, 2)), INPUTS)


def fit(model: nn.Module, steps: int) -> int:
    """A training loop as anyone writes it, Trainer's among them; returns how often it was warned."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    model.train()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(steps):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(INPUTS), TARGETS).backward()
            optimizer.step()
    assert all("no width was ever set: only 8 bits are trained" in str(one.message) for one in caught)
    return len(caught)


def test_it_says_so_once(tmp_path: Path) -> None:
    model = prepared()
    twin = copy.deepcopy(model)
    assert fit(model, PASSES) == 0
    assert fit(copy.deepcopy(model), 1) == 1
    assert fit(model, PASSES + 2) == 1
    assert fit(model, PASSES + 2) == 0
    assert fit(twin, PASSES + 1) == 1
    save(prepared(), tmp_path / "m")
    assert fit(load_trainable(tmp_path / "m", float_net()), PASSES + 1) == 1


def test_looking_at_other_widths_is_no_choice() -> None:
    model = prepared()
    assert fit(model, PASSES // 2) == 0
    evaluate(model, [(INPUTS, TARGETS)], [8, 4, 2])
    with at_bits(model, 4):
        assert fit(model, PASSES + 1) == 0  # this one is
    assert fit(model, PASSES // 2 + 1) == 1


def on_purpose(model: nn.Module) -> None:
    set_bits(model, 8)


def in_turn(model: nn.Module) -> None:
    for bits in (8, 4, 2):
        set_bits(model, bits)


def joint(model: nn.Module) -> None:
    JointStep(model, TrainConfig(epochs=1), steps_per_epoch=1)(INPUTS, TARGETS)


def whole_run(model: nn.Module) -> None:
    train(model, [(INPUTS, TARGETS)], TrainConfig(epochs=1), progress=False)


@pytest.mark.parametrize("begin", [on_purpose, in_turn, joint, whole_run])
def test_a_width_that_was_set_is_meant(begin: Callable[[nn.Module], None]) -> None:
    model = prepared()
    begin(model)
    assert fit(model, PASSES + 2) == 0


def test_what_is_no_training_of_one_width_among_several() -> None:
    assert fit(prepared(8), PASSES + 2) == 0
    model = prepared()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(PASSES + 2):
            accuracy(model, [(INPUTS, TARGETS)])
            model.eval()(INPUTS)
            with torch.no_grad():
                model.train()(INPUTS)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # of torch's own compiler
def test_compiled_models_are_compiled_once() -> None:
    """Counting is no part of a graph, and makes none anew."""
    model = prepared().train()
    graphs: list[Tensor] = []

    def backend(graph: torch.fx.GraphModule, example: list[Tensor]) -> Callable[..., object]:
        graphs.append(example[0])
        return graph.forward

    compiled = torch.compile(model, backend=backend, fullgraph=True)
    for _ in range(3):
        compiled(INPUTS)
    assert len(graphs) == 1
    torch.compiler.reset()


def test_a_layer_with_a_width_of_its_own_does_not_count() -> None:
    """It may be set by rule, so the first that goes by the dial counts; if there is none, nothing is left untrained."""
    config = QuantConfig(bit_choices=(8, 2), keep_first_last=8)
    model = prepare(nn.Sequential(*(nn.Linear(4, 4) for _ in range(3))), config, torch.randn(8, 4))
    assert [layer.unset_passes for layer in model] == [None, 0, None]
    model = prepare(nn.Sequential(*(nn.Linear(4, 4) for _ in range(2))), config, torch.randn(8, 4))
    assert [layer.unset_passes for layer in model] == [None, None]


def test_a_short_training_says_so_when_it_is_saved(tmp_path: Path) -> None:
    model = prepared()
    assert fit(model, 20) == 0
    with pytest.warns(UserWarning, match="has run 20 times in training, and no width was ever set: only 8 bits"):
        save(model, tmp_path / "m")
    save(model, tmp_path / "m")  # once
    model = prepared()
    fit(model, 20)
    set_bits(model, 8)  # meant so
    save(model, tmp_path / "m")
