"""The table of layers in the docs is that of the code."""

import importlib
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def test_the_page_is_current(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    layers = importlib.import_module("layers_page")
    assert layers.PAGE.read_text() == layers.page(), "run: python benchmarks/layers_page.py"
    for name in (*layers.KINDS, *layers.DECOMPOSITIONS):
        assert f"| `{name}` |" in layers.page()
