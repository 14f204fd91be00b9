"""Gradients in flat tensors, and what a step does in a process group; two real processes are in tests/integration."""

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from bitdial.artifact import save
from bitdial.errors import ArtifactError, ConfigError, TrainingError
from bitdial.nn import SwitchableBatchNorm
from bitdial.train import (
    ArrayData,
    JointStep,
    TrainConfig,
    distributed,
    load_checkpoint,
    reduction,
    save_checkpoint,
)
from bitdial.train.reduction import GradientReducer
from bitdial.train.sharding import shard, whole

pytestmark = pytest.mark.skipif(not (dist.is_available() and dist.is_gloo_available()), reason="torch without gloo")


@pytest.fixture
def group() -> Iterator[None]:
    """A process group of one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def two(group: None, monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """What the other of two processes adds at each all_reduce, first to last; nothing once it is empty."""
    others: list[Tensor] = []

    def all_reduce(tensor: Tensor) -> None:
        tensor += others.pop(0) if others else 0

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    monkeypatch.setattr(distributed, "world_size", lambda: 2)
    return others


def parameters() -> list[nn.Parameter]:
    torch.manual_seed(0)
    shapes: list[tuple[int, ...]] = [(3,), (2, 3, 2, 2), (5, 1), (7,)]
    made = [nn.Parameter(torch.randn(shape)) for shape in shapes]
    made[1].data = made[1].data.contiguous(memory_format=torch.channels_last)
    made.append(nn.Parameter(torch.randn(4, dtype=torch.float64)))
    return made


def test_alone_in_a_group_gradients_stay_what_they_are(group: None) -> None:
    mine = parameters()
    reducer = GradientReducer(mine)
    for times in range(2):
        expected: list[Tensor | None] = [torch.randn_like(p) for p in mine]
        expected[2 * times] = None
        for parameter, value in zip(mine, expected, strict=True):
            parameter.grad = None if value is None else value.clone()
        reducer.reduce()
        for parameter, value in zip(mine, expected, strict=True):
            assert (parameter.grad is None) == (value is None)
            if value is not None and parameter.grad is not None:
                assert torch.equal(parameter.grad, value)
                assert parameter.grad.stride() == parameter.stride(), "laid out as the parameter is"
                assert parameter.grad.dtype == parameter.dtype
    assert reducer.uniform


def test_gradients_add_up_in_the_flat_tensor(group: None) -> None:
    """Widths of one update: a backward pass adds to what the reduction before it left."""
    layer = nn.Linear(3, 2)
    reducer = GradientReducer(list(layer.parameters()))
    for times in (1, 2, 3):
        layer(torch.ones(1, 3)).sum().backward()
        reducer.reduce()
        assert torch.equal(layer.weight.grad, torch.full((2, 3), float(times)))


def test_means_and_marks_of_two(two: list[Tensor]) -> None:
    first, second, third = (nn.Parameter(torch.zeros(n)) for n in (3, 2, 2))
    reducer = GradientReducer([first, second, third])
    first.grad = torch.tensor([1.0, 2.0, 3.0])
    flat = reducer.buckets[0].flat
    other = torch.zeros_like(flat)  # the other process has no gradient of the first, one of the second
    other[reducer.buckets[0].views[1].storage_offset()] = 4.0
    other[-2] = 1.0
    two.append(other)
    reducer.reduce()
    assert first.grad.tolist() == [0.5, 1.0, 1.5]
    assert second.grad is not None
    assert second.grad.tolist() == [4.0, 0.0]
    assert third.grad is None
    assert not reducer.uniform, "such a step must not be recorded"


def test_a_recorded_step_is_checked_later(two: list[Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    """While a graph is recorded nobody looks at the counts; they are added up on the device."""
    monkeypatch.setattr(reduction, "_is_recorded", lambda tensor: True)
    parameter = nn.Parameter(torch.zeros(3))
    reducer = GradientReducer([parameter])
    for other_has_one, agreed in ((True, True), (False, False)):
        parameter.grad = torch.ones(3)
        other = torch.zeros_like(reducer.buckets[0].flat)
        other[-1] = float(other_has_one)
        two.append(other)
        reducer.reduce()
        assert parameter.grad.tolist() == [0.5, 0.5, 0.5]
        if agreed:
            reducer.check()
    with pytest.raises(TrainingError, match="gradients of different parameters"):
        reducer.check()


def test_a_sparse_gradient_is_refused(group: None) -> None:
    table = nn.Embedding(5, 2, sparse=True)
    table(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(TrainingError, match="sparse=False"):
        GradientReducer(list(table.parameters())).reduce()


def test_statistics_of_stand_ins_are_averaged_in_place_of_the_sets(
    two: list[Tensor], make_model: Callable[..., nn.Module]
) -> None:
    model = make_model()
    model.add_module("plain", nn.BatchNorm1d(3))
    norms = [module for module in model.modules() if isinstance(module, SwitchableBatchNorm)]
    stand_ins = {norm: copy.deepcopy(norm.active) for norm in norms}
    before = copy.deepcopy(model.state_dict())
    size = 2 * 3 + sum(2 * norm.num_features for norm in norms)
    two.append(torch.full((size,), 8.0))
    means = {norm: stand_in.running_mean.clone() for norm, stand_in in stand_ins.items()}
    distributed.average_norms(model, stand_ins)
    for norm, mean in means.items():
        assert torch.equal(stand_ins[norm].running_mean, (mean + 8) / 2)
    moved = [name for name, value in model.state_dict().items() if not torch.equal(value, before[name])]
    assert moved == ["plain.running_mean", "plain.running_var"]


@pytest.mark.parametrize(
    "settings",
    [{}, {"accumulate": 2}, {"update": "accumulated", "alrs": "off"}, {"sampling": "random", "sigma_warmup": 0}],
    ids=str,
)
def test_a_step_alone_in_a_group_is_that_without_one(
    settings: dict[str, Any], make_model: Callable[..., nn.Module], make_data: Callable[..., ArrayData]
) -> None:
    """Bit for bit; without a group nothing is reduced."""
    ends = []
    for grouped in (False, True):
        if grouped:
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            model = make_model()
            step = JointStep(model, TrainConfig(epochs=1, lr=1e-2, **settings), steps_per_epoch=3)
            assert (step.reducer is not None) == grouped
            for batch in make_data().batches(0):
                step(batch.inputs, batch.targets)
            ends.append(model.state_dict())
        finally:
            if grouped:
                dist.destroy_process_group()
    for name, value in ends[0].items():
        assert torch.equal(value, ends[1][name]), name


def test_a_sharded_model_is_refused(group: None, make_model: Callable[..., nn.Module]) -> None:
    class FullyShardedDataParallel(nn.Sequential):
        """Known by its name."""

    with pytest.raises(ConfigError, match="use fully_shard"):
        JointStep(FullyShardedDataParallel(make_model()), TrainConfig(epochs=1), steps_per_epoch=1)


@pytest.mark.parametrize(
    ("settings", "optimizer", "problem"),
    [
        ({"sampling": "random"}, None, "sampling='random'"),
        ({"alrs": "layer"}, None, "alrs='layer'"),
        ({}, lambda named: torch.optim.SGD([p for _, p in named], lr=0.1), "an optimizer of your own"),
    ],
    ids=["sampling", "alrs", "optimizer"],
)
def test_what_needs_whole_parameters_is_refused(
    settings: dict[str, Any], optimizer: Any, problem: str, group: None, make_model: Callable[..., nn.Module]
) -> None:
    model = make_model(norms=False)
    shard(model)
    with pytest.raises(ConfigError, match=f"{problem} does not go with a model that is spread over processes"):
        JointStep(model, TrainConfig(epochs=1, **settings), steps_per_epoch=1, optimizer=optimizer)


@pytest.mark.parametrize(
    "settings", [{}, {"accumulate": 2, "clip_norm": 0.5}, {"update": "accumulated", "alrs": "off"}]
)
def test_a_sharded_step_alone_in_a_group_is_that_without_one(
    settings: dict[str, Any],
    group: None,
    make_model: Callable[..., nn.Module],
    make_data: Callable[..., ArrayData],
    tmp_path: Path,
) -> None:
    """Also from a checkpoint of the other kind."""
    ends = []
    for sharded in (False, True):
        model = make_model(norms=False)
        if sharded:
            shard(model)
        step = JointStep(model, TrainConfig(epochs=1, lr=1e-2, **settings), steps_per_epoch=3)
        batches = list(make_data().batches(0))
        for number, batch in enumerate(batches):
            step(batch.inputs, batch.targets)
            if number == 0:
                save_checkpoint(tmp_path / f"{sharded}.ckpt", step)
        ends.append({name: whole(value) for name, value in model.state_dict().items()})
        if sharded:
            with pytest.raises(ArtifactError, match="is spread over processes"):
                save(model, tmp_path / "model.safetensors")
            load_checkpoint(tmp_path / "False.ckpt", step)
            for batch in batches[1:]:
                step(batch.inputs, batch.targets)
            ends.append({name: whole(value) for name, value in model.state_dict().items()})
    for name, value in ends[0].items():
        torch.testing.assert_close(ends[1][name], value, rtol=1e-5, atol=1e-6, msg=name)
        assert torch.equal(ends[2][name], ends[1][name]), name


def test_a_step_that_is_older_than_the_group_is_refused(
    monkeypatch: pytest.MonkeyPatch, make_model: Callable[..., nn.Module], make_images: Callable[..., Any]
) -> None:
    """Each process would train a model of its own."""
    step = JointStep(make_model(), TrainConfig(epochs=1), steps_per_epoch=1)
    monkeypatch.setattr(distributed, "world_size", lambda: 2)
    with pytest.raises(TrainingError, match="join it first"):
        step(*make_images(4))


def test_backends_by_device(group: None) -> None:
    """On gloo steps are not recorded: it passes by the host."""
    assert (distributed.backend("cpu"), distributed.backend("cuda")) == ("gloo", "gloo")


def test_without_a_group_there_is_no_backend() -> None:
    assert distributed.backend("cpu") is None
