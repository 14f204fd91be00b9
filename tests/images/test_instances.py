"""Folders of images and instance maps: targets counted by hand, images of every kind, and what is refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from bitdial.errors import ConfigError
from bitdial.images import InstanceFolder
from bitdial.images.instances import instance_target, with_masks


def write(folder: Path, image: Image.Image, numbers: Any, name: str = "a", **more: Any) -> dict[str, Any]:
    """An image and its map in `folder`, and their entry."""
    image.save(folder / f"{name}.png")
    Image.fromarray(np.asarray(numbers, dtype=np.uint16)).save(folder / f"{name}_map.png")
    return {"image": f"{name}.png", "instances": f"{name}_map.png", **more}


def listed(folder: Path, *entries: Any) -> Path:
    (folder / "labels.json").write_text(json.dumps({"source": "made up", "images": list(entries)}))
    return folder


NUMBERS = np.zeros((4, 6), dtype=np.uint16)
NUMBERS[0, 1:3] = 7
NUMBERS[1:4, 5] = 300


def test_targets_by_hand() -> None:
    target = instance_target(torch.from_numpy(NUMBERS.astype(np.int64)))
    assert target["boxes"].tolist() == [[1, 0, 3, 1], [5, 1, 6, 4]]
    assert target["labels"].tolist() == [1, 1]
    assert target["instances"].unique(return_counts=True)[1].tolist() == [19, 2, 3]
    masks = with_masks(target)["masks"]
    assert masks.shape == (2, 4, 6)
    assert torch.equal(masks[1].bool(), torch.from_numpy(NUMBERS == 300))
    larger = instance_target(torch.from_numpy(NUMBERS.astype(np.int64)), smallest=3)
    assert larger["boxes"].tolist() == [[5, 1, 6, 4]]
    assert larger["instances"].unique().tolist() == [0, 1]
    classes = [1] * 6 + [4] + [1] * 292 + [9]
    assert instance_target(torch.from_numpy(NUMBERS.astype(np.int64)), classes)["labels"].tolist() == [4, 9]


def test_images_without_objects_of_one_pixel_and_with_five_hundred(tmp_path: Path) -> None:
    many = np.arange(1, 501).reshape(20, 25).repeat(2, axis=0)
    entries = [
        write(tmp_path, Image.new("RGB", (6, 4)), np.zeros((4, 6)), "none"),
        write(tmp_path, Image.new("RGB", (1, 1)), [[1]], "one"),
        write(tmp_path, Image.new("RGB", (25, 40)), many, "many"),
    ]
    folder = InstanceFolder(listed(tmp_path, *entries))
    (_, none), (pixel, one), (_, lots) = folder[:]
    assert (none["boxes"].shape, none["labels"].shape) == ((0, 4), (0,))
    assert with_masks(none)["masks"].shape == (0, 4, 6)
    assert (pixel.shape, one["boxes"].tolist()) == ((3, 1, 1), [[0, 0, 1, 1]])
    assert lots["boxes"].shape == (500, 4)
    assert lots["boxes"][-1].tolist() == [24, 38, 25, 40]


def test_grey_alpha_palette_and_sixteen_bits_are_three_channels(tmp_path: Path) -> None:
    pictures = {
        "L": Image.new("L", (6, 4), 51),
        "RGBA": Image.new("RGBA", (6, 4), (51, 51, 51, 0)),
        "P": Image.new("RGB", (6, 4), (51, 51, 51)).convert("P"),
        "I": Image.fromarray(np.full((4, 6), 51 * 257, dtype=np.uint16)),
    }
    entries = [write(tmp_path, picture, NUMBERS, name) for name, picture in pictures.items()]
    for image, target in InstanceFolder(listed(tmp_path, *entries)):
        assert torch.equal(image, torch.full((3, 4, 6), 0.2))
        assert len(target["boxes"]) == 2


def test_splits_counts_classes_and_parts(tmp_path: Path) -> None:
    entries = [
        write(tmp_path, Image.new("L", (6, 4), number), NUMBERS > 0, str(number), split="train" if number else "val")
        for number in range(5)
    ]
    entries[0]["classes"] = [3]
    folder = listed(tmp_path, *entries)
    assert [len(InstanceFolder(folder, split)) for split in ("train", "val", None)] == [4, 1, 5]
    assert [entry.image for entry in InstanceFolder(folder, "train", count=2).entries] == ["1.png", "3.png"]
    assert len(InstanceFolder(folder, count=99)) == 5
    every = InstanceFolder(folder)
    assert (every.largest_class(), every.part([1, 2]).largest_class()) == (3, 1)
    assert every.part([4])[0][0].max().item() == pytest.approx(4 / 255)
    assert every[-1][0].max().item() == pytest.approx(4 / 255)


def test_what_is_wrong_is_named(tmp_path: Path) -> None:
    good = write(tmp_path, Image.new("RGB", (6, 4)), NUMBERS)
    small = write(tmp_path, Image.new("RGB", (5, 4)), NUMBERS, "small")
    (tmp_path / "broken.png").write_bytes(b"no image")
    coloured = good | {"instances": good["image"]}
    cases: list[tuple[str, Callable[[], Any]]] = [
        (r"has no labels\.json", lambda: InstanceFolder(tmp_path / "nowhere")),
        (r"labels\.json lists no images", lambda: InstanceFolder(listed(tmp_path))),
        ("lacks the names of the image", lambda: InstanceFolder(listed(tmp_path, {"image": "a.png"}))),
        (r"no images of the split 'val', only of None", lambda: InstanceFolder(listed(tmp_path, good), "val")),
        (r"c\.png is listed in .* not there; put it there",
         lambda: InstanceFolder(listed(tmp_path, good, good | {"image": "c.png"}))),
        (r"d\.png is listed in .* not there", lambda: InstanceFolder(listed(tmp_path, good | {"instances": "d.png"}))),
        (r"small\.png has 5 x 4 pixels and its map small_map\.png 6 x 4",
         lambda: InstanceFolder(listed(tmp_path, small))[0]),
        (r"a\.png has pixels of the mode RGB", lambda: InstanceFolder(listed(tmp_path, coloured))[0]),
        (r"broken\.png cannot be read",
         lambda: InstanceFolder(listed(tmp_path, good | {"instances": "broken.png"}))[0]),
        (r"broken\.png cannot be read", lambda: InstanceFolder(listed(tmp_path, good | {"image": "broken.png"}))[0]),
        (r"has an object 300, and labels\.json has 2 classes",
         lambda: InstanceFolder(listed(tmp_path, good | {"classes": [1, 1]}))[0]),
        ("must be whole numbers from 1", lambda: InstanceFolder(listed(tmp_path, good | {"classes": [0]}))),
    ]  # fmt: skip
    for text, run in cases:
        with pytest.raises(ConfigError, match=text):
            run()
    (tmp_path / "images.tar").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"unpack it first: tar -xf images\.tar"):
        InstanceFolder(listed(tmp_path, good | {"image": "c.png"}))
