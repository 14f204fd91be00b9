"""The table of calibrated models, as a whole on a few made-up images."""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from bitdial import ImageSettings, build_model

Image = pytest.importorskip("PIL.Image")
FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(FOLDER)
    spec = importlib.util.spec_from_file_location("imagenet_calibrated", FOLDER / "imagenet_calibrated.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "MODELS", ("cifar_resnet",))
    return module


def test_rows_of_all_efforts(script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    for folder in ("calibration", "dev"):
        Path("images", folder).mkdir(parents=True)
        for number in range(6):
            Image.fromarray(rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)).save(f"images/{folder}/{number}.png")
    Path("images/labels.json").write_text(json.dumps({"dev": {f"{number}.png": number % 3 for number in range(6)}}))
    arguments = {"blocks": 1, "width": 4, "num_classes": 3}
    metadata = {"model": "cifar_resnet", "arguments": json.dumps(arguments)}
    metadata["images"] = json.dumps(ImageSettings(resize=None, crop=8).to_dict())
    with torch.random.fork_rng():
        torch.manual_seed(0)
        save_file(build_model("cifar_resnet", **arguments).state_dict(), "cifar_resnet.safetensors", metadata)

    def run(*words: str) -> list[dict[str, object]]:
        common = ["script", "--weights", ".", "--images", "images", "--out", "rows.json", "--bits", "8,3"]
        monkeypatch.setattr(sys, "argv", [*common, "--models", "cifar_resnet", "--iterations", "2", *words])
        script.main()
        return json.loads(Path("rows.json").read_text())

    rows = run("--efforts", "none", "quick", "full")
    assert [row["effort"] for row in rows] == ["none", "quick", "full"]
    for row in rows:
        assert set(row["top1"]) == set(row["agreement"]) == set(row["kl"]) == {"8", "3"}  # type: ignore[call-overload]
        assert row["images"] == 6
        assert "/" not in str(row["command"]).replace("benchmarks/", "")
    again = run("--efforts", "quick")
    assert len(again) == 3, "a row of the same settings is replaced"
    apart = run("--efforts", "quick", "--apart", "--keep", ".")
    assert len(apart) == 4
    assert set(apart[-1]["top1"]) == {"8", "3"}  # type: ignore[call-overload]
    assert Path("cifar_resnet-double_rounding-quick.safetensors").exists()
