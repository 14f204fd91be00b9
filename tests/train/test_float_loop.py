"""The float stage: stopped, killed or beside others, it ends bit for bit like one that never was."""

import logging
import math
import os
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bitdial.artifact import read_artifact
from bitdial.cli import main
from bitdial.errors import CheckpointError, TrainingError
from bitdial.files.container import read_container, write_container
from bitdial.recipes import RecipeOptions
from bitdial.recipes.digits import digits
from bitdial.train import ArrayData
from bitdial.train import float_loop as float_training
from bitdial.train.data import Sample
from bitdial.train.float_loop import train_float

EPOCHS, BATCHES = 3, 3  # of 20 samples in batches of 8
STEPS = range(1, EPOCHS * BATCHES)
FINISHED, UNFINISHED = "float.ckpt", "float.unfinished.ckpt"
SETTINGS: dict[str, dict[str, Any]] = {
    "sgd": {"optimizer": "sgd", "lr": 0.1, "weight_decay": 5e-4},
    "adam": {"lr": 1e-2, "weight_decay": 5e-5},
    "adamw": {"optimizer": "adamw", "lr": 1e-2, "weight_decay": 0.1},
}
each_optimizer = pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def saves_each_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    """However short an epoch is."""
    monkeypatch.setattr(float_training, "SAVE_EVERY", 0)


class Killed(Exception):
    """The power went off."""


class DisturbedData(ArrayData):
    """Does something just before it gives out batch number `at` of the whole run."""

    def __init__(self, *arrays: Tensor, at: int, disturb: Callable[[], None], **rest: Any):
        super().__init__(*arrays, **rest)
        self.at, self.disturb = at, disturb

    def batches(self, epoch: int, *, start: int = 0, rank: int = 0, world: int = 1) -> Iterator[Sample]:
        for number, batch in enumerate(super().batches(epoch, start=start), start=start):
            if epoch * len(self) + number == self.at:
                self.disturb()
            yield batch


def kill() -> None:
    raise Killed


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def make_data(at: int = -1, disturb: Callable[[], None] = kill, samples: int = 20, seed: int = 0) -> ArrayData:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(samples, 2, 4, 4, generator=generator)
    targets = torch.randint(0, 3, (samples,), generator=generator)
    return DisturbedData(inputs, targets, batch_size=8, seed=seed, at=at, disturb=disturb)


def make_model(seed: int = 0, width: int = 4) -> nn.Module:
    """Norms and dropout, so that statistics and random states matter; leaves the generator at a place of its own."""
    torch.manual_seed(seed)
    net = nn.Sequential(
        nn.Conv2d(2, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(), nn.Dropout(0.3), nn.Flatten(),
        nn.Linear(16 * width, 3),
    )  # fmt: skip
    return net.to(memory_format=torch.channels_last)  # as the recipes have it


def run(settings: dict[str, Any], data: ArrayData, folder: Path | None = None, *, seed: int = 0) -> dict[str, Tensor]:
    """Train a fresh model as the stage does; how it ends."""
    model = make_model(seed)
    checkpoint = None if folder is None else folder / FINISHED
    train_float(model, data, epochs=EPOCHS, checkpoint=checkpoint, progress=False, **settings)
    assert not model.training
    return model.state_dict()


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def saved_step(folder: Path) -> int:
    return read_container(folder / UNFINISHED, error=CheckpointError)[1]["step"]


# --- what it trains -------------------------------------------------------------------------------


@each_optimizer
def test_it_is_plain_training_with_a_cosine_rate(settings: dict[str, Any], tmp_path: Path) -> None:
    model, data = make_model(), make_data()
    kinds = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}
    rest = {name: settings[name] for name in ("lr", "weight_decay")}
    optimizer: torch.optim.Optimizer
    if settings.get("optimizer") == "sgd":
        optimizer = torch.optim.SGD(model.parameters(), momentum=0.9, **rest)
    else:
        optimizer = kinds[settings.get("optimizer", "adam")](model.parameters(), **rest)
    batches = [batch for epoch in range(EPOCHS) for batch in data.batches(epoch)]
    for number, batch in enumerate(batches):
        optimizer.param_groups[0]["lr"] = settings["lr"] * (1 + math.cos(math.pi * number / len(batches))) / 2
        optimizer.zero_grad()
        F.cross_entropy(model(batch.inputs), batch.targets).backward()
        optimizer.step()
    assert_same(run(settings, make_data()), model.state_dict())
    assert_same(run(settings, make_data(), tmp_path), model.state_dict())
    assert names(tmp_path) == [FINISHED]


def test_the_finished_file_is_the_one_it_always_was(tmp_path: Path) -> None:
    """Files of runs from before must still load, and mean what they meant."""
    trained = run(SETTINGS["sgd"], make_data(), tmp_path)
    tensors, manifest, _ = read_container(tmp_path / FINISHED, error=CheckpointError)
    settings = {"epochs": 3, "lr": 0.1, "weight_decay": 5e-4, "optimizer": "sgd", "seed": 0, "samples": 20,
                "batch_size": 8, "autocast": None}  # fmt: skip
    assert manifest == {"kind": "float", "settings": settings}
    assert_same(tensors, trained)

    other = make_model(seed=5).state_dict()
    write_container(tmp_path / FINISHED, other, {"kind": "float", "settings": settings}, error=CheckpointError)
    assert_same(run(SETTINGS["sgd"], make_data(at=0), tmp_path), other)
    with pytest.raises(CheckpointError, match="other settings; remove it or use another folder"):
        run(SETTINGS["adam"], make_data(), tmp_path)


# --- stopped and killed ---------------------------------------------------------------------------


@pytest.mark.parametrize("at", STEPS)
@each_optimizer
def test_killed_at_any_step(settings: dict[str, Any], at: int, tmp_path: Path) -> None:
    """It goes on from the last epoch's end; other weights and random states are at hand to go wrong."""
    whole = run(settings, make_data())
    drawn = torch.rand(3)
    with pytest.raises(Killed):
        run(settings, make_data(at), tmp_path)
    if at < BATCHES:
        assert not tmp_path.exists() or names(tmp_path) == []
        assert_same(run(settings, make_data(), tmp_path), whole)
    else:
        assert names(tmp_path) == [UNFINISHED]
        assert saved_step(tmp_path) == at // BATCHES * BATCHES
        assert_same(run(settings, make_data(), tmp_path, seed=1), whole)
    assert torch.equal(torch.rand(3), drawn), "what comes after draws the same numbers"
    assert names(tmp_path) == [FINISHED]


def test_epochs_in_quick_succession_are_not_all_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(float_training, "SAVE_EVERY", 3600)
    with pytest.raises(Killed):
        run(SETTINGS["sgd"], make_data(EPOCHS * BATCHES - 1), tmp_path)
    assert names(tmp_path) == []
    run(SETTINGS["sgd"], make_data(), tmp_path)
    assert names(tmp_path) == [FINISHED]


@pytest.mark.parametrize("at", [0, *STEPS])
@each_optimizer
def test_terminated_at_any_step(settings: dict[str, Any], at: int, tmp_path: Path) -> None:
    """It saves itself first, in the midst of an epoch too."""
    whole, before = run(settings, make_data()), signal.getsignal(signal.SIGTERM)
    last = at == EPOCHS * BATCHES - 1
    where = tmp_path / (FINISHED if last else UNFINISHED)
    with pytest.raises(TrainingError) as caught:
        run(settings, make_data(at, terminate), tmp_path)
    assert str(caught.value) == f"stopped by SIGTERM after step {at + 1}; run again to go on from {where}"
    assert signal.getsignal(signal.SIGTERM) is before
    assert names(tmp_path) == [where.name]
    if not last:
        assert saved_step(tmp_path) == at + 1
    assert_same(run(settings, make_data(), tmp_path, seed=1), whole)
    assert names(tmp_path) == [FINISHED]


def test_stopped_at_every_step(tmp_path: Path) -> None:
    whole = run(SETTINGS["sgd"], make_data())
    for at in range(EPOCHS * BATCHES):
        with pytest.raises(TrainingError, match=f"after step {at + 1};"):
            run(SETTINGS["sgd"], make_data(at, terminate), tmp_path, seed=at)
    assert_same(run(SETTINGS["sgd"], make_data(), tmp_path, seed=1), whole)


def test_terminated_without_a_checkpoint() -> None:
    with pytest.raises(TrainingError, match="stopped by SIGTERM after step 2; nothing was saved"):
        run(SETTINGS["sgd"], make_data(1, terminate))


def test_a_spoilt_model_does_not_replace_a_good_state(tmp_path: Path) -> None:
    model = make_model()

    def spoil() -> None:
        with torch.no_grad():
            model[1].running_var[0] = math.nan  # does not show in the loss

    data = make_data(BATCHES + 1, spoil)
    with pytest.raises(TrainingError, match=r"'1.running_var' holds NaN"):
        train_float(model, data, epochs=EPOCHS, checkpoint=tmp_path / FINISHED, progress=False, **SETTINGS["sgd"])
    assert saved_step(tmp_path) == BATCHES
    assert_same(run(SETTINGS["sgd"], make_data(), tmp_path), run(SETTINGS["sgd"], make_data()))


SCRIPT = """
import sys, time
from pathlib import Path
import torch
from bitdial.models import build_model
from bitdial.train import float_loop as float_training
from bitdial.train.float_loop import train_float
from bitdial.train import ArrayData

generator = torch.Generator().manual_seed(0)
inputs, targets = torch.randn(20, 1, 8, 8, generator=generator), torch.randint(0, 10, (20,), generator=generator)

float_training.SAVE_EVERY = 0

class Slow(ArrayData):
    def batches(self, epoch, **share):
        for batch in super().batches(epoch, **share):
            time.sleep(0.02)
            yield batch


def run(checkpoint, data=ArrayData):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = build_model("cifar_resnet", blocks=1, width=4, in_channels=1)
    settings = {"epochs": 8, "lr": 0.1, "weight_decay": 5e-4, "optimizer": "sgd"}
    train_float(model, data(inputs, targets, batch_size=4), checkpoint=checkpoint, progress=False, **settings)
    return model.state_dict()


if __name__ == "__main__":
    run(Path(sys.argv[1]), Slow)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """A run of 8 epochs of 5 steps."""
    path = tmp_path / "script.py"
    path.write_text(SCRIPT, encoding="utf-8")
    return path


def start(script: Path, folder: Path) -> subprocess.Popen[str]:
    command = [sys.executable, str(script), str(folder / FINISHED)]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=script.parent)


@pytest.mark.slow
def test_processes_that_are_ended_or_run_side_by_side(script: Path, tmp_path: Path) -> None:
    """One is told to stop, one killed, each after its first epoch; two more train in one folder until they end."""
    ended = {number: tmp_path / number.name for number in (signal.SIGTERM, signal.SIGKILL)}
    both = tmp_path / "both"
    stopped = {number: start(script, folder) for number, folder in ended.items()}
    beside = [start(script, both) for _ in range(2)]
    try:
        deadline, left = time.monotonic() + 120, set(ended)
        while left and time.monotonic() < deadline:
            for number in list(left):
                if (ended[number] / UNFINISHED).exists() or stopped[number].poll() is not None:
                    os.kill(stopped[number].pid, number)
                    left.remove(number)
            time.sleep(0.005)
        stderr = {number: process.communicate(timeout=120)[1] for number, process in stopped.items()}
        messages = [process.communicate(timeout=120)[1] for process in beside]
    finally:
        for process in (*stopped.values(), *beside):
            process.kill()
    run_here = runpy.run_path(str(script))["run"]
    whole = run_here(None)

    for number, folder in ended.items():
        expected = 1 if number == signal.SIGTERM else -signal.SIGKILL
        assert stopped[number].returncode == expected, stderr[number]
        assert UNFINISHED in names(folder)
        assert FINISHED not in names(folder)
        if number == signal.SIGTERM:
            assert f"stopped by SIGTERM after step {saved_step(folder)}; run again to go on from" in stderr[number]
        assert_same(run_here(folder / FINISHED), whole)

    assert [process.returncode for process in beside] == [0, 0], messages
    assert names(both) == [FINISHED]
    assert_same(read_container(both / FINISHED, error=CheckpointError)[0], whole)


def test_a_whole_recipe_ends_in_the_same_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped in its second epoch of float training; what is trained jointly after that has the same bits."""

    def recipe(folder: str) -> str:
        outcome = digits(RecipeOptions(out=tmp_path / folder, epochs=2, bit_choices=(4, 2), progress=False))
        return read_artifact(outcome.artifact).digest

    whole = recipe("whole")
    for disturb in (kill, terminate):

        def disturbed(*arrays: Tensor, disturb: Callable[[], None] = disturb, **rest: Any) -> ArrayData:
            return DisturbedData(*arrays, at=30, disturb=disturb, **rest)

        folder = disturb.__name__
        with monkeypatch.context() as patch:
            patch.setattr(sys.modules["bitdial.recipes.digits"], "ArrayData", disturbed)
            with pytest.raises((Killed, TrainingError)):
                recipe(folder)
        assert names(tmp_path / folder) == [UNFINISHED]
        assert recipe(folder) == whole
        assert names(tmp_path / folder) == ["digits.safetensors"]


# --- several runs at once -------------------------------------------------------------------------


@pytest.mark.parametrize("end", STEPS)
@pytest.mark.parametrize("at", [1, 4, 8])
def test_runs_that_share_a_folder(at: int, end: int, tmp_path: Path) -> None:
    """While one trains, another comes, goes on from what the first one saved, and is terminated."""
    whole = run(SETTINGS["sgd"], make_data())

    def another() -> None:
        state = torch.get_rng_state()  # another process would have its own
        if end >= at // BATCHES * BATCHES:  # it begins there
            with pytest.raises(TrainingError):
                run(SETTINGS["sgd"], make_data(end, terminate), tmp_path)
        torch.set_rng_state(state)

    assert_same(run(SETTINGS["sgd"], make_data(at, another), tmp_path), whole)
    assert names(tmp_path) == [FINISHED]
    assert_same(read_container(tmp_path / FINISHED, error=CheckpointError)[0], whole)


@pytest.mark.parametrize("disturb", [kill, terminate])
def test_a_run_that_another_overtook(disturb: Callable[[], None], tmp_path: Path) -> None:
    """It is stopped after the other has finished: what it leaves is not gone on from, and goes away."""
    whole = run(SETTINGS["sgd"], make_data())

    class Overtaken(DisturbedData):
        def batches(self, epoch: int, **share: Any) -> Iterator[Sample]:
            if epoch == 1:
                run(SETTINGS["sgd"], make_data(), tmp_path)
            yield from super().batches(epoch, **share)

    data = make_data()
    overtaken = Overtaken(data.inputs, data.targets, batch_size=8, at=2 * BATCHES, disturb=disturb)
    with pytest.raises((Killed, TrainingError)):
        run(SETTINGS["sgd"], overtaken, tmp_path)
    assert names(tmp_path) == [FINISHED, UNFINISHED]
    assert_same(run(SETTINGS["sgd"], make_data(at=0), tmp_path, seed=1), whole)
    assert names(tmp_path) == [FINISHED]


# --- files that do not fit ------------------------------------------------------------------------


@pytest.fixture(params=["sgd", "adam"])
def kept(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[dict[str, Any], Path]:
    """The settings and the unfinished file of a run that stopped after four steps."""
    settings = SETTINGS[request.param]
    with pytest.raises(TrainingError):
        run(settings, make_data(3, terminate), tmp_path)
    return settings, tmp_path / UNFINISHED


def assert_refused(
    path: Path, settings: dict[str, Any], match: str, *, data: ArrayData | None = None, width: int = 4
) -> None:
    """CheckpointError says what to do, and nothing changes: file, model, random states."""
    model = make_model(seed=1, width=width)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    written, generator = path.read_bytes(), torch.get_rng_state()
    with pytest.raises(CheckpointError, match=match) as caught:
        train_float(
            model, data or make_data(), **{"epochs": EPOCHS} | settings, checkpoint=path.with_name(FINISHED),
            progress=False,
        )  # fmt: skip
    assert f"remove {path} to begin the float stage anew, or use another folder" in str(caught.value)
    assert_same(model.state_dict(), before)
    assert path.read_bytes() == written
    assert torch.equal(torch.get_rng_state(), generator)
    assert names(path.parent) == [UNFINISHED]


def test_other_settings_are_named(kept: tuple[dict[str, Any], Path]) -> None:
    settings, path = kept
    assert_refused(path, settings | {"lr": 0.5}, f"lr: {settings['lr']} then, 0.5 now")
    assert_refused(path, settings | {"epochs": 4}, "epochs: 3 then, 4 now")
    assert_refused(path, settings | {"optimizer": "adamw"}, "then, 'adamw' now")
    assert_refused(path, settings, "seed: 0 then, 1 now", data=make_data(seed=1))
    assert_refused(path, settings, "samples: 20 then, 22 now", data=make_data(samples=22))


def test_another_model_is_refused(kept: tuple[dict[str, Any], Path]) -> None:
    settings, path = kept
    assert_refused(path, settings, "it does not fit the model: '0.bias'", width=5)


@pytest.mark.parametrize("damage", ["cut", "flipped", "longer", "empty", "text"])
def test_a_damaged_file(damage: str, kept: tuple[dict[str, Any], Path]) -> None:
    settings, path = kept
    data = path.read_bytes()
    middle = len(data) // 2
    path.write_bytes(
        {
            "cut": data[:-1],
            "flipped": data[:middle] + bytes([data[middle] ^ 16]) + data[middle + 1 :],
            "longer": data + b"\0",
            "empty": b"",
            "text": b"weights=1",
        }[damage]
    )
    assert_refused(path, settings, UNFINISHED)


@pytest.mark.parametrize(
    "change",
    [{"kind": "float"}, {"kind": "checkpoint"}, {"kind": None}, {"settings": []}, {"settings": None}, {"settings": {}},
     *({"step": step} for step in (0, -1, 9, 10**30, 1.5, 4.0, True, "4", None, [4])),
     {"python_random": None}, {"python_random": [3, [], None]}, {"python_random": {}}],
    ids=str,
)  # fmt: skip
def test_a_hostile_manifest(change: dict[str, Any], kept: tuple[dict[str, Any], Path]) -> None:
    """The digest holds (anybody can compute it); the content is still checked before anything changes."""
    settings, path = kept
    tensors, manifest, _ = read_container(path, error=CheckpointError)
    write_container(path, tensors, manifest | change, error=CheckpointError)
    assert_refused(path, settings, UNFINISHED)
    for name in change:
        write_container(path, tensors, {n: v for n, v in manifest.items() if n != name}, error=CheckpointError)
        assert_refused(path, settings, UNFINISHED)


@pytest.mark.parametrize("damage", ["gone", "shape", "type"])
def test_hostile_tensors(damage: str, kept: tuple[dict[str, Any], Path]) -> None:
    """Each of them in its turn."""
    settings, path = kept
    tensors, manifest, _ = read_container(path, error=CheckpointError)
    for name, value in tensors.items():
        if damage != "shape" and (name.endswith(".step") or name.startswith("random.numpy")):
            continue  # a number is a number
        if damage == "gone" and name.startswith("random.cuda"):
            continue  # a file from a machine without a GPU has none, and is gone on from
        changed = {n: v for n, v in tensors.items() if n != name}
        if damage == "shape":
            changed[name] = value.reshape(-1)[:1].repeat(7)
        elif damage == "type":
            changed[name] = value.to(torch.float16)
        write_container(path, changed, manifest, error=CheckpointError)
        assert_refused(path, settings, UNFINISHED)


@pytest.mark.parametrize(
    "name", ["model.more", "optimizer.weights.99.exp_avg", "optimizer.weights.x", "optimizer.weights.-1.step"]
)
def test_tensors_that_do_not_belong_there(name: str, kept: tuple[dict[str, Any], Path]) -> None:
    settings, path = kept
    tensors, manifest, _ = read_container(path, error=CheckpointError)
    write_container(path, {**tensors, name: torch.zeros(1)}, manifest, error=CheckpointError)
    assert_refused(path, settings, UNFINISHED)


def test_the_command_says_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / UNFINISHED).write_bytes(b"weights=1")
    assert main(["train", "digits", "--epochs", "1", "--out", str(tmp_path)]) == 1
    assert f"remove {tmp_path / UNFINISHED} to begin the float stage anew" in capsys.readouterr().err.replace("\n", " ")


# --- what it shows --------------------------------------------------------------------------------


def test_it_shows_where_it_is(capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("rich")
    shown = make_model()
    train_float(shown, make_data(), epochs=EPOCHS, progress=True, **SETTINGS["sgd"])
    out, text = capsys.readouterr()
    assert "epoch 3/3" in text
    assert "32b " in text
    assert out == "", "results alone are on stdout"
    with caplog.at_level(logging.INFO, "bitdial"):
        silent = run(SETTINGS["sgd"], make_data())
    lines = [record.getMessage() for record in caplog.records]
    assert [line[:15] for line in lines] == [f"epoch {epoch}/3  32b " for epoch in (1, 2, 3)]
    assert capsys.readouterr().out == ""
    assert_same(shown.state_dict(), silent)
