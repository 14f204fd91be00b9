"""The benchmarks of integer kernels run where there is no GPU, and their means are what they say."""

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
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


@pytest.fixture
def run(run_here: Callable[..., str], tmp_path: Path) -> Callable[..., dict[str, Any]]:
    def run(script: str, *options: str) -> dict[str, Any]:
        out = tmp_path / "rows.json"
        run_here(script, "--tiny", "--rounds", "1", "--device", DEVICE, "--out", str(out), *options)
        record: dict[str, Any] = json.loads(out.read_text())
        assert record["complete"] is True
        return record

    return run


@pytest.mark.interpreter(only=True)
def test_convolutions(run: Callable[..., dict[str, Any]]) -> None:
    record = run("conv.py", "--linear", "4", "8", "40")
    assert record["command"] == f"python benchmarks/conv.py --tiny --rounds 1 --device {DEVICE} --linear 4 8 40"
    rows = {row["kernel"]: row for row in record["rows"]}
    ours = {"integer", "integer centred", "integer halves"}
    assert set(rows) == {"bf16", *ours}
    assert all(rows[kind]["exact"] is True for kind in ours)
    assert rows["bf16"]["speedup_vs_bf16"] == 1
    assert {entry["kernel"] for entry in record["summary"]} == ours


@pytest.mark.interpreter(only=True)
def test_a_sweep_of_tilings(run: Callable[..., dict[str, Any]]) -> None:
    record = run("conv.py", "--sweep", "--linear", "4", "8", "40", "--compile-ahead", "1")
    assert len({tuple(row["tiles"]) for row in record["rows"]}) == len(record["rows"]) > 2
    times = [row["ms"] for row in record["rows"]]
    assert times == sorted(times)


@pytest.mark.interpreter(only=True)
def test_networks(run: Callable[..., dict[str, Any]]) -> None:
    record = run("network.py", "--no-compile", "--bits", "8", "3")
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


SCRIPTS = """
import importlib, os, sys

def stop(*_):
    raise StopIteration

sys.argv = ["script", "--tiny"]
for name in ("switch", "network", "conv"):
    os.environ.pop("TRITON_INTERPRET", None)
    script = importlib.import_module(name)
    if name == "switch":
        script.make_pool = stop
        try:
            script.main()
        except StopIteration:
            pass
    assert os.environ["TRITON_INTERPRET"] == "1", name
    assert name == "conv" or "triton" not in sys.modules, name
print(type(script.triton_integer._convolve).__name__)
"""


@pytest.mark.skipif(DEVICE == "cuda", reason="here kernels run compiled")
def test_scripts_turn_the_interpreter_on_before_triton_is_imported() -> None:
    pytest.importorskip("triton")
    paths = [str(FOLDER), os.environ["PYTHONPATH"]]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-c", SCRIPTS]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.stdout.splitlines()[-1:] == ["InterpretedFunction"], done.stderr[-3000:]
