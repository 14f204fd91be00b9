"""Small made-up images."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest


def pixels(height: int, width: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """Writes an array as an image file, PNG unless its name says otherwise, and returns its path."""
    Image = pytest.importorskip("PIL.Image")

    def made(name: str, values: Any = None, **options: Any) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels(12, 12, sum(map(ord, name))) if values is None else values).save(path, **options)
        return path

    return made
