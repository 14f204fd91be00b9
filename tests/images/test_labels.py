"""Classes from files and from folders."""

import json
from pathlib import Path

import pytest

from bitdial.errors import ConfigError
from bitdial.images.labels import read_labels

NAMES = ["a.png", "b/c.png"]


def test_files_of_every_form_give_the_same_classes(tmp_path: Path) -> None:
    folder = tmp_path / "dev"
    folder.mkdir()
    forms = {
        "plain.json": json.dumps({"a.png": 3, "b/c.png": 7, "other.png": 1}),
        "bare.json": json.dumps({"a.png": 3, "c.png": "7"}),
        "splits.json": json.dumps({"calibration": {"a.png": 0, "b/c.png": 0}, "dev": {"a.png": 3, "b/c.png": 7}}),
        "equal.json": json.dumps({"x": {"a.png": 3, "c.png": 7}, "y": {"a.png": 3, "b/c.png": 7}}),
        "unnamed.json": json.dumps({"x": {"a.png": 0}, "y": {"a.png": 3, "c.png": 7}}),
        "plain.csv": "a.png,3\nb/c.png, 7\n",
        "headed.csv": "\ufefffile,class\r\na.png,3\r\n\r\nc.png,7\r\n",
    }
    for name, text in forms.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
        assert read_labels(tmp_path / name, folder, NAMES).tolist() == [3, 7], name


def test_what_is_wrong_with_a_file_is_said(tmp_path: Path) -> None:
    wrong = {
        "part.json": ('{"a.png": 1}', "has no class for 1 of 2 images of photos, such as b/c.png"),
        "names.json": ('{"a.png": 1, "c.png": "cat"}', "the class of b/c.png is 'cat'; give its number"),
        "minus.json": ('{"a.png": -1, "c.png": 0}', "the class of a.png is -1"),
        "share.json": ('{"a.png": 1.5, "c.png": 0}', "the class of a.png is 1.5"),
        "true.json": ('{"a.png": true, "c.png": 0}', "the class of a.png is True"),
        "list.json": ("[]", "has no classes; expected"),
        "none.json": ("{}", "has no classes; expected"),
        "broken.json": ("{", "is not a JSON file"),
        "twice.json": ('{"a.png": 1, "c.png": 0, "a.png": 2}', "it has 'a.png' twice"),
        "splits.json": (
            '{"x": {"a.png": 1, "c.png": 0}, "y": {"a.png": 2, "c.png": 0}, "z": {}}',
            "2 splits have all images of photos, with different classes, and none has the folder's name",
        ),
        "long.csv": ("a.png,3,4\n", "the line 'a.png,3,4' is not file,class"),
        "twice.csv": ("a.png,3\na.png,3\n", "names a file twice"),
        "picture.csv": (b"\xff\xfe\xff", "is not a CSV file"),
    }
    for name, (content, words) in wrong.items():
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        with pytest.raises(ConfigError) as problem:
            read_labels(path, Path("photos"), NAMES)
        assert words in str(problem.value)
        assert name in str(problem.value)
    with pytest.raises(ConfigError, match="cannot read"):
        read_labels(tmp_path / "missing.csv", Path("photos"), NAMES)


def test_a_name_that_two_images_share_says_nothing(tmp_path: Path) -> None:
    (tmp_path / "l.json").write_text('{"1.png": 0}')
    with pytest.raises(ConfigError, match=r"several images are called 1\.png; name them with their folders"):
        read_labels(tmp_path / "l.json", tmp_path, ["cats/1.png", "dogs/1.png"])


def test_folders_are_numbered_in_sorted_order(tmp_path: Path) -> None:
    """Also those that have no image among the chosen ones: numbers stay what they are."""
    for name in ("dogs", "cats", "ants", ".hidden"):
        (tmp_path / name).mkdir()
    assert read_labels("folders", tmp_path, ["ants/1.png", "dogs/1.png", "dogs/deep/2.png"]).tolist() == [0, 2, 2]
    with pytest.raises(ConfigError, match=r"loose\.png lies in no folder that would say its class"):
        read_labels("folders", tmp_path, ["ants/1.png", "loose.png"])
