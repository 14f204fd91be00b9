"""What recipes take and give: settings that fit together, rows whole or not at all."""

import dataclasses
import json
import math
import os
import sys
from contextlib import ExitStack
from pathlib import Path
from subprocess import PIPE, Popen
from typing import Any

import pytest

from bitdial.errors import BitdialError, ConfigError
from bitdial.prepare.config import QuantConfig
from bitdial.recipes.outcome import RecipeOptions, add_result, run_name, write_history
from bitdial.train import History, TrainConfig

# --- options ------------------------------------------------------------------------------------


def test_every_setting_has_a_place_to_go() -> None:
    """One that belongs to no config and that the recipes do not read would be taken and ignored."""
    settings, changed = RecipeOptions(out=Path("out")).settings()
    read_by_recipes = {"holdout", "seed", "float_epochs", "batch", "cutout", "recalibrate", "transitions"}
    read_by_recipes |= {"teacher", "teacher_seed", "size"}
    configs = {f.name for config in (QuantConfig, TrainConfig) for f in dataclasses.fields(config)}
    assert set(settings) - read_by_recipes <= configs
    assert changed == {}


@pytest.mark.parametrize("config", [QuantConfig(), TrainConfig()], ids=lambda c: type(c).__name__)
def test_the_defaults_are_those_of_the_configs(config: QuantConfig | TrainConfig) -> None:
    settings, _ = RecipeOptions(out=Path("out")).settings(epochs=TrainConfig.epochs, lr=TrainConfig.lr)
    for name in {f.name for f in dataclasses.fields(config)} & set(settings):
        assert settings[name] == getattr(config, name), name


def test_settings_are_filled_in_by_the_recipe() -> None:
    options = RecipeOptions(out=Path("out"), epochs=3, batch=256, bit_choices=(4, 2), data=Path("data"))
    settings, changed = options.settings(epochs=90, float_epochs=3, lr=0.5, batch=256)
    assert (settings["lr"], settings["epochs"], settings["float_epochs"]) == (0.5, 3, 3)
    assert changed == {"epochs": 3, "bit_choices": (4, 2)}, "a value that the recipe has anyway is no change"


def test_run_names_are_short_and_say_what_differs() -> None:
    assert run_name("cifar10", {}) == "cifar10"
    changed = {"lr": 1e-05, "bit_choices": (4, 3, 2), "learn_scales": False}
    assert run_name("cifar10", changed) == "cifar10-lr=1e-05-bit_choices=432-learn_scales=False"


CONFLICTS: list[tuple[dict[str, Any], str]] = [
    ({"teacher": "resnet56"}, "--teacher needs --distill teacher"),
    ({"teacher": "resnet56", "distill": "in_place"}, "--teacher needs --distill teacher"),
    ({"teacher": "resnet18", "distill": "teacher"}, "teacher='resnet18' is not known; choose one of 'resnet56'"),
    ({"distill": "teacher", "teacher_seed": 0}, "--teacher-seed needs --teacher"),
    ({"distill_weight": 0.5}, "need a --distill other than none"),
    ({"temperature": 4.0}, "need a --distill other than none"),
    ({"distill": "in_place", "bit_choices": (2,)}, "--bits two or more"),
    ({"learn_scales": False, "scale_lr": 1e-4}, "--freeze-scales leaves --scale-lr"),
    ({"learn_scales": False, "scale_state": "per_bits"}, "--scale-state nothing to do"),
    ({"ties": "up", "scheme": "nested"}, "nested has none: leave it out"),
    ({"ties": "up", "scheme": "lsq"}, "lsq has none: leave it out"),
]


@pytest.mark.parametrize(("settings", "words"), CONFLICTS, ids=str)
def test_conflicts_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        RecipeOptions(out=Path("out"), **settings)


@pytest.mark.parametrize(
    ("places", "words"),
    [
        ({"out": "file"}, r"--out .*file is not a folder"),
        ({"results": "folder"}, r"--results .*folder: this is a folder"),
        ({"history": "folder"}, r"--history .*folder: this is a folder"),
        ({"history": "file/history.json"}, r"--history .*file is not a folder"),
        ({"results": "file"}, r"file is not a list of results"),
    ],
    ids=str,
)
def test_a_place_that_cannot_be_written_is_refused_before_any_work(
    tmp_path: Path, places: dict[str, str], words: str
) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("{}")
    with pytest.raises(ConfigError, match=words):
        RecipeOptions(**{"out": tmp_path, **{name: tmp_path / place for name, place in places.items()}})


# --- rows ---------------------------------------------------------------------------------------


def test_rows_are_appended(tmp_path: Path) -> None:
    path = tmp_path / "results" / "table.json"  # the folder is made
    for seed in range(3):
        add_result(path, {"seed": seed, "top1": {"8": 92.5}})
    assert json.loads(path.read_text()) == [{"seed": seed, "top1": {"8": 92.5}} for seed in range(3)]
    assert [p.name for p in path.parent.iterdir()] == ["table.json"]


ADD_MANY = """
import sys
from pathlib import Path
from bitdial.recipes.outcome import add_result
print("ready", flush=True)
sys.stdin.readline()
for number in range(40):
    add_result(Path(sys.argv[1]), {"process": int(sys.argv[2]), "number": number})
"""


def test_several_processes_lose_no_row(tmp_path: Path) -> None:
    pytest.importorskip("fcntl")
    path = tmp_path / "new" / "table.json"
    words = [sys.executable, "-c", ADD_MANY, str(path)]
    with ExitStack() as stack:
        processes = [
            stack.enter_context(Popen([*words, str(i)], stdin=PIPE, stdout=PIPE, stderr=PIPE, text=True))
            for i in range(3)
        ]
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        for process in processes:  # all at once
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        for process in processes:
            _, problems = process.communicate(timeout=60)
            assert process.returncode == 0, problems
    rows = [(row["process"], row["number"]) for row in json.loads(path.read_text())]
    assert sorted(rows) == [(process, number) for process in range(3) for number in range(40)]
    assert [p.name for p in path.parent.iterdir()] == ["table.json"]


def test_rows_are_added_where_there_are_no_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fcntl", None)  # as on Windows
    for seed in range(2):
        add_result(tmp_path / "new" / "table.json", {"seed": seed})
    assert json.loads((tmp_path / "new" / "table.json").read_text()) == [{"seed": 0}, {"seed": 1}]


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BitdialError, match=r"cannot write in .*file"):
        add_result(tmp_path / "file" / "table.json", {})


@pytest.mark.parametrize("text", ['{"seed": 0}', "3", "null", "", "[", "[] []"])
def test_what_is_not_a_list_is_refused_and_kept(tmp_path: Path, text: str) -> None:
    path = tmp_path / "table.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"table\.json is not a list of results"):
        add_result(path, {"seed": 1})
    assert path.read_text() == text


def test_bytes_that_are_not_text_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not a list of results"):
        add_result(path, {"seed": 1})


def test_a_failure_leaves_the_old_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "table.json"
    add_result(path, {"seed": 0})
    before = path.read_bytes()

    def fail(*paths: object) -> None:
        raise OSError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", fail)
        with pytest.raises(BitdialError, match="untouched"):
            add_result(path, {"seed": 1})
    with pytest.raises(TypeError):
        add_result(path, {"seed": object()})
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["table.json"]


# --- history ------------------------------------------------------------------------------------


def test_history_is_written_rounded_beside_its_row(tmp_path: Path) -> None:
    rows = [{"epoch": 0, "lr": 1e-3, "seconds": 123.456789, "loss": {"8": math.pi / 1e5}}]
    gradients = {"8": [{"step": 123456789, "weight": [1 / 3, 0.0], "act": [2e10 / 3]}]}
    row = {"seed": 3, "command": "bitdial train", "float_top1": 92.123456789}
    path = tmp_path / "new" / "history.json"
    write_history(path, History(layers=["a", "b"], rows=rows, gradients=gradients), row)
    assert json.loads(path.read_text()) == {
        "settings": row,
        "layers": ["a", "b"],
        "rows": [{"epoch": 0, "lr": 1e-3, "seconds": 123.5, "loss": {"8": 3.142e-5}}],
        "gradients": {"8": [{"step": 123456789, "weight": [0.3333, 0.0], "act": [6.667e9]}]},
    }
    assert [p.name for p in path.parent.iterdir()] == ["history.json"]


def test_history_keeps_one_gradient_sample_an_epoch(tmp_path: Path) -> None:
    samples = [{"step": step, "weight": [0.5], "act": [0.25]} for step in range(16)]
    history = History(layers=["a"], rows=[{"epoch": 0}, {"epoch": 1}], gradients={"8": samples, "2": samples[:1]})
    write_history(tmp_path / "history.json", history, {})
    gradients = json.loads((tmp_path / "history.json").read_text())["gradients"]
    assert [sample["step"] for sample in gradients["8"]] == [0, 8]
    assert [sample["step"] for sample in gradients["2"]] == [0]
    assert len(samples) == 16
