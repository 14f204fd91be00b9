"""The examples run, where what they need is installed."""

import runpy
from pathlib import Path

import pytest

from bitdial import read_artifact

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the frameworks
@pytest.mark.parametrize(
    ("name", "packages", "file"),
    [
        ("lightning_module", ["lightning"], "lightning.safetensors"),
        ("accelerate_loop", ["accelerate"], "accelerate.safetensors"),
        ("transformers_trainer", ["accelerate", "transformers"], "trainer-out/model.safetensors"),
    ],
)
def test_an_example(name: str, packages: list[str], file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in packages:
        pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"](epochs=1)
    assert read_artifact(tmp_path / file).layers


def test_every_example_is_tested() -> None:
    tested = {mark[0] for mark in test_an_example.pytestmark[0].args[1]}
    assert {path.stem for path in EXAMPLES.glob("*.py")} == tested
