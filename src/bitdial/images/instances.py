"""A folder of images and instance maps, as images and targets for detectors.

An instance map is an image with one channel that says for each pixel to which object it belongs: 1 to n, and 0 where
there is none. `labels.json` in the folder lists the pairs:

    {"images": [{"image": "a.jpg", "instances": "a.png", "split": "train", "classes": [1, 2]}, ...]}

`classes` has the class of each object, counted from 1; without it all are of class 1. `split` may be left out, and
other keys are passed over.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, overload

import numpy as np
import torch
from torch import Tensor

from bitdial.errors import ConfigError
from bitdial.files.atomic import read_json
from bitdial.images.decode import open_image, read_numbers, require_pillow

INDEX = "labels.json"
FORM = '{"images": [{"image": "a.jpg", "instances": "a.png", "split": "train"}, ...]}'
Target = dict[str, Tensor]


@dataclass(frozen=True)
class Entry:
    """One image of a folder: its file, that of its map, and the class of each object, or None."""

    image: str
    instances: str
    classes: tuple[int, ...] | None


class InstanceFolder(Sequence[tuple[Tensor, Target]]):
    """The images of one split of a folder (None: all), each with its target; files are decoded when needed.

    An item is an image, float32 (3, height, width) from 0 to 1, and a target: `boxes` (n, 4: left, top, right, bottom;
    right and bottom are beyond the last pixel), `labels` (n) and `instances` (height, width), a map of the objects 1 to
    n. `count` images are taken, evenly spread; None takes all. The pixels are kept once they were read.
    """

    def __init__(self, folder: str | os.PathLike[str], split: str | None = None, *, count: int | None = None):
        require_pillow()
        self.folder, self.split = Path(folder), split
        entries = _entries(self.folder, split)
        if count is not None and count < len(entries):
            entries = [entries[place * len(entries) // count] for place in range(count)]
        self.entries = entries
        self._read: dict[int, tuple[Tensor, Tensor]] = {}

    def __len__(self) -> int:
        return len(self.entries)

    @overload
    def __getitem__(self, place: int) -> tuple[Tensor, Target]: ...
    @overload
    def __getitem__(self, place: slice) -> list[tuple[Tensor, Target]]: ...
    def __getitem__(self, place: int | slice) -> Any:
        """An image and its target."""
        if isinstance(place, slice):
            return [self[number] for number in range(*place.indices(len(self)))]
        pixels, instances = self.pixels(place)
        return pixels.float() / 255, instance_target(instances.long(), self.entries[place].classes)

    def pixels(self, place: int) -> tuple[Tensor, Tensor]:
        """An image as uint8 (3, height, width), and its map as int32 (height, width) with the numbers of the file."""
        place = range(len(self))[place]
        if place not in self._read:
            self._read[place] = _decode(self.folder, self.entries[place])
        return self._read[place]

    def part(self, places: Sequence[int]) -> Self:
        """These images alone; what was read is read anew."""
        made = type(self).__new__(type(self))
        made.folder, made.split, made._read = self.folder, self.split, {}
        made.entries = [self.entries[place] for place in places]
        return made

    def largest_class(self) -> int:
        """The highest class that an object has, as far as the list says."""
        return max((number for one in self.entries for number in one.classes or (1,)), default=1)


def instance_target(instances: Tensor, classes: Sequence[int] | None = None, *, smallest: int = 1) -> Target:
    """The target of an instance map (height, width), whole numbers: `boxes`, `labels` and `instances`.

    Objects of fewer than `smallest` pixels are taken out, and the others numbered from 1. `classes` has the class of
    each object that the map can have, so classes[0] is that of number 1.
    """
    numbers, places, counts = torch.unique(instances, return_inverse=True, return_counts=True)
    kept = (numbers > 0) & (counts >= smallest)
    renumbered = torch.where(kept, kept.cumsum(0), 0)[places]
    count = int(kept.sum())
    height, width = instances.shape
    rows = torch.arange(height, device=instances.device)[:, None].expand(height, width).flatten()
    columns = torch.arange(width, device=instances.device).expand(height, width).flatten()
    boxes = torch.empty(count + 1, 4, dtype=torch.long, device=instances.device)
    ends = ((columns, "amin", 0), (rows, "amin", 0), (columns, "amax", 1), (rows, "amax", 1))
    for side, (line, which, beyond) in enumerate(ends):
        found = torch.zeros(count + 1, dtype=torch.long, device=instances.device)
        boxes[:, side] = found.scatter_reduce(0, renumbered.flatten(), line, which, include_self=False) + beyond
    labels = torch.ones(count, dtype=torch.long, device=instances.device)
    if classes is not None and count:
        labels = torch.tensor(classes, device=instances.device)[numbers[kept].long() - 1]
    return {"boxes": boxes[1:].float(), "labels": labels, "instances": renumbered}


def with_masks(target: Target) -> Target:
    """`target` with `masks` (n, height, width), uint8, in the place of `instances`: as detectors learn from them."""
    kept = {name: value for name, value in target.items() if name != "instances"}
    numbers = torch.arange(1, len(target["boxes"]) + 1, device=target["instances"].device)
    return kept | {"masks": (target["instances"][None] == numbers[:, None, None]).to(torch.uint8)}


def _entries(folder: Path, split: str | None) -> list[Entry]:
    """What labels.json lists for `split`; ConfigError if nothing, or if it is not of the form."""
    if not (folder / INDEX).is_file():
        raise ConfigError(f"{folder} has no {INDEX}, which lists images and their instance maps: {FORM}")
    values = read_json(folder / INDEX)
    listed = values.get("images") if isinstance(values, dict) else None
    if not isinstance(listed, list) or not listed:
        raise ConfigError(f"{folder / INDEX} lists no images; its form is {FORM}")
    splits = sorted({str(one.get("split")) for one in listed if isinstance(one, dict)})
    entries = [_entry(folder, one) for one in listed if split is None or one.get("split") == split]
    if not entries:
        raise ConfigError(f"{folder / INDEX} has no images of the split {split!r}, only of {', '.join(splits)}")
    absent = [name for one in entries for name in (one.image, one.instances) if not (folder / name).is_file()]
    if absent:
        archives = sorted(path.name for path in folder.glob("*.tar"))
        advice = f"unpack it first: tar -xf {archives[0]}" if archives else "put it there, or take it off the list"
        raise ConfigError(f"{folder / absent[0]} is listed in {INDEX} and is not there; {advice}")
    return entries


def _entry(folder: Path, one: Any) -> Entry:
    match one:
        case {"image": str(image), "instances": str(instances)}:
            classes = one.get("classes")
            if classes is None:
                return Entry(image, instances, None)
            if isinstance(classes, list) and all(type(number) is int and number >= 1 for number in classes):
                return Entry(image, instances, tuple(classes))
            raise ConfigError(f"{folder / INDEX}: the classes of {image} must be whole numbers from 1, one per object")
        case _:
            raise ConfigError(
                f"{folder / INDEX}: {str(one)[:60]} lacks the names of the image and of its map; the form is {FORM}"
            )


def _decode(folder: Path, entry: Entry) -> tuple[Tensor, Tensor]:
    image = open_image(folder / entry.image)
    instances = read_numbers(folder / entry.instances)
    if image.size != instances.shape[::-1]:
        height, width = instances.shape
        raise ConfigError(
            f"{folder / entry.image} has {image.width} x {image.height} pixels and its map {entry.instances} {width} x "
            f"{height}; they must be of one size"
        )
    if entry.classes is not None and (highest := int(instances.max())) > len(entry.classes):
        raise ConfigError(
            f"{folder / entry.instances} has an object {highest}, and {INDEX} has {len(entry.classes)} classes for it; "
            "list the class of each"
        )
    pixels = torch.from_numpy(np.array(image).transpose(2, 0, 1).copy())
    return pixels, torch.from_numpy(instances)
