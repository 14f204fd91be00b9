"""The mixed-precision recipe on a few random images: from one file to the next, a row for each plan."""

import json
from importlib import import_module
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bitdial import load, read_artifact, set_bits
from bitdial.artifact import amend
from bitdial.cli import main
from bitdial.errors import ConfigError
from bitdial.recipes import RECIPES, RecipeOptions, cifar10
from bitdial.recipes.cifar10 import cifar10_data
from bitdial.sensitivity.result import LayerSensitivity, Sensitivity
from bitdial.train import accuracy, batched

training, mixed = (import_module(f"bitdial.recipes.cifar10_{name}") for name in ("training", "mixed"))
pytest.importorskip("highspy")


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small file of the recipe that the mixed one goes on from, in a folder with a few images."""
    monkeypatch.setattr(cifar10, "HELD_OUT", 8)
    mobile = {"num_classes": 10, "small_input": True, "dropout": 0.0, "width_mult": 0.1}
    small = {"resnet20": ("cifar_resnet", {"blocks": 1, "width": 4}), "mobilenetv2": ("mobilenet_v2", mobile)}
    monkeypatch.setattr(training, "NETWORKS", small)
    for module in (training, mixed):
        monkeypatch.setattr(module, "BATCH", 8)
        monkeypatch.setattr(module, "run_device", lambda: torch.device("cpu"))
    monkeypatch.setattr(mixed, "IMAGES", 8)
    monkeypatch.setattr(mixed, "BUDGETS", 5)
    random = np.random.default_rng(0)
    arrays: dict[str, Any] = {}
    for part, count in (("train", 16), ("test", 8)):
        arrays[f"x_{part}"] = random.integers(0, 256, (count, 3, 32, 32), dtype=np.uint8)
        arrays[f"y_{part}"] = random.integers(0, 10, count, dtype=np.uint8)
    np.savez(tmp_path / "cifar10.npz", **arrays)
    options = RecipeOptions(out=tmp_path / "run", data=tmp_path, epochs=1, bit_choices=(4, 3, 2), progress=False)
    return RECIPES["cifar10-resnet20"](options).artifact


def options(start: Path, **changes: Any) -> RecipeOptions:
    folder = start.parents[1]
    settings: dict[str, Any] = {"epochs": 2, "sampling": "hasb", "sigma_warmup": 1, "start_from": start}
    places = {"out": folder / "run", "data": folder, "results": folder / "mixed.json", "progress": False}
    return RecipeOptions(**{**settings, **places, **changes})


def test_end_to_end(start: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = start.parents[1]
    words = ["train", "cifar10-resnet20-mixed", "--out", str(folder / "run"), "--data", str(folder), "--epochs", "2"]
    words += ["--results", str(folder / "mixed.json"), "--start-from", str(start), "--sampling", "hasb"]
    assert main([*words, "--sigma-warmup", "1", "--seed", "3"]) == 0, capsys.readouterr().err
    rows = json.loads((folder / "mixed.json").read_text())
    assert [row["budget"] for row in rows] == [2.0, 2.5, 3.0, 3.5, 4.0]
    (path,) = (folder / "run").glob("mixed-*.safetensors")
    artifact = read_artifact(path)
    live, test = load(artifact), batched(*cifar10_data(folder, holdout=False, device=torch.device("cpu"))[1])
    assert artifact.sensitivity is not None
    assert list(artifact.plans) == ["2.0 bits", "2.5 bits", "3.0 bits", "3.5 bits", "4.0 bits"]
    for row, name in zip(rows, artifact.plans, strict=True):
        set_bits(live, name)
        assert row["top1"] == round(100 * accuracy(live, test), 2)
        assert row["average_bits"] <= row["budget"]
        assert set(row["plan"]) == set(artifact.layers)
        assert set(row["plan"].values()) <= {4, 3, 2}
        expected = {"sampling": "hasb", "scheme": "double_rounding", "bit_choices": [4, 3, 2], "seed": 3, "epochs": 2,
                    "split": "test", "sigma_warmup": 1}  # fmt: skip
        assert {name: row[name] for name in expected} == expected
        for bits in (4, 3, 2):
            set_bits(live, bits)
            assert row["uniform_top1"][str(bits)] == round(100 * accuracy(live, test), 2)
        assert row["start_top1"] == {b: round(100 * v, 2) for b, v in read_artifact(start).metrics["top1"].items()}
    losses = [row["predicted_loss"] for row in rows]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0]
    assert len({row["bytes"] for row in rows}) == len({row["bitops"] for row in rows}) == len(rows)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"sampling": "none", "start_from": None, "sigma_warmup": 10}, "--start-from FILE"),
        ({"holdout": True}, "was trained without --holdout"),
        ({"cutout": 99}, "--cutout 99: the images are 32 x 32"),
        ({"float_epochs": 2}, "trains no float model but a teacher's"),
        ({"bit_choices": (8, 2)}, r"the widths of .* are \(4, 3, 2\)"),
        ({"scheme": "nested", "per_channel": False}, "--scheme, --per-channel: not for a run that starts from a file"),
    ],
)
def test_what_does_not_go_together(start: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        RECIPES["cifar10-resnet20-mixed"](options(start, **changes))


def test_statistics_may_be_estimated_anew_for_plans_and_widths(start: Path) -> None:
    """Weights stay, the sets in use see new batches: as many for each plan that differs and each width."""
    outcomes = [
        RECIPES["cifar10-resnet20-mixed"](options(start, epochs=1, **more)) for more in ({}, {"recalibrate": 2})
    ]
    plain, anew = (outcome.model.state_dict() for outcome in outcomes)
    changed = {name.rsplit(".", 1)[1] for name in plain if not torch.equal(plain[name], anew[name])}
    assert changed == {"running_mean", "running_var", "num_batches_tracked"}
    plans = set(read_artifact(outcomes[1].artifact).plans.values())
    seen = sum(int(anew[f"bn1.sets.{bits}.num_batches_tracked"]) for bits in (4, 3, 2))  # the first has no pairs
    assert seen == 2 * (len(plans) + 3)
    rows = json.loads((start.parents[1] / "mixed.json").read_text())
    assert [row.get("recalibrate") for row in rows] == [None] * 5 + [2] * 5


@pytest.mark.parametrize("transitions", ["statistics", "none"])
def test_other_transitions_are_in_the_row_and_in_the_file(start: Path, transitions: str) -> None:
    outcome = RECIPES["cifar10-resnet20-mixed"](options(start, epochs=1, transitions=transitions))
    rows = json.loads((start.parents[1] / "mixed.json").read_text())
    assert {row["transitions"] for row in rows} == {transitions}
    assert f"transitions={transitions}" in outcome.artifact.name
    norm = read_artifact(outcome.artifact).norms["layer1.0.bn2"]
    expected = {"statistics": ("layer1.0.conv1", "statistics"), "none": (None, None)}
    assert (norm["fed_by"], norm.get("transitions")) == expected[transitions]


def test_the_teacher_may_be_trained_longer_and_of_another_seed(start: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = {**training.NETWORKS, "resnet56": ("cifar_resnet", {"blocks": 2, "width": 4})}
    monkeypatch.setattr(training, "NETWORKS", small)
    teacher = {"distill": "cascade", "teacher": "resnet56", "teacher_seed": 5, "float_epochs": 3}
    RECIPES["cifar10-resnet20-mixed"](options(start, epochs=1, **teacher))
    assert (start.parent / "float-resnet56-5-3.ckpt").exists()
    row = json.loads((start.parents[1] / "mixed.json").read_text())[-1]
    assert {name: row[name] for name in teacher} == teacher


def test_mobilenetv2(start: Path) -> None:
    folder = start.parents[1]
    first = RecipeOptions(out=folder / "run", data=folder, epochs=1, bit_choices=(4, 2), progress=False)
    file = RECIPES["cifar10-mobilenetv2"](first).artifact
    with pytest.raises(ConfigError, match="was not written by `bitdial train cifar10-mobilenetv2`"):
        RECIPES["cifar10-mobilenetv2-mixed"](options(start))
    layers = read_artifact(file).layers.items()
    traces = {n: LayerSensitivity(trace=1.0, error=0.1, parameters=prod(e["shape"]), samples=2) for n, e in layers}
    amend(file, sensitivity=Sensitivity(layers=traces, images=8))  # so that it need not be measured
    RECIPES["cifar10-mobilenetv2-mixed"](options(file, epochs=1, transitions="statistics"))
    row = json.loads((folder / "mixed.json").read_text())[-1]
    assert (row["model"], row["transitions"], row["bit_choices"]) == ("mobilenetv2", "statistics", [4, 2])


def test_other_files_and_other_recipes(start: Path, tmp_path: Path) -> None:
    model = RECIPES["digits"](RecipeOptions(out=tmp_path / "digits", epochs=1, progress=False))
    with pytest.raises(ConfigError, match="was not written by `bitdial train cifar10-resnet20`"):
        RECIPES["cifar10-resnet20-mixed"](options(start, start_from=model.artifact))
    with pytest.raises(ConfigError, match="for the recipe cifar10-resnet20-mixed"):
        RECIPES["cifar10-resnet20"](options(start))
    with pytest.raises(ConfigError, match="takes no --start-from"):
        RECIPES["digits"](RecipeOptions(out=tmp_path, start_from=start, sampling="random"))
    with pytest.raises(ConfigError, match="go together"):
        RecipeOptions(out=tmp_path, sampling="random")
    with pytest.raises(ConfigError, match="say --start-from FILE and --sampling hasb"):
        RECIPES["cifar10-resnet20-mixed"](options(start, sampling="none", sigma_warmup=10))
    with pytest.raises(ConfigError, match="need --sampling"):
        RecipeOptions(out=tmp_path, sigma=0.1)
    with pytest.raises(ConfigError, match="--transitions needs --sampling"):
        RecipeOptions(out=tmp_path, transitions="none")
    with pytest.raises(ConfigError, match="transitions='half' is not known"):
        options(start, transitions="half")
