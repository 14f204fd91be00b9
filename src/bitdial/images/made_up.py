"""Images with objects that are made up: bright discs on a dark ground, to try the whole path without data."""

import json
from pathlib import Path

import numpy as np

from bitdial.errors import BitdialError
from bitdial.images.decode import write_picture
from bitdial.images.instances import INDEX


def write_made_up(folder: Path, *, count: int = 16, seed: int = 0) -> None:
    """Write `count` images with their instance maps and labels.json to `folder`; every fourth is of the split val."""
    draws, entries = np.random.default_rng(seed), []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for number in range(count):
            height, width = (int(side) for side in draws.integers(48, 80, 2))
            pixels, numbers = draws.integers(0, 40, (height, width, 3)), np.zeros((height, width), np.uint16)
            rows, columns = np.mgrid[:height, :width]
            for one in range(1, int(draws.integers(2, 5)) + 1):
                radius = int(draws.integers(6, 11))
                top, left = (int(draws.integers(radius, side - radius)) for side in (height, width))
                disc = ((rows - top) ** 2 + (columns - left) ** 2 < radius**2) & (numbers == 0)
                numbers[disc], pixels[disc] = one, pixels[disc] + 150
            names = {"image": f"{number:03}.png", "instances": f"{number:03}_map.png"}
            write_picture(folder / names["image"], pixels.astype(np.uint8))
            write_picture(folder / names["instances"], numbers)
            entries.append(names | {"split": "val" if number % 4 == 0 else "train"})
        (folder / INDEX).write_text(json.dumps({"images": entries}, indent=1) + "\n", encoding="utf-8")
    except OSError as problem:
        raise BitdialError(f"cannot write in {folder}: {problem}") from problem
