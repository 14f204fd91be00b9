"""All tests of kernels once more in a process with Triton's interpreter, where there is no GPU to run them on.

A test marked `interpreter` runs there too, on Triton kernels; here it runs on the reference. One marked
`interpreter(only=True)` runs there alone. On a GPU both run compiled, and nothing has to run twice.
"""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = {"tests/kernels": 10, "tests/live": 10, "tests/train/gpu": 10, "tests/benchmarks": 5}  # and more tests than


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.skipif(torch.cuda.is_available(), reason="here kernels run compiled")
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="already runs under the interpreter")
def test_kernels_under_the_interpreter() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "interpreter", "-rA", *FOLDERS]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-5000:]
    for folder, least in FOLDERS.items():
        assert len(re.findall(rf"^PASSED {folder}/", done.stdout, re.MULTILINE)) > least, folder


def test_every_marked_test_is_in_one_of_the_folders() -> None:
    marked = [
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "tests").rglob("test_*.py")
        if "mark.interpreter" in path.read_text(encoding="utf-8") and path != Path(__file__).resolve()
    ]
    assert len(marked) > 5
    assert [path for path in marked if not path.startswith((*FOLDERS,))] == []
