"""The numbers of the house."""

import importlib
from collections import Counter
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def test_arrows_that_follow_from_others_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    house = importlib.import_module("house")
    found = house.direct(Counter({("c", "b"): 2, ("b", "a"): 1, ("c", "a"): 5, ("a", "errors"): 3}))
    assert found == Counter({("c", "b"): 2, ("b", "a"): 1})
    table = house.numbers(sorted((BENCHMARKS.parent / "src" / "bitdial").rglob("*.py")))
    assert "modules that import in a circle | none" in table
