"""The example scripts run as a user runs them."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run(script: str, *arguments: str) -> list[str]:
    """The lines that `script` prints."""
    command = [sys.executable, "-W", "error", str(ROOT / "examples" / script), *arguments]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def check_widths(lines: list[str]) -> None:
    widths = [line for line in lines if " bits: accuracy" in line]
    assert [line.split()[0] for line in widths] == ["8", "4", "2"]
    assert all(line.endswith("the trained model's logits: True") for line in widths), widths


def test_bert() -> None:
    pytest.importorskip("transformers")
    check_widths(run("transformers_bert.py", "--steps", "1"))


def test_timm() -> None:
    if importlib.util.find_spec("timm") is None:
        pytest.skip("needs timm")
    check_widths(run("timm_resnet.py"))
