"""The section of the results page on language models, from made-up rows."""

import importlib
from types import ModuleType

import pytest


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> ModuleType:
    monkeypatch.syspath_prepend(request.config.rootpath / "benchmarks")
    return importlib.import_module("language_results")


def row(bits: int, perplexity: float, **changes: object) -> dict[str, object]:
    made = {
        "method": "calibrated quick", "weights": "nested", "group_size": 32, "activations": "float", "tokens": 8192,
        "bit_choices": [8, 4], "bits": bits, "perplexity": perplexity, "float_perplexity": 20.0, "seconds": 61.2,
        "device": "cpu", "importance": {}, "seed": 0,
    }  # fmt: skip
    return {**made, **changes}


def test_a_line_for_each_file(script: ModuleType) -> None:
    assert script.section([]) == ""
    rows = [
        row(8, 20.1),
        row(4, 22.0),
        row(8, 21.0, importance={"8": 0.5}, rotated="online", activations="auto", seconds=None),
    ]
    lines = [line for line in script.section(rows).splitlines() if line.startswith("| calibrated")]
    assert lines == [
        "| calibrated quick (8 bits count 0.5), rotated online | `nested`, groups of 32 | static | 8,192 | 20.00 | "
        "21.00 (1.050) |  |  | cpu |",
        "| calibrated quick | `nested`, groups of 32 | float | 8,192 | 20.00 | "
        "20.10 (1.005) | 22.00 (1.100) | 61 | cpu |",
    ]
