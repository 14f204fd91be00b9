"""What all tests share."""

import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

# Processes that tests start see this tree too, installed or not.
SOURCE = str(Path(__file__).resolve().parent.parent / "src")
os.environ["PYTHONPATH"] = os.pathsep.join([SOURCE, *filter(None, [os.environ.get("PYTHONPATH")])])


@pytest.fixture
def run_under_the_interpreter() -> Callable[[str], None]:
    """Runs a file of tests in a process with Triton's interpreter, and fails as it does."""

    def run(file: str) -> None:
        path = Path(file).resolve()
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(path)]
        environment = {**os.environ, "TRITON_INTERPRET": "1"}
        done = subprocess.run(
            command, env=environment, cwd=path.parents[2], capture_output=True, text=True, timeout=400
        )
        assert done.returncode == 0, done.stdout[-3000:]
        assert " passed" in done.stdout

    return run


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Bit for bit comparisons need one thread count; tiny tensors gain nothing from more."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """torch.compile without what was compiled before, and nothing left behind."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # on a GPU this imports modules of torch that warn
        torch._dynamo.reset()
    yield
    torch._dynamo.reset()
