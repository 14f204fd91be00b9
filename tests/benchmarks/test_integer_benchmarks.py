"""The benchmarks of integer kernels run where there is no GPU, and their means are what they say."""

import importlib
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def conv(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    pytest.importorskip("triton")
    monkeypatch.syspath_prepend(FOLDER)
    return importlib.import_module("conv")


def run(tmp_path: Path, script: str, *options: str) -> dict[str, Any]:
    pytest.importorskip("triton")
    out = tmp_path / "rows.json"
    command = [sys.executable, str(FOLDER / script), "--tiny", "--rounds", "1", "--device", DEVICE, "--out", str(out)]
    subprocess.run([*command, *options], check=True, timeout=300)
    record = json.loads(out.read_text())
    assert record["complete"] is True
    return record


@pytest.mark.slow
def test_convolutions(tmp_path: Path) -> None:
    record = run(tmp_path, "conv.py", "--linear", "4", "8", "40")
    assert record["command"] == f"python benchmarks/conv.py --tiny --rounds 1 --device {DEVICE} --linear 4 8 40"
    rows = {row["kernel"]: row for row in record["rows"]}
    ours = {"integer", "integer centred", "integer halves"}
    assert set(rows) == {"bf16", *ours}
    assert all(rows[kind]["exact"] is True for kind in ours)
    assert rows["bf16"]["speedup_vs_bf16"] == 1
    assert {entry["kernel"] for entry in record["summary"]} == ours


@pytest.mark.slow
def test_a_sweep_of_tilings(tmp_path: Path) -> None:
    record = run(tmp_path, "conv.py", "--sweep", "--linear", "4", "8", "40", "--compile-ahead", "1")
    assert len({tuple(row["tiles"]) for row in record["rows"]}) == len(record["rows"]) > 2
    times = [row["ms"] for row in record["rows"]]
    assert times == sorted(times)


@pytest.mark.slow
def test_networks(tmp_path: Path) -> None:
    record = run(tmp_path, "network.py", "--no-compile", "--bits", "8", "3")
    found = [
        (row["kernel"], row.get("weight_bits"), row.get("first_and_last"), row.get("exact")) for row in record["rows"]
    ]
    inner = [("integer", bits, kind, True) for bits in (8, 3) for kind in ("float", "quantised")]
    assert found == [("bf16 eager" if DEVICE == "cuda" else "fp32 eager", None, None, None), *inner]


def test_layers_of_resnet50_and_their_mean(conv: ModuleType) -> None:
    layers = conv.layers_of("resnet50")
    assert sum(layer.count for layer in layers) == 53
    assert len(set(layers)) == len(layers) == 23
    where = {"network": "net", "batch": 32}
    rows = [
        {"kernel": "bf16", **where, "ms": 4.0, "count": 1, "speedup_vs_bf16": 1.0},
        {"kernel": "integer", **where, "ms": 1.0, "count": 1, "speedup_vs_bf16": 4.0},
        {"kernel": "bf16", **where, "ms": 1.0, "count": 3, "speedup_vs_bf16": 1.0},
        {"kernel": "integer", **where, "ms": 1.0, "count": 3, "speedup_vs_bf16": 1.0},
    ]
    (entry,) = conv.summary(rows)
    assert entry["mean_speedup"] == pytest.approx(4**0.25, abs=1e-3)
    assert entry["all_layers_speedup"] == 7 / 4
