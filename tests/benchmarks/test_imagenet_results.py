"""The section of the results page on ImageNet, from made-up rows."""

import importlib
from types import ModuleType

import pytest


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> ModuleType:
    monkeypatch.syspath_prepend(request.config.rootpath / "benchmarks")
    return importlib.import_module("imagenet_results")


def calibrated(**changes: object) -> dict[str, object]:
    row = {
        "model": "resnet50", "scheme": "nested", "group_size": None, "effort": "quick", "images": 1000, "apart": False,
        "iterations": None, "float_top1": 75.0, "top1": {"8": 74.5, "3": 50.0}, "agreement": {"8": 99.0, "3": 60.0},
        "seconds": 12.3, "device": "cpu", "threads": 2,
    }  # fmt: skip
    return {**row, **changes}


def mixed(method: str, top1: float, seed: int = 0) -> dict[str, object]:
    return {
        "model": "m", "effort": "quick", "method": method, "seed": seed, "bytes": 2e6, "uniform_top1": 20.0,
        "top1": top1, "float_top1": 70.0, "p_value": 1e-9, "seconds": 5.0, "samples": 64,
    }  # fmt: skip


def test_tables(script: ModuleType) -> None:
    assert script.section([], []) == ""
    rows = [calibrated(effort="full", iterations=2000), calibrated(), calibrated(effort="none", apart=True)]
    text = script.section(rows, [mixed("random", 1.0), mixed("random", 3.0, seed=1), mixed("measured", 60.0)])
    lines = [line for line in text.splitlines() if line.startswith(("| resnet50", "| m "))]
    widths = "1,000 | 75.00 | 74.50 (-0.50) | 50.00 (-25.00) | 99.0 / 60.0 | 12 | cpu, 2 threads |"
    assert lines == [
        f"| resnet50 | `nested` | quick | {widths}",
        f"| resnet50 | `nested` | full, 2000 iterations | {widths}",
        f"| resnet50 | `nested` | round to nearest, a file per width | {widths}",
        "| m | quick | measured | 2.00 | 70.00 | 20.00 | 60.00 | 1e-09 | 64 | 5 |",
        "| m | quick | random, mean of 2 | 2.00 | 70.00 | 20.00 | 2.00 |  | 64 | 5 |",
    ]


def test_one_file_on_every_engine(script: ModuleType) -> None:
    row = {
        "model": "m", "bits": 4, "images": 2000, "integer_is_exact": True,
        "top1": {"float": 73.0, "integer": 73.25, "onnxruntime": 73.5},
        "same_class": {"float": 99.0, "onnxruntime": 98.5},
    }  # fmt: skip
    assert script.section([], [], [row]).splitlines()[-1] == (
        "| m | 4 | 2,000 | 73.00 | 73.25 | 73.50 | yes | 99.00 | 98.50 |"
    )
