"""Folders of images by class: which are found, and in which order."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bitdial.errors import ConfigError
from bitdial.images.labels import read_labels
from bitdial.images.listing import image_names
from bitdial.recipes.image_folder import list_images

Image: Any = pytest.importorskip("PIL.Image")


def write(
    path: Path, colour: Any = (200, 100, 50), size: tuple[int, int] = (6, 4), mode: str = "RGB", **more: Any
) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, colour).save(path, **more)
    return path


def test_images_are_listed_by_class_and_name(tmp_path: Path) -> None:
    for name in ("b/2.jpg", "b/10.JPEG", "a b/ü.png", "c/1.bmp"):
        write(tmp_path / name)
    write(tmp_path / "c" / ".hidden.jpg")
    write(tmp_path / ".cache" / "x.jpg")
    (tmp_path / "b" / "readme.txt").write_text("not an image")
    (tmp_path / "notes.txt").write_text("not a class")
    found = list_images(tmp_path)
    assert found.classes == ("a b", "b", "c")
    assert [found.path(i).relative_to(tmp_path).as_posix() for i in range(len(found))] == [
        "a b/ü.png",
        "b/10.JPEG",
        "b/2.jpg",
        "c/1.bmp",
    ]
    assert found.labels.tolist() == [0, 1, 1, 2]
    part = found.subset(np.array([True, False, True, False]))
    assert (len(part), part.classes, part.labels.tolist()) == (2, found.classes, [0, 1])
    assert part.path(1) == found.path(2)


def test_folders_that_are_not_laid_out_so_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere does not exist; .*: expected .*<class>/<image>"):
        list_images(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"has no images .*: expected .*<class>/<image>"):
        list_images(tmp_path)
    write(tmp_path / "a" / "1.jpg")
    (tmp_path / "b").mkdir()
    with pytest.raises(ConfigError, match=r"the class .*b holds no image"):
        list_images(tmp_path)
    write(tmp_path / "b" / "1.jpg")
    write(tmp_path / "loose.jpg")
    with pytest.raises(ConfigError, match=r"loose\.jpg lies in no folder that would say its class.*<class>/<image>"):
        list_images(tmp_path)


def test_training_and_evaluation_give_images_the_same_classes(tmp_path: Path) -> None:
    """Also deep in the folder of a class, and where one class begins like another."""
    for name in ("a/1.jpg", "a/deep/er/2.gif", "a b/1.pgm", "a-b/1.jpg"):
        write(tmp_path / name, 7, mode="L")
    found = list_images(tmp_path)
    names = [os.fsdecode(bytes(name)) for name in found.names]
    assert names == ["a/1.jpg", "a/deep/er/2.gif", "a b/1.pgm", "a-b/1.jpg"]
    assert found.labels.tolist() == [0, 0, 1, 2]
    assert sorted(names) == image_names(tmp_path)
    assert read_labels("folders", tmp_path, names).tolist() == found.labels.tolist()
