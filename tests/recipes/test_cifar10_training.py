"""The CIFAR-10 recipes on a few random images: what reaches the run, what the rows say, what is kept."""

import json
import platform
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bitdial import load, read_artifact, set_bits
from bitdial.cli import main
from bitdial.prepare.config import QuantConfig
from bitdial.recipes import RECIPES, RecipeOptions, RecipeOutcome, cifar10
from bitdial.recipes.cifar10 import cifar10_data
from bitdial.recipes.outcome import _NOT_SETTINGS
from bitdial.train import TrainConfig

training = import_module("bitdial.recipes.cifar10_training")
ALWAYS = [
    "scheme", "alrs", "kd", "start", "lr", "bit_choices", "seed", "epochs", "split", "float_top1", "top1", "stopped",
    "stored_bits", "epoch_seconds", "device", "versions", "command",
]  # fmt: skip


def write_images(folder: Path, train: int = 16, **changes: np.ndarray) -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    arrays: dict[str, Any] = {}
    for part, count in (("train", train), ("test", 8)):
        arrays[f"x_{part}"] = random.integers(0, 256, (count, 3, 32, 32), dtype=np.uint8)
        arrays[f"y_{part}"] = random.integers(0, 10, count, dtype=np.uint8)
    np.savez(folder / "cifar10.npz", **arrays | changes)
    return arrays


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few images in a few steps, on the CPU whatever the machine has."""
    monkeypatch.setattr(cifar10, "HELD_OUT", 8)
    monkeypatch.setattr(training, "BATCH", 8)
    monkeypatch.setattr(training, "run_device", lambda: torch.device("cpu"))


@pytest.fixture
def tiny(small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with networks that take no time."""
    networks = {"resnet20": {"blocks": 1, "width": 4}, "resnet56": {"blocks": 2, "width": 4}}
    monkeypatch.setattr(training, "NETWORKS", {name: ("cifar_resnet", sizes) for name, sizes in networks.items()})


def options(folder: Path, **changes: Any) -> RecipeOptions:
    settings: dict[str, Any] = {"epochs": 1, "bit_choices": (4, 2), "progress": False, "data": folder}
    return RecipeOptions(out=folder / "run", results=folder / "results.json", **{**settings, **changes})


def resnet20(folder: Path, **changes: Any) -> RecipeOutcome:
    return RECIPES["cifar10-resnet20"](options(folder, **changes))


def command(folder: Path, *words: str, recipe: str = "cifar10-resnet20") -> list[str]:
    places = ["--data", str(folder), "--out", str(folder / "run"), "--results", str(folder / "results.json")]
    return ["train", recipe, *places, "--epochs", "1", *words]


def rows(folder: Path) -> list[dict[str, Any]]:
    return json.loads((folder / "results.json").read_text())


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "run").iterdir())


# --- whole runs ---------------------------------------------------------------------------------


def check_artifact(folder: Path, row: dict[str, Any]) -> None:
    """The shipped file gives the accuracy in the row."""
    (path,) = (folder / "run").glob("*.safetensors")
    live = load(read_artifact(path))
    x, y = cifar10_data(folder, holdout=False, device=torch.device("cpu"))[1]
    for bits, top1 in row["top1"].items():
        set_bits(live, int(bits))
        with torch.no_grad():
            right = (live(x).argmax(dim=1) == y).double().mean()
        assert round(100 * float(right), 2) == top1


def test_resnet20_end_to_end(tmp_path: Path, small: None, capsys: pytest.CaptureFixture[str]) -> None:
    write_images(tmp_path)
    words = command(tmp_path, "--bits", "4,2", "--alrs", "off", "--seed", "3")
    assert main(words) == 0, capsys.readouterr().err
    (row,) = rows(tmp_path)
    assert list(row) == ALWAYS, "by default a row has these fields, and no more"
    expected = {"scheme": "double_rounding", "alrs": "off", "kd": "none", "bit_choices": [4, 2], "seed": 3, "epochs": 1,
                "split": "test", "stored_bits": 4, "command": " ".join(["bitdial", *words])}  # fmt: skip
    assert {name: row[name] for name in expected} == expected
    assert set(row["top1"]) == {"4", "2"}
    assert all(0 <= value <= 100 for value in (row["float_top1"], *row["top1"].values()))
    assert row["epoch_seconds"] > 0
    assert row["device"] == platform.machine()
    assert row["versions"]["torch"] == torch.__version__
    artifact = "cifar10-resnet20-seed=3-epochs=1-bit_choices=42-alrs=off.safetensors"
    assert files(tmp_path) == [artifact, "float-resnet20-3-1.ckpt"], "the float model stays for other runs"
    check_artifact(tmp_path, row)


def test_mobilenetv2_end_to_end(tmp_path: Path, small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    name, arguments = training.NETWORKS["mobilenetv2"]
    assert arguments == {"num_classes": 10, "small_input": True, "dropout": 0.0}
    monkeypatch.setitem(training.NETWORKS, "mobilenetv2", (name, {**arguments, "width_mult": 0.1}))
    write_images(tmp_path, train=8)
    assert main(command(tmp_path, "--bits", "4,2", recipe="cifar10-mobilenetv2")) == 0
    (row,) = rows(tmp_path)
    assert row["model"] == "mobilenetv2"
    assert sorted(row) == sorted([*ALWAYS, "model"])
    artifact = "cifar10-mobilenetv2-epochs=1-bit_choices=42.safetensors"
    assert files(tmp_path) == [artifact, "float-mobilenetv2-0-1.ckpt"]
    assert read_artifact(tmp_path / "run" / artifact).metrics["recipe"] == "cifar10-mobilenetv2"
    check_artifact(tmp_path, row)


def test_a_dedicated_run_has_one_width(tmp_path: Path, tiny: None) -> None:
    write_images(tmp_path)
    assert main(command(tmp_path, "--bits", "2", "--scheme", "lsq")) == 0
    (row,) = rows(tmp_path)
    assert (row["bit_choices"], set(row["top1"]), row["stored_bits"]) == ([2], {"2"}, 32)
    check_artifact(tmp_path, row)


def test_holdout_runs_are_marked_and_leave_the_test_set_alone(tmp_path: Path, tiny: None) -> None:
    arrays = write_images(tmp_path, train=24, x_test=np.array(["poison"]), y_test=np.array(["poison"]))
    outcome = resnet20(tmp_path, holdout=True, scheme="lsq")
    assert torch.cat([y for _, y in outcome.test]).tolist() == arrays["y_train"][-8:].tolist()
    (row,) = rows(tmp_path)
    assert (row["split"], row["stored_bits"], row["command"]) == ("holdout", 32, None)


def test_the_command_says_what_to_do_without_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command(tmp_path)) == 1
    assert "name another folder with --data" in capsys.readouterr().err


# --- settings -----------------------------------------------------------------------------------

# Each setting that has no default of its own in every row: what is typed, what the row then says.
ABLATIONS: list[tuple[str, dict[str, Any]]] = [
    ("--ties up", {"ties": "up"}),
    ("--per-tensor", {"per_channel": False}),
    ("--scale-gradient printed", {"scale_gradient": "printed"}),
    ("--update accumulated --alrs off", {"update": "accumulated"}),
    ("--freeze-scales", {"learn_scales": False}),
    ("--scale-lr 0.0001", {"scale_lr": 1e-4}),
    ("--scale-state per_bits", {"scale_state": "per_bits"}),
    ("--batch 4", {"batch": 4}),
    ("--weight-decay 0", {"weight_decay": 0.0}),
    ("--distill in_place --distill-weight 0.5", {"distill_weight": 0.5}),
    ("--distill teacher --temperature 4", {"temperature": 4.0}),
    ("--distill teacher --teacher resnet56", {"teacher": "resnet56"}),
    ("--float-epochs 2", {"float_epochs": 2}),
    ("--recalibrate 2", {"recalibrate": 2}),
    ("--cutout 3", {"cutout": 3}),
]


@pytest.mark.parametrize(("words", "field"), ABLATIONS, ids=[words for words, _ in ABLATIONS])
def test_an_ablation_is_in_the_row_only_where_it_differs(
    tmp_path: Path, tiny: None, monkeypatch: pytest.MonkeyPatch, words: str, field: dict[str, Any]
) -> None:
    write_images(tmp_path)
    seen: dict[str, Any] = {}

    def spy(model: Any, data: Any, config: TrainConfig, **rest: Any) -> Any:
        seen.update(model=model, data=data, config=config, **rest)
        return train(model, data, config, **rest)

    def spy_prepare(model: Any, config: QuantConfig, calibration: Any) -> Any:
        seen["quant"] = config
        return prepare(model, config, calibration)

    train, prepare = training.train, training.prepare
    monkeypatch.setattr(training, "train", spy)
    monkeypatch.setattr(training, "prepare", spy_prepare)
    assert main(command(tmp_path, "--bits", "4,2", *words.split())) == 0
    (row,) = rows(tmp_path)
    outcomes = {*ALWAYS, "teacher_top1"}
    assert {name: row[name] for name in row if name not in outcomes} == field
    ((name, value),) = field.items()
    assert any(f"-{name}={value}" in file for file in files(tmp_path)), "it is in the name of the artifact"
    for config in (seen["quant"], seen["config"]):
        assert getattr(config, name, value) == value, "it reaches the run"
    assert seen["data"].batch_size == (value if name == "batch" else 8)
    assert seen["data"].augment.cutout == (value if name == "cutout" else 0)


def test_the_defaults_spelled_out_are_the_defaults(tmp_path: Path, tiny: None) -> None:
    """So that a row groups with the others however its command was typed."""
    write_images(tmp_path)
    words = """--ties even --scale-gradient exact --update separate --scale-state shared --batch 8 --weight-decay 5e-5
        --distill none --distill-weight 0.7 --temperature 1 --float-epochs 1 --lr 0.001 --bits 8,6,4,2 --seed 0"""
    assert main(command(tmp_path, *words.split())) == 0
    assert list(rows(tmp_path)[0]) == ALWAYS
    assert files(tmp_path) == ["cifar10-resnet20-epochs=1.safetensors", "float-resnet20-0-1.ckpt"]


CHANGES: list[dict[str, Any]] = [
    {"holdout": True}, {"seed": 1}, {"epochs": 2}, {"float_epochs": 2}, {"batch": 4}, {"bit_choices": (4, 3)},
    {"recalibrate": 1}, {"cutout": 2},
    {"scheme": "nested"}, {"ties": "up"}, {"per_channel": False}, {"start": "lsq"}, {"scale_gradient": "printed"},
    {"lr": 0.0123}, {"weight_decay": 0.0}, {"optimizer": "sgd"}, {"alrs": "literal"},
    {"update": "accumulated", "alrs": "off"},
    {"learn_scales": False}, {"scale_lr": 0.1}, {"scale_state": "per_bits"}, {"distill": "in_place"},
    {"distill": "teacher"}, {"distill": "cascade"}, {"distill": "teacher", "teacher": "resnet56"},
    {"distill": "teacher", "teacher": "resnet56", "teacher_seed": 1},
    {"distill": "teacher", "distill_weight": 0.1}, {"distill": "teacher", "temperature": 2.0}, {"alrs": "off"},
]  # fmt: skip


def test_runs_of_other_settings_share_no_file(tmp_path: Path, tiny: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several runs may go on in one folder at a time, so neither checkpoint nor artifact may be shared."""
    used: list[Path] = []

    class Stop(Exception):
        pass

    def note(*args: object, checkpoint: Path, **settings: object) -> None:
        used.append(checkpoint)
        raise Stop

    write_images(tmp_path)
    monkeypatch.setattr(training, "train", note)
    for changes in ({}, *CHANGES):
        with pytest.raises(Stop):
            resnet20(tmp_path, **changes)
    assert len(set(used)) == len(CHANGES) + 1
    others = {"sampling", "sigma", "sigma_warmup", "transitions", "size"}  # these recipes refuse them
    every_setting = {f.name for f in fields(RecipeOptions)} - set(_NOT_SETTINGS) - others
    assert every_setting == {name for changes in CHANGES for name in changes}, "all settings are tried here"


CONFLICTS: list[tuple[str, str]] = [
    ("--update accumulated", "set alrs='off'"),
    ("--update accumulated --alrs off --scale-state per_bits", "scale_state='shared'"),
    ("--scheme lsq --scale-gradient printed", "a weight scale that all widths share; 'lsq' has none"),
    ("--teacher resnet56", "--teacher needs --distill teacher or cascade"),
    ("--scale-lr -1", "scale_lr=-1.0 must be a positive number"),
    ("--distill teacher --distill-weight 2", "distill_weight=2.0 must lie between 0 and 1"),
    ("--cutout 32", "--cutout 32: the images are 32 x 32; give less than 32"),
    ("--results .", "--results .: this is a folder"),
    ("--history .", "--history .: this is a folder"),
]


@pytest.mark.parametrize(("words", "message"), CONFLICTS)
def test_conflicts_are_explained_before_anything_is_trained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: str, message: str
) -> None:
    write_images(tmp_path)
    assert main(command(tmp_path, *words.split())) == 1
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


# --- float models -------------------------------------------------------------------------------


def test_the_float_model_is_shared_between_runs(tmp_path: Path, tiny: None) -> None:
    write_images(tmp_path)
    first = resnet20(tmp_path)
    (checkpoint,) = (tmp_path / "run").glob("float-*.ckpt")
    before = checkpoint.stat().st_mtime_ns
    second = resnet20(tmp_path, scheme="nested", batch=4, weight_decay=0.1)
    assert checkpoint.stat().st_mtime_ns == before
    for name, value in first.float_model.state_dict().items():
        assert torch.equal(value, second.float_model.state_dict()[name]), name
    assert first.artifact != second.artifact
    assert [row["scheme"] for row in rows(tmp_path)] == ["double_rounding", "nested"]


def test_float_models_of_other_lengths_do_not_mix(tmp_path: Path, tiny: None) -> None:
    write_images(tmp_path)
    short, long = resnet20(tmp_path), resnet20(tmp_path, float_epochs=2)
    assert {"float-resnet20-0-1.ckpt", "float-resnet20-0-2.ckpt"} <= set(files(tmp_path))
    assert not torch.equal(short.float_model.fc.weight, long.float_model.fc.weight)
    assert [row.get("float_epochs") for row in rows(tmp_path)] == [None, 2]
    assert len(long.history.rows) == 1


@pytest.mark.parametrize("distill", ["teacher", "cascade"])
@pytest.mark.parametrize("teacher", [None, "resnet56"])
def test_the_teacher_is_trained_like_the_student_and_kept(
    tmp_path: Path, tiny: None, monkeypatch: pytest.MonkeyPatch, teacher: str | None, distill: str
) -> None:
    write_images(tmp_path)
    seen: list[Any] = []
    train = training.train

    def spy(*args: Any, teacher: Any, **rest: Any) -> Any:
        seen.append(teacher)
        return train(*args, teacher=teacher, **rest)

    monkeypatch.setattr(training, "train", spy)
    outcome = resnet20(tmp_path, distill=distill, teacher=teacher)
    kept = [name for name in files(tmp_path) if name.startswith("float-")]
    if teacher is None:
        assert seen == [outcome.float_model]
        assert kept == ["float-resnet20-0-1.ckpt"]
        assert "teacher_top1" not in rows(tmp_path)[0], "it is that of the float model"
    else:
        assert len(seen[0].layer1) == 2, "another network than the student's"
        assert kept == ["float-resnet20-0-1.ckpt", "float-resnet56-0-1.ckpt"]
        assert 0 <= rows(tmp_path)[0]["teacher_top1"] <= 100
        before = (tmp_path / "run" / kept[1]).stat().st_mtime_ns
        resnet20(tmp_path, distill=distill, teacher=teacher, scheme="nested")
        assert (tmp_path / "run" / kept[1]).stat().st_mtime_ns == before
        for name, value in seen[0].state_dict().items():
            assert torch.equal(value, seen[1].state_dict()[name]), name


def test_runs_of_several_seeds_may_share_a_teacher(tmp_path: Path, tiny: None) -> None:
    write_images(tmp_path)
    shared = {"distill": "teacher", "teacher": "resnet56", "teacher_seed": 0}
    reached = [resnet20(tmp_path, seed=seed, **shared) for seed in (0, 1)]
    floats = ["float-resnet20-0-1.ckpt", "float-resnet20-1-1.ckpt", "float-resnet56-0-1.ckpt"]
    assert [name for name in files(tmp_path) if name.startswith("float-")] == floats
    assert reached[0].artifact != reached[1].artifact
    first, second = rows(tmp_path)
    assert first["teacher_seed"] == second["teacher_seed"] == 0
    assert first["teacher_top1"] == second["teacher_top1"]


# --- history ------------------------------------------------------------------------------------


def test_history_has_the_accuracy_of_every_epoch(tmp_path: Path, tiny: None) -> None:
    write_images(tmp_path)
    path = tmp_path / "figures" / "history.json"
    assert main([*command(tmp_path, "--bits", "4,2", "--history", str(path)), "--epochs", "2"]) == 0
    history, (row,) = json.loads(path.read_text()), rows(tmp_path)
    assert history["settings"] == row
    assert [epoch["epoch"] for epoch in history["rows"]] == [0, 1]
    assert all(set(epoch["top1"]) == {"4", "2"} for epoch in history["rows"])
    assert {bits: round(100 * top1, 2) for bits, top1 in history["rows"][-1]["top1"].items()} == row["top1"]
    assert len(history["layers"]) == len(history["gradients"]["2"][0]["weight"])


def test_without_history_the_test_set_is_looked_at_once(tmp_path: Path, tiny: None) -> None:
    write_images(tmp_path)
    with_it = resnet20(tmp_path, history=tmp_path / "history.json")
    without = resnet20(tmp_path, replace=True)
    assert "top1" in with_it.history.rows[0]
    assert "top1" not in without.history.rows[0]
    for name, value in with_it.model.state_dict().items():
        assert torch.equal(value, without.model.state_dict()[name]), "looking changes nothing"


def test_recalibration_changes_norm_statistics_and_nothing_else(tmp_path: Path, tiny: None) -> None:
    write_images(tmp_path)
    plain, anew = (resnet20(tmp_path, recalibrate=batches).model.state_dict() for batches in (0, 2))
    different = {name for name in plain if not torch.equal(plain[name], anew[name])}
    statistics = {name for name in plain if "running_" in name or "num_batches" in name}
    assert different <= statistics
    assert {name for name in statistics if ".sets." in name and "running_" in name} <= different
