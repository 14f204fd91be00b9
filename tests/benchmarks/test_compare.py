"""The comparison of two versions: rows meet by what they say of themselves, and ratios are new over old."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def compare(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(FOLDER)
    spec = importlib.util.spec_from_file_location("compare", FOLDER / "compare.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "compare", module)
    spec.loader.exec_module(module)
    return module


def test_rows_meet_by_what_they_say_of_themselves(compare: ModuleType) -> None:
    old = [
        {"kernel": "integer", "batch": 1, "scheme": "nested", "ms": 2.0, "speedup": 9.0},
        {"kernel": "integer", "batch": 32, "scheme": "nested", "ms": 4.0},
        {"kernel": "gone", "batch": 1, "ms": 1.0},
    ]
    new = [
        {"kernel": "integer", "batch": 32, "scheme": "centred", "ms": 5.0},
        {"kernel": "integer", "batch": 1, "scheme": "centred", "ms": 1.0},
        {"kernel": "integer", "batch": 1, "scheme": "nested", "ms": 0.1},
    ]
    rows = compare.compared("conv", compare.measured(old, compare.RENAMED), compare.measured(new, {}))
    assert {row["batch"]: row["ratio"] for row in rows} == {1: 0.5, 32: 1.25}
    assert all(row["scheme"] == "centred" and row["of"] == "ms" for row in rows)
    assert compare.summary(rows) == {"conv ms": {"mean": 0.7906, "largest": 1.25, "rows": 2}}


def test_of_repeats_the_least_counts(compare: ModuleType) -> None:
    runs = [compare.measured([{"kernel": "a", "us": us, "peak_mib": 7}], {}) for us in (3.0, 2.0, 4.0)]
    assert list(compare.least(runs).values()) == [{"us": 2.0, "peak_mib": 7.0}]
