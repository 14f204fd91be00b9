"""The example scripts run, where what they need is installed."""

import importlib.util
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from bitdial import read_artifact

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
SCRIPTS = [("transformers_bert", ["transformers"], ["--steps", "1"]), ("timm_resnet", ["timm"], [])]
ALONE = ("progressive_http",)
LOOPS = [
    ("lightning_module", ["lightning"], "lightning.safetensors"),
    ("accelerate_loop", ["accelerate"], "accelerate.safetensors"),
    ("transformers_trainer", ["accelerate", "transformers"], "trainer-out/model.safetensors"),
]


def need(packages: list[str]) -> None:
    for package in packages:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"needs {package}")


@pytest.mark.parametrize(("name", "packages", "arguments"), SCRIPTS)
def test_a_script_as_a_user_runs_it(name: str, packages: list[str], arguments: list[str]) -> None:
    need(packages)
    command = [sys.executable, "-W", "error", str(EXAMPLES / f"{name}.py"), *arguments]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    widths = [line for line in done.stdout.splitlines() if " bits: accuracy" in line]
    assert [line.split()[0] for line in widths] == ["8", "4", "2"]
    assert all(line.endswith("the trained model's logits: True") for line in widths), widths


def test_parts_over_http() -> None:
    """It runs after each part, nearer to the highest width each time, and at last there."""
    command = [sys.executable, "-W", "error", str(EXAMPLES / "progressive_http.py"), "--width", "4"]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    found = re.findall(r"([\d,]+) bytes: running at (\d) bits, +([\d.]+) %", done.stdout)
    sizes, widths, errors = zip(*found, strict=True)
    assert widths == ("2", "3", "4", "6", "8")
    for numbers in ([int(size.replace(",", "")) for size in sizes], [-float(error) for error in errors]):
        assert numbers == sorted(set(numbers)), done.stdout
    assert errors[-1] == "0.0"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the frameworks
@pytest.mark.parametrize(("name", "packages", "file"), LOOPS)
def test_a_loop_of_another_framework(
    name: str, packages: list[str], file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    need(packages)
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"](epochs=1)
    assert read_artifact(tmp_path / file).layers


def test_every_example_is_tested() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {name for name, *_ in (*SCRIPTS, *LOOPS, ALONE)}
