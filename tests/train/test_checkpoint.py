"""Checkpoints: a run that was stopped, killed or refused its disk ends bit for bit like one that never was."""

import dataclasses
import errno
import json
import logging
import os
import random
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from bitdial.errors import CheckpointError, TrainingError
from bitdial.files import container
from bitdial.files.container import read_container, write_container
from bitdial.files.lock import sole_writer
from bitdial.prepare.config import Rule
from bitdial.train import ArrayData, History, JointStep, TrainConfig, load_checkpoint, save_checkpoint, train
from bitdial.train.data import Sample

MakeModel = Callable[..., nn.Module]
MakeData = Callable[..., ArrayData]
StopAfter = tuple[Callable[[ArrayData, int], Any], type[Exception]]
BATCHES = 3  # of 20 samples in batches of 8
EPOCHS = 3


def state_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    different = [name for name in one if not torch.equal(one[name], other[name])]
    assert different == []


def assert_same_history(one: History, other: History) -> None:
    """Equal in everything but the time it took."""
    assert one.layers == other.layers
    assert [row["epoch"] for row in one.rows] == [row["epoch"] for row in other.rows]
    for mine, wanted in zip(one.rows, other.rows, strict=True):
        assert mine.keys() == wanted.keys()
        for name in sorted(mine.keys() - {"seconds"}):
            assert mine[name] == wanted[name], f"{name} of epoch {mine['epoch']}"
    assert one.gradients.keys() == other.gradients.keys()
    for bits in one.gradients:
        assert [entry["step"] for entry in one.gradients[bits]] == [entry["step"] for entry in other.gradients[bits]]
        assert one.gradients[bits] == other.gradients[bits]


def step_state(step: JointStep) -> dict[str, Tensor]:
    """All that a step holds besides the model."""
    kept = {f"floor {i}": floor for i, floor in enumerate(step.guard.floors)}
    kept |= {name: table.nan_to_num(nan=1e9) for name, table in step.distiller.tensors().items()}
    for key, optimizer in {"weights": step.weight_optimizer, **step.scale_optimizers}.items():
        for i, state in optimizer.state_dict()["state"].items():
            kept |= {f"{key} {i} {name}": torch.as_tensor(v) for name, v in state.items() if v is not None}
    kept["step"], kept["epoch"] = torch.tensor(step.step), torch.tensor(step.distiller.epoch)
    return {name: value.clone() for name, value in kept.items()}


# --- save and load --------------------------------------------------------------------------------

KINDS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "progressive": {"distill": "progressive", "distill_weight": 0.9},
    "per_bits": {"scale_state": "per_bits"},
    "sgd": {"optimizer": "sgd", "lr": 0.05},
    "adamw": {"optimizer": "adamw", "weight_decay": 0.1},
    "A.1": {"update": "accumulated", "alrs": "off"},
    "groups": {"alrs": "channel"},
    "groups, printed": {"alrs": "layer"},
}
MODELS: dict[str, dict[str, Any]] = {
    "groups": {"group_size": 2},
    "groups, printed": {"group_size": 2, "scale_gradient": "printed"},
}


@pytest.mark.parametrize("name", KINDS)
def test_a_checkpoint_holds_everything(name: str, tmp_path: Path, make_model: MakeModel, make_data: MakeData) -> None:
    settings, model_settings = KINDS[name], MODELS.get(name, {})
    config = TrainConfig(**({"epochs": EPOCHS, "lr": 1e-2} | settings))
    data = make_data()

    def fresh(seed: int) -> JointStep:
        model = make_model(seed=seed, **model_settings)
        return JointStep(model, config, steps_per_epoch=BATCHES, samples=data.samples)

    def run(step: JointStep, epoch: int, start: int, stop: int) -> None:
        for batch in list(data.batches(epoch))[start:stop]:
            step(batch.inputs, batch.targets, batch.index)

    step = fresh(seed=0)
    run(step, 0, 0, 3)
    step.end_epoch()
    run(step, 1, 0, 2)
    extra = {"notes": ["any", {"json": 1.5}], "none": None}
    save_checkpoint(tmp_path / "c", step, extra)
    other = fresh(seed=1)
    assert load_checkpoint(tmp_path / "c", other) == extra
    assert_same(state_of(other.model), state_of(step.model))
    assert_same(step_state(other), step_state(step))
    for each in (step, other):
        run(each, 1, 2, 3)
        each.end_epoch()
        run(each, 2, 0, 1)
    assert_same(state_of(other.model), state_of(step.model))
    assert_same(step_state(other), step_state(step))


def test_random_states_come_back(tmp_path: Path, make_model: MakeModel) -> None:
    step = JointStep(make_model(), TrainConfig(epochs=1), steps_per_epoch=1)
    torch.manual_seed(5)
    np.random.seed(5)
    random.seed(5)
    np.random.standard_normal()  # leaves a second gaussian in store
    random.gauss(0, 1)

    def draw() -> list[Any]:
        numpys = np.random.standard_normal(3).tolist()
        return [torch.randn(3).tolist(), numpys, np.random.rand(), random.gauss(0, 1), random.random()]

    save_checkpoint(tmp_path / "c", step)
    first = draw()
    assert draw() != first
    torch.manual_seed(6)
    np.random.seed(6)
    random.seed(6)
    assert load_checkpoint(tmp_path / "c", step) == {}
    assert draw() == first


def test_a_file_from_a_machine_without_a_gpu_goes_on_on_one_with(
    tmp_path: Path, make_model: MakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has no state of a CUDA generator: that one stays as it is, the others come back."""
    step = JointStep(make_model(), TrainConfig(epochs=1), steps_per_epoch=1)
    with monkeypatch.context() as without:
        without.setattr(torch.cuda, "is_available", lambda: False)
        save_checkpoint(tmp_path / "c", step)
    assert not [n for n in read_container(tmp_path / "c", error=CheckpointError)[0] if n.startswith("random.cuda")]
    drawn, touched = torch.rand(3), []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_rng_state", touched.append)
    assert load_checkpoint(tmp_path / "c", step) == {}
    assert touched == []
    assert torch.equal(torch.rand(3), drawn)


def test_saving_changes_nothing(tmp_path: Path, make_model: MakeModel) -> None:
    step = JointStep(make_model(), TrainConfig(epochs=1), steps_per_epoch=1)
    before, state = state_of(step.model), torch.get_rng_state()
    save_checkpoint(tmp_path / "c", step)
    assert_same(state_of(step.model), before)
    assert torch.equal(torch.get_rng_state(), state)
    assert [p.name for p in tmp_path.iterdir()] == ["c"]


def test_a_model_with_an_infinite_mask_can_be_saved(tmp_path: Path, make_model: MakeModel) -> None:
    """Attention masks are buffers of 0 and -inf: meant, not diverged."""
    model = make_model()
    model.register_buffer("mask", torch.full((2, 2), -float("inf")).triu(1))
    step = JointStep(model, TrainConfig(epochs=1), steps_per_epoch=1)
    save_checkpoint(tmp_path / "c", step)
    assert load_checkpoint(tmp_path / "c", step) == {}


# --- resuming -------------------------------------------------------------------------------------

RUNS: dict[str, dict[str, Any]] = KINDS | {
    "dropout": {"dropout": 0.4},
    "everything": {"dropout": 0.3, "distill": "progressive", "scale_state": "per_bits", "warmup_steps": 4},
}


@pytest.mark.parametrize("stop", [1, 3, 5])
@pytest.mark.parametrize("settings", RUNS.values(), ids=RUNS.keys())
def test_a_resumed_run_equals_one_that_never_stopped(
    settings: dict[str, Any],
    stop: int,
    tmp_path: Path,
    make_model: MakeModel,
    make_data: MakeData,
    stop_after: StopAfter,
) -> None:
    """Stopped inside an epoch and between two; other weights and another seed are at hand to go wrong."""
    dropout = settings.get("dropout", 0.0)
    rest = {name: value for name, value in settings.items() if name != "dropout"}
    config = TrainConfig(**({"epochs": EPOCHS, "lr": 1e-2, "checkpoint_every": 1} | rest))
    interrupted, stopped = stop_after
    validation = [(make_data(seed=3).inputs, make_data(seed=3).targets)]

    def run(data: Any, checkpoint: Path | None, seed: int) -> tuple[nn.Module, History]:
        model = make_model(dropout=dropout, seed=seed)
        torch.manual_seed(100 + seed)
        return model, train(model, data, config, evaluate_on=validation, checkpoint=checkpoint, progress=False)

    whole, expected = run(make_data(), None, seed=0)
    with pytest.raises(stopped):
        run(interrupted(make_data(), stop), tmp_path / "c", seed=0)
    assert read_container(tmp_path / "c", error=CheckpointError)[1]["step"] == stop
    resumed, history = run(make_data(), tmp_path / "c", seed=1)
    assert_same(state_of(resumed), state_of(whole))
    assert_same_history(history, expected)


def test_stopping_several_times(
    tmp_path: Path, make_model: MakeModel, make_data: MakeData, stop_after: StopAfter
) -> None:
    config = TrainConfig(epochs=EPOCHS, distill="progressive", checkpoint_every=1)
    interrupted, stopped = stop_after
    whole = make_model()
    expected = train(whole, make_data(), config, progress=False)
    for stop in range(1, EPOCHS * BATCHES):
        with pytest.raises(stopped):
            train(make_model(), interrupted(make_data(), stop), config, checkpoint=tmp_path / "c", progress=False)
    resumed = make_model()
    history = train(resumed, make_data(), config, checkpoint=tmp_path / "c", progress=False)
    assert_same(state_of(resumed), state_of(whole))
    assert_same_history(history, expected)


def test_a_finished_run_is_not_run_again(tmp_path: Path, make_model: MakeModel, make_data: MakeData) -> None:
    config = TrainConfig(epochs=2)
    first, again = make_model(), make_model(seed=1)
    history = train(first, make_data(), config, checkpoint=tmp_path / "c", progress=False)
    written = (tmp_path / "c").read_bytes()
    same = train(again, make_data(), config, checkpoint=tmp_path / "c", progress=False)
    assert_same(state_of(again), state_of(first))
    assert same.to_dict() == history.to_dict()
    assert (tmp_path / "c").read_bytes() == written
    assert not again.training


def test_another_process_that_trains_with_the_file_is_named(
    tmp_path: Path, make_model: MakeModel, make_data: MakeData, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, config = tmp_path / "run.ckpt", TrainConfig(epochs=1)
    with sole_writer(path, work="theirs"):
        with pytest.raises(CheckpointError, match=r"run\.ckpt is being written by process \d+ \(theirs"):
            train(make_model(), make_data(), config, checkpoint=path, progress=False)
        monkeypatch.setenv("RANK", "1")  # rank 0 has the lock for all that train together
        train(make_model(), make_data(), config, checkpoint=path, progress=False)
    assert [p.name for p in tmp_path.iterdir()] == ["run.ckpt"]


@pytest.mark.parametrize("every, expected", [(None, [3, 6, 9]), (1, list(range(1, 10))), (2, [2, 3, 4, 6, 8, 9])])
def test_when_checkpoints_are_written(
    every: int | None, expected: list[int], tmp_path: Path, make_model: MakeModel, make_data: MakeData,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    real, steps = container.save_file, []

    def save_file(tensors: Any, path: Any, metadata: Any) -> None:
        steps.append(json.loads(metadata["manifest"])["step"])
        real(tensors, path, metadata)

    monkeypatch.setattr(container, "save_file", save_file)
    config = TrainConfig(epochs=EPOCHS, checkpoint_every=every)
    train(make_model(), make_data(), config, checkpoint=tmp_path / "c", progress=False)
    assert steps == expected


def test_how_often_to_save_may_change_between_runs(
    tmp_path: Path, make_model: MakeModel, make_data: MakeData, stop_after: StopAfter
) -> None:
    interrupted, stopped = stop_after
    with pytest.raises(stopped):
        train(
            make_model(),
            interrupted(make_data(), 2),
            TrainConfig(epochs=2, checkpoint_every=1),
            checkpoint=tmp_path / "c",
            progress=False,
        )
    config = TrainConfig(epochs=2, checkpoint_every=5)
    assert len(train(make_model(), make_data(), config, checkpoint=tmp_path / "c", progress=False).rows) == 2


# --- killed and told to stop ----------------------------------------------------------------------

SCRIPT = """
import sys, time
import torch
from bitdial.prepare.config import QuantConfig
from bitdial.models import build_model
from bitdial.prepare.prepare import prepare
from bitdial.train import ArrayData, TrainConfig, train

generator = torch.Generator().manual_seed(0)
inputs, targets = torch.randn(20, 1, 8, 8, generator=generator), torch.randint(0, 10, (20,), generator=generator)


class Slow(ArrayData):
    def batches(self, epoch, **share):
        for batch in super().batches(epoch, **share):
            time.sleep(0.02)
            yield batch


def run(checkpoint, data=ArrayData):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    net = build_model("cifar_resnet", blocks=1, width=4, in_channels=1)
    model = prepare(net, QuantConfig(bit_choices=(8, 4, 2)), inputs)
    config = TrainConfig(epochs=4, lr=1e-2, distill="progressive", checkpoint_every=1)
    train(model, data(inputs, targets, batch_size=4), config, checkpoint=checkpoint, progress=False)
    return model


if __name__ == "__main__":
    run(sys.argv[1], Slow)
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 4 epochs of 5 steps that saves itself after every step."""
    path = tmp_path_factory.mktemp("script") / "script.py"
    path.write_text(SCRIPT, encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def undisturbed(script: Path) -> dict[str, Tensor]:
    """How that run ends."""
    return state_of(runpy.run_path(str(script))["run"](None))


def signal_in_mid_epoch(script: Path, checkpoint: Path, number: signal.Signals) -> tuple[int, str]:
    """Start the run, send the signal once it has saved a step inside its second epoch, and wait for its end."""
    process = subprocess.Popen(
        [sys.executable, str(script), str(checkpoint)], stderr=subprocess.PIPE, text=True, cwd=script.parent
    )
    try:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and process.poll() is None:
            if checkpoint.exists() and read_container(checkpoint, error=CheckpointError)[1]["step"] >= 6:
                os.kill(process.pid, number)
                break
            time.sleep(0.005)
        _, stderr = process.communicate(timeout=60)
    finally:
        process.kill()
    return process.returncode, stderr


@pytest.mark.slow
def test_killed_without_warning(script: Path, undisturbed: dict[str, Tensor], tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoints" / "c"
    code, stderr = signal_in_mid_epoch(script, checkpoint, signal.SIGKILL)
    assert code == -signal.SIGKILL, stderr
    step = read_container(checkpoint, error=CheckpointError)[1]["step"]
    assert 6 <= step < 20
    assert_same(state_of(runpy.run_path(str(script))["run"](checkpoint)), undisturbed)


def test_terminated_in_order(script: Path, undisturbed: dict[str, Tensor], tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoints" / "c"
    code, stderr = signal_in_mid_epoch(script, checkpoint, signal.SIGTERM)
    assert code == 1, stderr
    step = read_container(checkpoint, error=CheckpointError)[1]["step"]
    assert f"TrainingError: stopped by SIGTERM after step {step}; run again to go on from {checkpoint}" in stderr
    assert 6 <= step < 20
    assert [p.name for p in checkpoint.parent.iterdir()] == ["c"]
    assert_same(state_of(runpy.run_path(str(script))["run"](checkpoint)), undisturbed)


def test_a_checkpoint_from_before_there_were_callbacks_and_parts(
    tmp_path: Path, make_model: MakeModel, make_data: MakeData, stop_after: StopAfter
) -> None:
    """Files lack what came later: accumulate, steps_per_epoch, states of callbacks; autocast was None by default."""
    stopping, stopped = stop_after
    config, path, whole = TrainConfig(epochs=EPOCHS, checkpoint_every=1), tmp_path / "c", make_model()
    train(whole, make_data(), config, progress=False)
    with pytest.raises(stopped):
        train(make_model(), stopping(make_data(), 4), config, checkpoint=path, progress=False)
    tensors, manifest, _ = read_container(path, error=CheckpointError)
    assert manifest["config"]["autocast"] is None  # what 'auto' came to
    del manifest["config"]["accumulate"], manifest["config"]["steps_per_epoch"]
    del manifest["extra"]["callbacks"]
    write_container(path, tensors, manifest, error=CheckpointError)
    with pytest.raises(CheckpointError, match="accumulate: 1 then, 2 now"):
        train(make_model(), make_data(), dataclasses.replace(config, accumulate=2), checkpoint=path, progress=False)
    model = make_model(seed=1)
    train(model, make_data(), config, checkpoint=path, progress=False)
    assert_same(state_of(model), state_of(whole))


class TerminatingData:
    """Sends SIGTERM to its own process just before it gives out batch number `at` of the whole run."""

    resumable = True

    def __init__(self, data: ArrayData, at: int):
        self.data, self.at, self.samples = data, at, data.samples

    def __len__(self) -> int:
        return len(self.data)

    def batches(self, epoch: int, *, start: int = 0, rank: int = 0, world: int = 1) -> Iterator[Sample]:
        for number, batch in enumerate(self.data.batches(epoch, start=start), start=start):
            if epoch * len(self) + number == self.at:
                os.kill(os.getpid(), signal.SIGTERM)
            yield batch


@pytest.mark.parametrize("at", range(EPOCHS * BATCHES))
def test_terminated_at_any_step(at: int, tmp_path: Path, make_model: MakeModel, make_data: MakeData) -> None:
    """Also during the last step of an epoch, whose end must then not be forgotten, and of the run."""
    config = TrainConfig(epochs=EPOCHS, distill="progressive", checkpoint_every=2)
    whole = make_model()
    expected = train(whole, make_data(), config, progress=False)
    before, model, data = signal.getsignal(signal.SIGTERM), make_model(), TerminatingData(make_data(), at)
    with pytest.raises(TrainingError, match=f"stopped by SIGTERM after step {at + 1};"):
        train(model, data, config, checkpoint=tmp_path / "c", progress=False)
    assert read_container(tmp_path / "c", error=CheckpointError)[1]["step"] == at + 1
    model = make_model(seed=1)
    history = train(model, make_data(), config, checkpoint=tmp_path / "c", progress=False)
    assert signal.getsignal(signal.SIGTERM) is before
    assert_same(state_of(model), state_of(whole))
    assert_same_history(history, expected)


def test_terminated_without_a_checkpoint(make_model: MakeModel, make_data: MakeData) -> None:
    with pytest.raises(TrainingError, match="stopped by SIGTERM after step 2; nothing was saved"):
        train(make_model(), TerminatingData(make_data(), 1), TrainConfig(epochs=2), progress=False)
    last = TerminatingData(make_data(), BATCHES - 1)
    assert len(train(make_model(), last, TrainConfig(epochs=1), progress=False).rows) == 1, "it is done, and kept"


# --- writes that fail -----------------------------------------------------------------------------


@pytest.mark.parametrize("failing", [1, 4, 6])
def test_a_write_that_fails(
    failing: int, tmp_path: Path, make_model: MakeModel, make_data: MakeData, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = TrainConfig(epochs=EPOCHS, distill="progressive", checkpoint_every=1)
    whole = make_model()
    expected = train(whole, make_data(), config, progress=False)
    real, calls = container.save_file, []

    def save_file(tensors: Any, path: Any, metadata: Any) -> None:
        calls.append(path)
        if len(calls) == failing:
            Path(path).write_bytes(b"not all of it")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(tensors, path, metadata)

    monkeypatch.setattr(container, "save_file", save_file)
    folder = tmp_path / "checkpoints"
    with pytest.raises(CheckpointError, match="No space left on device"):
        train(make_model(), make_data(), config, checkpoint=folder / "c", progress=False)
    monkeypatch.undo()
    names = [p.name for p in folder.iterdir()]
    if failing == 1:
        assert names == []
    else:
        assert names == ["c"]
        assert read_container(folder / "c", error=CheckpointError)[1]["step"] == failing - 1
    resumed = make_model()
    history = train(resumed, make_data(), config, checkpoint=folder / "c", progress=False)
    assert_same(state_of(resumed), state_of(whole))
    assert_same_history(history, expected)


# --- files that do not fit ------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path: Path, make_model: MakeModel, make_data: MakeData, stop_after: StopAfter) -> Path:
    """The checkpoint of a run of two epochs, stopped after four steps."""
    interrupted, stopped = stop_after
    config = TrainConfig(epochs=2, distill="progressive", checkpoint_every=1)
    with pytest.raises(stopped):
        train(make_model(), interrupted(make_data(), 4), config, checkpoint=tmp_path / "c", progress=False)
    return tmp_path / "c"


def assert_refused(path: Path, model: nn.Module, data: ArrayData, config: TrainConfig, match: str) -> None:
    """`train` raises CheckpointError, and nothing changes: file, model, random states."""
    before, written, generator = state_of(model), path.read_bytes(), torch.get_rng_state()
    with pytest.raises(CheckpointError, match=match) as caught:
        train(model, data, config, checkpoint=path, progress=False)
    assert str(path) in str(caught.value)
    assert_same(state_of(model), before)
    assert path.read_bytes() == written
    assert torch.equal(torch.get_rng_state(), generator)


SAME = TrainConfig(epochs=2, distill="progressive", checkpoint_every=1)


@pytest.mark.parametrize(
    "change",
    [
        {"lr": 1e-3},
        {"epochs": 3},
        {"optimizer": "sgd"},
        {"scale_state": "per_bits"},
        {"distill": "in_place"},
        {"alrs": "literal"},
        {"temperature": 2.0},
    ],
    ids=str,
)
def test_other_settings_are_named(
    change: dict[str, Any], saved: Path, make_model: MakeModel, make_data: MakeData
) -> None:
    config = TrainConfig.from_dict(SAME.to_dict() | change)
    ((name, value),) = change.items()
    then = SAME.to_dict()[name]
    assert_refused(saved, make_model(), make_data(), config, rf"{name}: {then!r} then, {value!r} now")


@pytest.mark.parametrize(
    "change, match",
    [
        ({"bit_choices": (8, 6, 2)}, "conv|hidden|norm|bit_choices"),
        ({"bit_choices": (8, 4)}, "conv|hidden|norm|bit_choices"),
        ({"width": 5}, "stem|conv|norm|hidden"),
        ({"norms": False}, "norm[01]"),
        ({"switch_norms": False}, "norm[01]"),
        ({"per_channel": False}, "conv|hidden"),
        ({"activations": "asymmetric"}, "conv|hidden"),
        ({"activations": "float"}, "conv|hidden"),
        ({"activations": "signed"}, "conv|hidden"),
        ({"rules": (Rule(pattern="hidden", activations="dynamic"),)}, "hidden"),
        ({"scheme": "lsq"}, "conv|hidden"),
        ({"scheme": "nested"}, "conv|hidden|scheme"),
        ({"ties": "up"}, "conv|hidden|ties"),
        ({"dtype": torch.float64}, "stem|conv|norm|hidden|head"),
    ],
    ids=str,
)
def test_another_model_is_refused(
    change: dict[str, Any], match: str, saved: Path, make_model: MakeModel, make_data: MakeData
) -> None:
    """Including models whose tensors have the same names and shapes and mean something else."""
    data = make_data()
    if "dtype" in change:
        data.inputs = data.inputs.double()
    assert_refused(saved, make_model(**change), data, SAME, match)


def test_data_of_another_length_is_refused(saved: Path, make_model: MakeModel, make_data: MakeData) -> None:
    assert_refused(saved, make_model(), make_data(samples=30), SAME, "total_steps: 6 then, 8 now")
    assert_refused(saved, make_model(), make_data(batch_size=4), SAME, "total_steps: 6 then, 10 now")


def test_data_of_another_size_in_as_many_batches_is_refused(
    saved: Path, make_model: MakeModel, make_data: MakeData
) -> None:
    """20 and 22 samples are three batches of 8 both, but the table of predictions has 20 rows."""
    assert_refused(saved, make_model(), make_data(samples=22), SAME, "2[02]")


@pytest.mark.parametrize("damage", ["cut", "flipped", "longer", "empty", "text"])
def test_a_damaged_file(damage: str, saved: Path, make_model: MakeModel, make_data: MakeData) -> None:
    data = saved.read_bytes()
    middle = len(data) // 2
    saved.write_bytes(
        {
            "cut": data[:-1],
            "flipped": data[:middle] + bytes([data[middle] ^ 16]) + data[middle + 1 :],
            "longer": data + b"\0",
            "empty": b"",
            "text": b"weights=1",
        }[damage]
    )
    assert_refused(saved, make_model(), make_data(), SAME, ".")


@pytest.mark.parametrize("change", [{"kind": "artifact"}, {"version": 0}, {"version": 2}, {"version": "1"}], ids=str)
def test_a_container_of_another_kind(
    change: dict[str, Any], saved: Path, make_model: MakeModel, make_data: MakeData
) -> None:
    tensors, manifest, _ = read_container(saved, error=CheckpointError)
    write_container(saved, tensors, manifest | change, error=CheckpointError)
    assert_refused(saved, make_model(), make_data(), SAME, "not a checkpoint of version 1")


@pytest.mark.parametrize(
    "missing",
    ["config", "step", "epoch", "run", "layers", "python_random", "extra"],
)
def test_a_manifest_with_a_gap(missing: str, saved: Path, make_model: MakeModel, make_data: MakeData) -> None:
    """The digest holds (anybody can compute it); the content is still checked before anything changes."""
    tensors, manifest, _ = read_container(saved, error=CheckpointError)
    del manifest[missing]
    write_container(saved, tensors, manifest, error=CheckpointError)
    assert_refused(saved, make_model(), make_data(), SAME, ".")


@pytest.mark.parametrize("change", [{"config": []}, {"run": None}, {"layers": 3}, {"step": None}], ids=str)
def test_a_manifest_of_other_types(
    change: dict[str, Any], saved: Path, make_model: MakeModel, make_data: MakeData
) -> None:
    tensors, manifest, _ = read_container(saved, error=CheckpointError)
    write_container(saved, tensors, manifest | change, error=CheckpointError)
    assert_refused(saved, make_model(), make_data(), SAME, "lacks or garbles")


@pytest.mark.parametrize(
    "name", ["model.conv.weight", "floor.0", "random.cpu.0", "random.numpy.keys", "optimizer.scales.0.exp_avg"]
)
@pytest.mark.parametrize("damage", ["gone", "shape"])
def test_tensors_with_a_gap(name: str, damage: str, saved: Path, make_model: MakeModel, make_data: MakeData) -> None:
    tensors, manifest, _ = read_container(saved, error=CheckpointError)
    if damage == "gone":
        del tensors[name]
    else:
        tensors[name] = tensors[name].reshape(-1)[:1].repeat(7)
    write_container(saved, tensors, manifest, error=CheckpointError)
    assert_refused(saved, make_model(), make_data(), SAME, ".")


def test_a_checkpoint_that_is_a_folder(tmp_path: Path, make_model: MakeModel, make_data: MakeData) -> None:
    with pytest.raises(CheckpointError, match="there is no file"):
        train(make_model(), make_data(), SAME, checkpoint=tmp_path, progress=False)


# --- a user's own loader --------------------------------------------------------------------------


class StoppingList(list[Any]):
    """Batches of which the second epoch ends early, without warning, before number `at`."""

    def __init__(self, batches: list[Any], at: int):
        super().__init__(batches)
        self.at, self.epoch = at, -1

    def __iter__(self) -> Iterator[Any]:
        self.epoch += 1
        for number, batch in enumerate(super().__iter__()):
            if self.epoch == 1 and number == self.at:
                raise InterruptedError
            yield batch


@pytest.mark.parametrize("at, warned", [(0, False), (2, True)])
def test_a_loader_of_unknown_order_is_warned_about_inside_an_epoch(
    at: int, warned: bool, tmp_path: Path, make_model: MakeModel, make_data: MakeData, caplog: pytest.LogCaptureFixture
) -> None:
    batches = [(b.inputs, b.targets) for b in make_data().batches(0)]
    config = TrainConfig(epochs=2, checkpoint_every=1)
    whole = make_model()
    train(whole, batches, config, progress=False)
    with pytest.raises(InterruptedError):
        train(make_model(), StoppingList(batches, at), config, checkpoint=tmp_path / "c", progress=False)
    resumed = make_model()
    with caplog.at_level(logging.WARNING, "bitdial"):
        train(resumed, batches, config, checkpoint=tmp_path / "c", progress=False)
    assert [r.levelname for r in caplog.records] == ["WARNING"] * warned
    assert ("resuming inside an epoch" in caplog.text) == warned
    assert_same(state_of(resumed), state_of(whole))
