"""The benchmark of an iteration of learning runs where there is no GPU, and knows what a network does."""

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def step(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(FOLDER)
    return importlib.import_module("calibration_step")


@pytest.mark.slow
def test_a_row_for_each_path_and_each_kernel(run_here: Callable[..., str], tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    arguments = ["--tiny", "--rounds", "1", "--device", "cpu"]
    run_here("calibration_step.py", *arguments, "--out", str(out))
    record = json.loads(out.read_text())
    assert record["complete"] is True
    assert record["command"] == f"python benchmarks/calibration_step.py {' '.join(arguments)}"
    assert [(row["network"], row["path"]) for row in record["iterations"]] == [
        ("mobilenet_v2", "torch"),
        ("mobilenet_v2", "kernels"),
    ]
    kinds = ["norm", "norm relu6", "depthwise", "drop"]
    passes = ["forward", "forward and backward"]
    assert [(row["kernel"], row["passes"]) for row in record["kernels"]] == [(k, p) for k in kinds for p in passes]
    assert {"bytes", "floor_us", "us", "torch_us", "off"} <= set(record["kernels"][0])
    assert [entry["kernel"] for entry in record["totals"]] == kinds


def test_the_operations_of_a_network(step: ModuleType) -> None:
    cases = step.cases_of("mobilenet_v2")
    counts = {kind: sum(c.count for c in cases if c.kind == kind) for kind in ("norm", "norm relu6", "depthwise")}
    assert counts == {"norm": 17, "norm relu6": 35, "depthwise": 17}
    assert step.Case("depthwise", 96, 112, 3, 2, 1) in cases
