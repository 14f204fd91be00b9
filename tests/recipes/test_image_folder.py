"""Folders of images: which are found, in which order, and how odd files are opened."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bitdial.errors import ConfigError, MissingDependencyError
from bitdial.recipes.image_folder import cut_out, list_images, open_image

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
    with pytest.raises(ConfigError, match=r"cannot read .*nowhere: .*expected .*<class>/<image>"):
        list_images(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="has no folders of classes"):
        list_images(tmp_path)
    write(tmp_path / "a" / "1.jpg")
    (tmp_path / "b").mkdir()
    with pytest.raises(ConfigError, match=r"the class .*b holds no image"):
        list_images(tmp_path)


def test_every_kind_of_image_becomes_red_green_and_blue(tmp_path: Path) -> None:
    kinds = {
        "grey.png": write(tmp_path / "grey.png", 77, mode="L"),
        "palette.png": write(tmp_path / "palette.png", 0, mode="P"),
        "alpha.png": write(tmp_path / "alpha.png", (9, 8, 7, 0), mode="RGBA"),
        "cmyk.jpg": write(tmp_path / "cmyk.jpg", (0, 255, 255, 0), mode="CMYK", quality=100),
        "plain.jpg": write(tmp_path / "plain.jpg", quality=100),
    }
    found = {name: cut_out(open_image(path), (0, 0, 6, 4), (6, 4)) for name, path in kinds.items()}
    for name, pixels in found.items():
        assert (pixels.dtype, tuple(pixels.shape)) == (torch.uint8, (3, 4, 6)), name
    assert found["grey.png"].unique().tolist() == [77]
    assert found["alpha.png"][:, 0, 0].tolist() == [9, 8, 7]
    red = found["cmyk.jpg"][:, 0, 0].tolist()
    assert red[0] > 240
    assert max(red[1:]) < 15


def test_the_camera_says_which_side_is_up(tmp_path: Path) -> None:
    notes = Image.Exif()
    notes[0x0112] = 6  # turned by 90 degrees
    path = write(tmp_path / "turned.jpg", exif=notes)
    assert open_image(path).size == (4, 6)
    damaged = write(tmp_path / "damaged.jpg", exif=b"Exif\x00\x00garbage that is no note")
    assert open_image(damaged).size == (6, 4)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    whole = write(tmp_path / "whole.jpg", size=(64, 64)).read_bytes()
    for name, content in (("text.jpg", b"not an image"), ("empty.jpg", b""), ("cut.jpg", whole[: len(whole) // 2])):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ConfigError, match=rf"{name} cannot be read as an image.*replace or remove it"):
            open_image(tmp_path / name)
    with pytest.raises(ConfigError, match=r"gone\.jpg cannot be read"):
        open_image(tmp_path / "gone.jpg")


def test_without_pillow_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(MissingDependencyError, match=r"bitdial\[images\]"):
        open_image(tmp_path / "x.jpg")
