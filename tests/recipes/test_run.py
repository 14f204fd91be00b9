"""Runs of recipes: one at a time, and never one in place of another."""

import json
import os
import sys
from pathlib import Path
from subprocess import PIPE, Popen
from typing import Any

import pytest
import torch

import bitdial
from bitdial.errors import ConfigError
from bitdial.files.lock import sole_writer
from bitdial.recipes.outcome import RecipeOptions
from bitdial.recipes.run import FinishedRun, RecipeRun, describe_images


def test_of_two_runs_in_one_folder_one_succeeds_and_the_file_is_its_own(tmp_path: Path) -> None:
    """Two real processes at once. Whichever comes first, the other must say that it did nothing."""
    command = [sys.executable, "-m", "bitdial", "train", "digits", "--bits", "2", "--epochs", "1"]
    command += ["--out", str(tmp_path), "--seed"]
    few = {**os.environ, "OMP_NUM_THREADS": "1"}
    runs = [Popen([*command, seed], stdout=PIPE, stderr=PIPE, text=True, env=few) for seed in ("0", "1")]
    texts = [run.communicate(timeout=120) for run in runs]
    assert sorted(run.returncode for run in runs) == [0, 1], texts
    winner = [run.returncode for run in runs].index(0)
    metrics = bitdial.read_artifact(tmp_path / "digits.safetensors").metrics
    assert metrics["run"]["settings"]["seed"] == winner
    assert f"{100 * metrics['top1']['2']:.2f} %" in texts[winner][0]
    refused = texts[1 - winner][1]
    assert "is being written by process" in refused or "of another run (seed:" in refused
    assert [path.name for path in tmp_path.iterdir()] == ["digits.safetensors"]


def make_run(folder: Path, **changes: Any) -> RecipeRun[RecipeOptions]:
    replace = changes.pop("replace", False)
    options = RecipeOptions(out=folder, command="bitdial train it", replace=replace)
    settings = {"seed": 0, "holdout": False, "bit_choices": (4, 2), **changes}
    files = {"artifact": folder / "it.safetensors", "checkpoint": folder / "it.ckpt"}
    return RecipeRun(recipe="digits", name="digits-seed", options=options, settings=settings, changed=changes, **files)


def finish(run: RecipeRun[RecipeOptions], /, **metrics: Any) -> None:
    model = bitdial.build_model("cifar_resnet", blocks=1, width=4, in_channels=1)
    config = bitdial.QuantConfig(bit_choices=(4, 2))
    found = run.metrics(float_top1=0.5, top1={4: 0.75}, data="digits", test=[(torch.zeros(3, 1), torch.zeros(3))])
    prepared = bitdial.prepare(model, config, torch.rand(4, 1, 8, 8))
    bitdial.save(prepared, run.artifact, metrics={**found, **metrics})


def test_a_run_is_alone(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    with sole_writer(run.artifact, work="theirs"), pytest.raises(ConfigError, match="theirs"), run.alone():
        pytest.fail("two runs")
    with (
        run.alone(),
        pytest.raises(ConfigError, match=r"\(bitdial train it, since"),
        make_run(tmp_path, replace=True).alone(),
    ):
        pytest.fail("two runs")


def test_a_finished_run_is_found_by_its_settings(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    finish(run)
    with pytest.raises(FinishedRun) as found, run.alone():
        pytest.fail("trained again")
    assert found.value.path == run.artifact
    assert found.value.artifact.metrics["run"] == json.loads(json.dumps(run.record()))
    with make_run(tmp_path, replace=True).alone():
        pass
    run.checkpoint.touch()  # of a --replace that was stopped
    with run.alone():
        pass


def test_another_run_is_refused_by_what_differs(tmp_path: Path) -> None:
    finish(make_run(tmp_path))
    other = make_run(tmp_path, seed=3, scheme="lsq")
    other.checkpoint.touch()  # it would go on from there, and overwrite the file at its end
    words = r"of another run \(scheme: None then, 'lsq' now, seed: 0 then, 3 now\); choose another --out, or replace"
    with pytest.raises(ConfigError, match=words), other.alone():
        pytest.fail("another's file is lost")
    with make_run(tmp_path, seed=3, replace=True).alone():
        pass


@pytest.mark.parametrize(
    ("stored", "words"),
    [
        ({"run": None}, "does not say which run made it"),
        ({"run": {"recipe": "digits", "settings": []}}, "does not say which run made it"),
        ({"run": {"recipe": "cifar10-resnet20", "settings": {}}}, "of the recipe cifar10-resnet20"),
    ],
    ids=str,
)
def test_files_of_unknown_runs_are_kept(tmp_path: Path, stored: dict[str, Any], words: str) -> None:
    run = make_run(tmp_path)
    finish(run, **stored)
    with pytest.raises(ConfigError, match=words), run.alone():
        pytest.fail("it is lost")


def test_a_file_that_cannot_be_read_is_kept(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    run.artifact.write_text("not an artifact")
    with pytest.raises(ConfigError, match=r"it\.safetensors is there already and cannot be read"), run.alone():
        pytest.fail("it is lost")
    with make_run(tmp_path, replace=True).alone():
        pass


def test_images_are_described(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    finish(run)
    assert describe_images(bitdial.read_artifact(run.artifact).metrics["images"]) == "3 images of digits, the test set"
    for odd in (
        None,
        [],
        "500",
        {},
        {"data": "digits", "part": "x", "count": "3"},
        {"data": 1, "part": "", "count": 1},
    ):
        assert describe_images(odd) == "not recorded"
