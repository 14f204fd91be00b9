"""Which class each image is of: from a JSON or CSV file, or from the folders that the images lie in."""

import csv
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bitdial.errors import ConfigError
from bitdial.files.atomic import read_json

FOLDERS = "folders"  # in the place of a file: the folders' names say it
FORMS = '{"file": class} or {"split": {"file": class}} as JSON, or lines file,class as CSV, with classes counted from 0'


def read_labels(source: str | Path, folder: Path, names: Sequence[str]) -> Tensor:
    """The class of each of the images `names` of `folder`, int64; ConfigError names the file that has none.

    `source` is a JSON or CSV file, or "folders": classes are then the folders in `folder`, numbered in sorted order, as
    torchvision does. A file may name an image by its path from `folder` or by its name alone. Of several splits the one
    with the folder's name counts, or else the one that has all the images; if several have, they must agree.
    """
    if source == FOLDERS:
        return classes_by_folder(folder, names)
    path = Path(source)
    tables = [_csv(path)] if path.suffix.lower() == ".csv" else _splits(path, folder.resolve().name)
    missing: list[str] = []
    found: list[list[int]] = []
    for table in tables:
        absent = [name for name in names if name not in table and Path(name).name not in table]
        if absent:
            missing = absent
        else:
            found.append(_classes(path, table, names))
    if not found:
        raise ConfigError(
            f"{path} has no class for {len(missing)} of {len(names)} images of {folder}, such as {missing[0]}; "
            f"expected {FORMS}"
        )
    if any(classes != found[0] for classes in found):
        raise ConfigError(
            f"{path}: {len(found)} splits have all images of {folder}, with different classes, and none has the "
            "folder's name; give a file with one split"
        )
    return torch.tensor(found[0])


def _classes(path: Path, table: dict[str, Any], names: Sequence[str]) -> list[int]:
    """The classes of `names`, all of which the table has."""
    _check_alone(path, table, names)
    return [_class(path, name, table[name] if name in table else table[Path(name).name]) for name in names]


def _check_alone(path: Path, table: dict[str, Any], names: Sequence[str]) -> None:
    """Raise ConfigError if two images share a name by which alone the table has their class."""
    bare = Counter(Path(name).name for name in names if name not in table)
    if double := [name for name, number in bare.items() if number > 1]:
        raise ConfigError(f"{path}: several images are called {double[0]}; name them with their folders")


def class_folders(folder: Path) -> list[str]:
    """The folders in `folder` that stand for classes, in the order of their numbers."""
    return sorted(entry.name for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith("."))


def classes_by_folder(folder: Path, names: Sequence[str]) -> Tensor:
    """The class of each of the images `names` of `folder`, int64: the number of the folder in it that the image is in.

    It may lie deeper than that. ConfigError names an image that lies in no folder.
    """
    if loose := [name for name in names if "/" not in name]:
        raise ConfigError(
            f"{folder / loose[0]} lies in no folder that would say its class; put it there, or give a file"
        )
    numbers = {name: number for number, name in enumerate(class_folders(folder))}
    return torch.tensor([numbers[name.partition("/")[0]] for name in names])


def _splits(path: Path, name: str) -> list[dict[str, Any]]:
    """The tables in a JSON file: one, or one for each split, that of `name` first."""
    values = read_json(path)
    if not isinstance(values, dict) or not values:
        raise ConfigError(f"{path} has no classes; expected {FORMS}")
    if not all(isinstance(inner, dict) for inner in values.values()):
        return [values]
    return [values[name]] if name in values else list(values.values())


def _csv(path: Path) -> dict[str, Any]:
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            rows = [row for row in csv.reader(file) if row]
    except OSError as problem:
        raise ConfigError(f"cannot read {path}: {problem.strerror}") from problem
    except (ValueError, csv.Error) as problem:
        raise ConfigError(f"{path} is not a CSV file: {problem}") from problem
    if rows and [cell.strip().lower() for cell in rows[0]] == ["file", "class"]:
        rows = rows[1:]
    if odd := [row for row in rows if len(row) != 2]:
        raise ConfigError(f"{path}: the line {','.join(odd[0])!r} is not file,class; expected {FORMS}")
    table = {name.strip(): value.strip() for name, value in rows}
    if len(table) < len(rows):
        raise ConfigError(f"{path} names a file twice; give each image one class")
    return table


def _class(path: Path, name: str, value: object) -> int:
    text = value if isinstance(value, str) else str(value) if type(value) is int else ""
    if not text.isdecimal() or int(text) >= 1 << 31:
        raise ConfigError(f"{path}: the class of {name} is {value!r}; give its number, counted from 0")
    return int(text)
