"""The training benchmark: its GPU half runs as far as a CPU can take it, and its ratios are what they say."""

import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from bitdial.kernels import dispatch

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(FOLDER)
    spec = importlib.util.spec_from_file_location("train_step", FOLDER / "train_step.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "train_step", module)  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_smoke_run_writes_a_row_for_each_variant(run_here: Callable[..., str], tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    options = ["--smoke", "--device", "cpu", "--models", "resnet20", "--rounds", "1", "--out", str(out)]
    options += ["--process-group"]
    run_here("train_step.py", *options)
    rows = {row["variant"]: row for row in json.loads(out.read_text())["rows"]}
    assert set(rows) >= {"float", "joint", "eager", "float eager"}
    assert not [row for row in rows.values() if "error" in row]
    assert rows["joint"]["ms_per_bitwidth"] == pytest.approx(rows["joint"]["ms_per_step"] / 4, abs=1e-3)
    assert rows["float"]["time_vs_float"] == 1
    grouped = rows["joint in a group"]
    assert grouped["time_vs_alone"] > 0
    assert grouped["ms_per_bitwidth"] == pytest.approx(grouped["ms_per_step"] / 4, abs=1e-3)


def test_ratios_are_to_the_float_row(script: ModuleType) -> None:
    rows: list[dict[str, Any]] = [
        {"variant": "joint", "ms_per_bitwidth": 3.0, "peak_mib": 130.0},
        {"variant": "float", "ms_per_bitwidth": 2.0, "peak_mib": 100.0},
        {"variant": "eager", "error": "OutOfMemoryError: too large"},
    ]
    script.add_ratios(rows)
    assert (rows[0]["time_vs_float"], rows[0]["memory_vs_float"]) == (1.5, 1.3)
    assert rows[2] == {"variant": "eager", "error": "OutOfMemoryError: too large"}


def test_derived_numbers(script: ModuleType) -> None:
    rows = [
        {"model": "resnet20", "variant": "joint", "ms_per_step": 5.0},
        {"model": "resnet20", "variant": "eager", "ms_per_step": 40.0},
        {"model": "resnet18", "variant": "joint", "ms_per_step": 50.0},
    ]
    assert script.derive(rows) == {"resnet20_epoch_s": 0.98, "resnet20_eager_vs_joint": 8.0}


def test_a_variant_that_fails_is_named_and_the_others_go_on(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(work: object) -> None:
        raise RuntimeError("no such kernel")

    work = script.Work(torch.nn.Identity(), torch.nn.Identity(), torch.zeros(1, 3, 4, 4), torch.zeros(1))
    monkeypatch.setitem(script.VARIANTS, "joint", script.Variant(fails, (4, 2)))
    monkeypatch.setitem(script.VARIANTS, "float", script.Variant(lambda work: lambda: torch.zeros(1)))
    joint, plain = script.measure_model("resnet20", work, ["joint", "float"], rounds=1)
    assert joint["error"] == "RuntimeError: no such kernel"
    assert plain["ms_per_bitwidth"] >= 0
    assert "no such kernel" in script.line(joint)


def test_the_reference_runs_without_triton(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert dispatch.use_triton(torch.zeros(1))
    with script.reference_only():
        assert not dispatch.use_triton(torch.zeros(1))
    assert dispatch.use_triton(torch.zeros(1))


@pytest.mark.parametrize(
    "device, name", [("NVIDIA H200", "h200"), ("NVIDIA A100-SXM4-40GB", "cuda"), ("CPU, 2 threads, x86_64", "cpu")]
)
def test_results_go_to_a_file_by_device(script: ModuleType, device: str, name: str) -> None:
    assert script.default_out(device).name == f"train-step-{name}.json"


@pytest.mark.slow
def test_training_cost_counts_every_width_once(run_here: Callable[..., str], tmp_path: Path) -> None:
    out = tmp_path / "cost.json"
    options = ["--tiny", "--device", "cpu", "--rounds", "1", "--out", str(out)]
    run_here("training_cost.py", *options)
    rows = json.loads(out.read_text())["rows"]
    assert [row["bit_choices"] for row in rows] == [[8, 6, 4, 2], [4, 3, 2]]
    for row in rows:
        assert list(row["separate_ms"]) == [str(bits) for bits in row["bit_choices"]]
        assert row["separate_epoch_s"] == pytest.approx(0.196 * sum(row["separate_ms"].values()), rel=1e-3)
        assert row["saved"] == pytest.approx(1 - row["joint_epoch_s"] / row["separate_epoch_s"], abs=2e-3)
