"""What the tests of benchmark scripts share."""

import runpy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def run_here(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Callable[..., str]]:
    """Runs a benchmark as a script, in this process; what it printed."""
    threads = torch.get_num_threads()
    monkeypatch.syspath_prepend(FOLDER)

    def run(script: str, *arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", [str(FOLDER / script), *arguments])
        runpy.run_path(str(FOLDER / script), run_name="__main__")
        return capsys.readouterr().out

    with torch.random.fork_rng():
        yield run
    torch.set_num_threads(threads)
