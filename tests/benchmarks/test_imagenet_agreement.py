"""The table of one file on all engines and as ONNX, as a whole on a few made-up images."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from bitdial import ImageSettings, QuantConfig, build_model, prepare, save

Image = pytest.importorskip("PIL.Image")
pytest.importorskip("onnxruntime")


def test_a_row_for_each_width(run_here: Callable[..., str], tmp_path: Path) -> None:
    images = tmp_path / "dev"
    images.mkdir()
    rng = np.random.default_rng(0)
    for number in range(6):
        Image.fromarray(rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)).save(images / f"{number}.png")
    (tmp_path / "labels.json").write_text(json.dumps({"dev": {f"{n}.png": n % 3 for n in range(6)}}))
    arguments = {"blocks": 1, "width": 4, "num_classes": 3}
    metadata = {"model": "cifar_resnet", "arguments": json.dumps(arguments)}
    metadata["images"] = json.dumps(ImageSettings(resize=None, crop=8).to_dict())
    model = build_model("cifar_resnet", **arguments).eval()
    save_file(model.state_dict(), tmp_path / "cifar_resnet.safetensors", metadata)
    file = tmp_path / "file.safetensors"
    save(prepare(model, QuantConfig(bit_choices=(8, 4)), torch.randn(4, 3, 8, 8)).eval(), file)
    places = ["--weights", str(tmp_path), "--images", str(tmp_path), "--out", str(tmp_path / "rows.json")]
    run_here("imagenet_agreement.py", str(file), "--model", "cifar_resnet", "--batch-size", "4", *places)
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert [row["bits"] for row in rows] == [8, 4]
    for row in rows:
        assert row["images"] == 6
        assert row["integer_is_exact"]
        assert set(row["top1"]) == {"float", "integer", "onnxruntime"}
        assert min(row["same_class"].values()) > 60
