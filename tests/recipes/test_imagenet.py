"""The ImageNet recipe on a few tiny images: one process and two, stopped and resumed, from weights and from a file."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import bitdial
from bitdial import load, read_artifact, set_bits
from bitdial.cli import main
from bitdial.errors import ConfigError, TrainingError
from bitdial.recipes import RECIPES, RecipeOptions, RecipeOutcome
from bitdial.recipes.image_batches import FolderData
from bitdial.train import TrainConfig

pytest.importorskip("PIL")
recipe = import_module("bitdial.recipes.imagenet")
ALWAYS = [
    "model", "processes", "scheme", "alrs", "kd", "start", "lr", "bit_choices", "seed", "epochs", "split", "float_top1",
    "top1", "stopped", "stored_bits", "epoch_seconds", "device", "versions", "start_from", "classes", "images",
    "command",
]  # fmt: skip


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch, one_thread: None) -> None:
    """On the CPU whatever the machine has, with a checkpoint after each step."""
    monkeypatch.setattr(recipe.distributed, "own_device", lambda: torch.device("cpu"))
    monkeypatch.setattr(recipe, "CHECKPOINT_EVERY", 1)


def words(data: Path, weights: Path, out: Path, *more: str) -> list[str]:
    places = ["--data", str(data), "--weights", str(weights), "--out", str(out), "--results", str(out / "rows.json")]
    return ["train", "imagenet", *places, "--size", "32", "--batch", "8", "--workers", "1", *more]


def options(data: Path, out: Path, **changes: Any) -> RecipeOptions:
    settings: dict[str, Any] = {"size": 32, "batch": 8, "workers": 1, "epochs": 1, "bit_choices": (8, 2)}
    return RecipeOptions(out=out, data=data, results=out / "rows.json", progress=False, **{**settings, **changes})


def run(data: Path, out: Path, **changes: Any) -> RecipeOutcome:
    return RECIPES["imagenet"](options(data, out, **changes))


def row_of(out: Path) -> dict[str, Any]:
    (row,) = json.loads((out / "rows.json").read_text())
    return row


def top1_of_file(path: Path, data: Path) -> dict[str, float]:
    """What a live model of the file makes of the images in DATA/val."""
    live = load(path)
    settings = bitdial.ImageSettings.from_dict(read_artifact(path).metrics["image_settings"])
    batches = bitdial.ImageBatches(data / "val", settings, labels="folders").labelled()
    found = {}
    for bits in read_artifact(path).bit_choices:
        set_bits(live, bits)
        with torch.no_grad():
            right = sum(int((live(x).argmax(dim=1) == y).sum()) for x, y in batches)
        found[str(bits)] = right / sum(len(y) for _, y in batches)
    return found


def test_the_defaults_are_the_papers() -> None:
    config = TrainConfig()
    paper = ("adam", 5e-4, 5e-5, 90, "cosine", 0, 256, 224)
    ours = (config.optimizer, config.lr, config.weight_decay, config.epochs, config.schedule, config.warmup_steps)
    assert (*ours, recipe.BATCH, recipe.SIZE) == paper


def test_end_to_end(
    tmp_path: Path,
    make_folder: Callable[..., Path],
    make_weights: Callable[..., Path],
    capsys: pytest.CaptureFixture[str],
) -> None:
    data, weights, out = make_folder(), make_weights(), tmp_path / "run"
    history = tmp_path / "history.json"
    command = words(
        data, weights, out, "--epochs", "2", "--bits", "8,2", "--model", "mobilenet_v2", "--history", str(history)
    )
    assert main(command) == 0, capsys.readouterr().err
    assert "16 images of data, the validation set" in capsys.readouterr().out
    row = row_of(out)
    assert sorted(row) == sorted([*ALWAYS, "batch", "size"])
    expected = {
        "model": "mobilenet_v2", "processes": 1, "bit_choices": [8, 2], "epochs": 2, "lr": 5e-4, "split": "val",
        "classes": 8, "images": 32, "size": 32, "batch": 8, "command": " ".join(["bitdial", *command]),
    }  # fmt: skip
    assert {name: row[name] for name in expected} == expected
    assert row["float_top1"] is not None
    (artifact,) = out.glob("*.safetensors")
    assert sorted(path.name for path in out.iterdir()) == [artifact.name, "rows.json"], "no checkpoint is left"
    assert artifact.name.startswith(f"imagenet-mobilenet_v2-{row['start_from'][:8]}-epochs=2-")
    metrics = read_artifact(artifact).metrics
    assert metrics["image_settings"]["mean"] == [120.0, 110.0, 100.0]
    assert metrics["image_settings"]["crop"] == 32
    assert metrics["top1"] == top1_of_file(artifact, data)
    assert {bits: round(100 * top1, 2) for bits, top1 in metrics["top1"].items()} == row["top1"]
    course = json.loads(history.read_text())["rows"]
    assert [set(epoch["top1"]) for epoch in course] == [{"8", "2"}, {"8", "2"}], "each width after each epoch"
    assert course[-1]["top1"] == pytest.approx(metrics["top1"], abs=1e-4)
    assert main(command) == 0
    assert "this run is finished" in capsys.readouterr().out


def test_other_classes_than_those_of_the_weights(
    tmp_path: Path, make_folder: Callable[..., Path], make_weights: Callable[..., Path]
) -> None:
    """The last layer is new, and nobody calls the accuracy of that the float model's."""
    outcome = run(make_folder(classes=3), tmp_path / "run", weights=make_weights(classes=8), recalibrate=1)
    assert outcome.float_top1 is None
    assert row_of(tmp_path / "run")["float_top1"] is None
    assert read_artifact(outcome.artifact).metrics["run"]["settings"]["classes"] == 3


def test_from_a_file_that_was_trained_or_calibrated_before(
    tmp_path: Path, make_folder: Callable[..., Path], make_weights: Callable[..., Path]
) -> None:
    data, weights = make_folder(), make_weights()
    first = run(data, tmp_path / "first", weights=weights)
    second = run(data, tmp_path / "second", start_from=first.artifact, lr=1e-9, learn_scales=False)
    assert second.float_top1 == first.float_top1
    codes = [read_artifact(outcome.artifact) for outcome in (first, second)]
    for name in codes[0].layers:
        assert torch.equal(codes[0].codes(name), codes[1].codes(name)), name  # at such a rate nothing moves
    assert codes[1].metrics["image_settings"] == codes[0].metrics["image_settings"]
    taught = run(data, tmp_path / "taught", start_from=first.artifact, weights=weights, distill="teacher", seed=1)
    assert taught.float_top1 == first.float_top1
    for part in ("train", "val"):
        (data / part / "class9").mkdir()
        (data / part / "class9" / "1.jpg").write_bytes((data / part / "class0" / "0.jpg").read_bytes())
    with pytest.raises(ConfigError, match="is for 8 classes"):
        run(data, tmp_path / "third", start_from=first.artifact)


def test_held_out_images_are_not_trained_on_and_val_stays_unread(
    tmp_path: Path,
    make_folder: Callable[..., Path],
    make_weights: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    data = make_folder(classes=2, train=5, val=1)
    for path in (data / "val").rglob("*.jpg"):
        path.write_bytes(b"poison")
    monkeypatch.setattr(recipe, "HELD_OUT_EVERY", 5)
    seen: list[Any] = []
    real = FolderData.batches

    def spy(self: FolderData, epoch: int, **rest: Any) -> Any:
        seen.append(self.images)
        return real(self, epoch, **rest)

    monkeypatch.setattr(FolderData, "batches", spy)
    outcome = run(data, tmp_path / "run", weights=make_weights(classes=2), holdout=True, batch=4)
    assert row_of(tmp_path / "run")["split"] == "holdout"
    assert outcome.metrics["images"] == {"data": "data", "part": "held out of the training set", "count": 2}
    trained = {bytes(name) for images in seen for name in images.names}
    held = {bytes(name) for name in outcome.test.images.names}  # type: ignore[attr-defined]
    assert held == {b"class0/4.jpg", b"class1/4.jpg"}
    assert len(trained) == 8
    assert not trained & held


def test_a_stopped_run_ends_where_one_ends_that_never_stopped(
    tmp_path: Path,
    make_folder: Callable[..., Path],
    make_weights: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Bit for bit, in the middle of an epoch, with worker processes, and dropout that draws random numbers."""
    data, weights = make_folder(classes=3), make_weights(classes=3)
    torch.manual_seed(5)
    whole = run(data, tmp_path / "whole", weights=weights, epochs=2, batch=4)

    class Stopped(TrainingError):
        """The power went off."""

    real = FolderData.batches

    def stopping(self: FolderData, epoch: int, **rest: Any) -> Any:
        for number, batch in enumerate(real(self, epoch, **rest)):
            if (epoch, number) == (1, 1):
                raise Stopped
            yield batch

    with monkeypatch.context() as patch:
        patch.setattr(FolderData, "batches", stopping)
        torch.manual_seed(5)
        with pytest.raises(Stopped):
            run(data, tmp_path / "parts", weights=weights, epochs=2, batch=4)
    torch.manual_seed(77)
    resumed = run(data, tmp_path / "parts", weights=weights, epochs=2, batch=4, workers=2)
    for name, value in whole.model.state_dict().items():
        assert torch.equal(value, resumed.model.state_dict()[name]), name
    assert resumed.top1 == whole.top1


CONFLICTS: list[tuple[dict[str, Any], str]] = [
    ({"weights": None}, "starts from a trained float network"),
    ({"model": "resnet50"}, "of different models: --model resnet50, .*mobilenet_v2"),
    ({"cutout": 4}, "takes no --cutout"),
    ({"float_epochs": 4}, "takes no --float-epochs"),
    ({"distill": "teacher", "teacher": "resnet56"}, "takes no --teacher"),
    ({"data": Path("nowhere")}, "nowhere/train does not exist"),
]


def test_what_does_not_go_together(
    tmp_path: Path, make_folder: Callable[..., Path], make_weights: Callable[..., Path]
) -> None:
    data, weights = make_folder(classes=2, train=1, val=1), make_weights(classes=2)
    for changes, said in CONFLICTS:
        given = {"weights": weights, "data": data, **changes}
        with pytest.raises(ConfigError, match=said):
            run(given.pop("data"), tmp_path / "run", **given)
    with pytest.raises(ConfigError, match="not sampled plans"):
        run(data, tmp_path / "run", weights=weights, start_from=weights, sampling="random")
    with pytest.raises(ConfigError, match="too few to hold every 25th out"):
        run(data, tmp_path / "run", weights=weights, holdout=True)
    (data / "val" / "class1").rename(data / "val" / "class2")
    with pytest.raises(ConfigError, match="train and val have different classes, such as 'class1'"):
        run(data, tmp_path / "run", weights=weights)
    for other in ("digits", "cifar10-resnet20", "cifar10-resnet20-mixed"):
        for name, value in (("model", "resnet18"), ("weights", weights), ("workers", 1), ("size", 32)):
            with pytest.raises(ConfigError, match=rf"the recipe {other} takes no --{name}"):
                RECIPES[other](RecipeOptions(out=tmp_path / "run", **{name: value}))


def test_files_that_do_not_say_enough_are_refused(
    tmp_path: Path, make_folder: Callable[..., Path], make_weights: Callable[..., Path]
) -> None:
    data = make_folder(classes=2, train=1, val=1)
    model = bitdial.build_model("mobilenet_v2", width_mult=0.1, num_classes=2)
    prepared = bitdial.prepare(model, bitdial.QuantConfig(bit_choices=(8, 2)), torch.rand(2, 3, 32, 32))
    path = tmp_path / "calibrated.safetensors"
    bitdial.save(prepared, path)
    cases: list[tuple[dict[str, Any], str]] = [
        ({}, "does not say how images become its input; name the float weights"),
        ({"bit_choices": (4, 2)}, r"the widths of .* are \(8, 2\)"),
        ({"scheme": "lsq", "per_channel": False}, "--scheme, --per-channel: not for a run that starts from a file"),
        ({"distill": "teacher"}, "say --weights FILE too"),
    ]
    for changes, said in cases:
        with pytest.raises(ConfigError, match=said):
            run(data, tmp_path / "run", start_from=path, **changes)
    outcome = run(data, tmp_path / "run", start_from=path, weights=make_weights(classes=2), batch=2)
    assert outcome.metrics["image_settings"]["mean"] == [120.0, 110.0, 100.0]


@pytest.mark.slow
@pytest.mark.skipif(not (dist.is_available() and dist.is_gloo_available()), reason="torch without gloo")
def test_two_processes_under_torchrun(
    tmp_path: Path, make_folder: Callable[..., Path], make_weights: Callable[..., Path]
) -> None:
    """The command of eight GPUs with two processes on the CPU: one file, one row, one voice."""
    data, weights, out = make_folder(val=3), make_weights(), tmp_path / "run"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    command += ["--nproc-per-node", "2", "-m", "bitdial"]
    command += words(data, weights, out, "--epochs", "2", "--bits", "8,2")
    few = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "CUDA_VISIBLE_DEVICES": ""}
    for said in ("Saved ", "this run is finished"):
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=few)
        assert done.returncode == 0, done.stderr
        assert done.stdout.count(said) == 1, done.stdout
        assert done.stdout.count("24 images of data, the validation set") == 1
    row = row_of(out)
    assert (row["processes"], row["images"], row["classes"]) == (2, 32, 8)
    (artifact,) = out.glob("*.safetensors")
    metrics = read_artifact(artifact).metrics
    assert metrics["top1"] == top1_of_file(artifact, data)
