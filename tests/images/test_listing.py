"""Which files count, and in which order."""

from pathlib import Path

import pytest

from bitdial.errors import ConfigError
from bitdial.images.listing import image_names, spread


def touch(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()


def test_images_are_found_below_and_sorted(tmp_path: Path) -> None:
    touch(tmp_path, "b.JPG", "a.png", "dogs/2.jpeg", "cats/deep/1.webp", ".hidden.png", ".git/x.png")
    (tmp_path / "dogs" / "loop").symlink_to(tmp_path)
    assert image_names(tmp_path) == ["a.png", "b.JPG", "cats/deep/1.webp", "dogs/2.jpeg"]


def test_other_files_are_left_out_with_a_word(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    touch(tmp_path, "a.png", "notes.txt", "labels.json")
    assert image_names(tmp_path) == ["a.png"]
    assert "2 files are not images by their ending, such as labels.json; they are left out" in caplog.text


def test_folders_without_images_are_explained(tmp_path: Path) -> None:
    touch(tmp_path, "notes.txt", "file.jpg")
    empty = tmp_path / "empty"
    empty.mkdir()
    (tmp_path / "file.jpg").rename(empty / "notes.md")
    for folder, words in {
        empty: "has no images (.jpg, .jpeg, .png, .webp, .bmp, .gif, .tif, .tiff, .ppm, .pgm); it has 1 other files, "
        "such as notes.md; name a folder of images",
        tmp_path / "nowhere": "does not exist; name a folder of images",
        tmp_path / "notes.txt": "is not a folder; name a folder of images",
    }.items():
        with pytest.raises(ConfigError) as problem:
            image_names(folder)
        assert str(problem.value) == f"{folder} {words}"


def test_a_part_is_spread_over_all() -> None:
    names = [f"{number:02}" for number in range(10)]
    assert spread(names, None) == spread(names, 10) == spread(names, 99) == names
    assert spread(names, 3) == ["00", "03", "06"]
    assert spread(names, 1) == ["00"]
    for count in range(1, 11):
        assert len(set(spread(names, count))) == count
