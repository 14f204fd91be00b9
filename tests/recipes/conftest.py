"""What the tests of recipes on folders share: a few small JPEGs by class, and float weights of a tiny network."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from bitdial import build_model

IMAGES = {"mean": [120.0, 110.0, 100.0], "std": [60.0, 55.0, 50.0], "order": "RGB"}
TINY = {"width_mult": 0.1, "dropout": 0.2}  # dropout: a resumed run must draw the same numbers


@pytest.fixture
def make_folder(tmp_path: Path) -> Callable[..., Path]:
    """make_folder(classes, train, val): DATA/train and DATA/val with so many JPEGs of each class, about 40 x 40."""
    image = pytest.importorskip("PIL.Image")

    def make(classes: int = 8, train: int = 4, val: int = 2) -> Path:
        random = np.random.default_rng(0)
        for part, count in (("train", train), ("val", val)):
            for number in range(classes):
                folder = tmp_path / "data" / part / f"class{number}"
                folder.mkdir(parents=True)
                colour = random.integers(0, 256, (1, 1, 3)) if part == "train" else np.full((1, 1, 3), 30 * number)
                for one in range(count):
                    pixels = np.clip(random.normal(colour, 40, (40, 40 + one, 3)), 0, 255).astype(np.uint8)
                    image.fromarray(pixels).save(folder / f"{one}.jpg")
        return tmp_path / "data"

    return make


@pytest.fixture
def make_weights(tmp_path: Path) -> Callable[..., Path]:
    """make_weights(name, **arguments): a file of float weights as tools/imagenet_weights.py writes it."""

    def make(
        name: str = "mobilenet_v2", *, classes: int = 8, metadata: dict[str, Any] | None = None, **more: Any
    ) -> Path:
        arguments = {**(TINY if name == "mobilenet_v2" else {}), "num_classes": classes, **more}
        torch.manual_seed(1)
        model = build_model(name, **arguments)
        told = {"model": name, "arguments": json.dumps(arguments), "images": json.dumps(IMAGES)}
        path = tmp_path / f"{name}-{classes}.safetensors"
        save_file(model.state_dict(), path, told if metadata is None else metadata)
        return path

    return make
