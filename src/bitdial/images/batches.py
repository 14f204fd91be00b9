"""A folder of images as batches of inputs that can be walked as often as wanted; files are decoded when needed.

images = ImageBatches("photos", ImageSettings(), batch_size=32, count=1000)
calibrate(model, images, config)
"""

import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self, overload

import torch
from torch import Tensor

from bitdial.errors import ConfigError
from bitdial.images.decode import decode_all, require_pillow
from bitdial.images.labels import read_labels
from bitdial.images.listing import image_names, spread
from bitdial.images.settings import ImageSettings

log = logging.getLogger(__name__)

CACHE_BYTES = 1 << 29  # pixels that are kept after they were decoded: 3,566 images of 224 x 224


class ImageBatches(Sequence[Tensor]):
    """The images in a folder and below, sorted by name, as batches: float32 (batch, 3, crop, crop), normalised.

    `count` of them are taken, evenly spread over the sorted names; None takes all. `labels` is a JSON or CSV file, or
    "folders" (see `labels.read_labels`); `self.labels` then has a class for each image, and `labelled()` gives batches
    of inputs and classes. Pixels are kept, as uint8, where those of all images fit into `cache_bytes`.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        settings: ImageSettings | None = None,
        *,
        batch_size: int = 32,
        count: int | None = None,
        labels: str | os.PathLike[str] | None = None,
        device: str | torch.device = "cpu",
        cache_bytes: int = CACHE_BYTES,
    ):
        for name, value in (("batch_size", batch_size), ("count", count)):
            if value is not None and (type(value) is not int or value < 1):
                raise ConfigError(f"{name}={value!r} must be a whole number of at least 1")
        require_pillow()
        self.folder, self.settings = Path(folder), settings or ImageSettings()
        self.batch_size, self.device = batch_size, torch.device(device)
        self.available = image_names(self.folder)
        self._cache_bytes = cache_bytes
        self.label_source = None if labels is None else os.fspath(labels)
        self._take(spread(self.available, count))

    def _take(self, names: list[str]) -> None:
        self.names = names
        self.labels = None if self.label_source is None else read_labels(self.label_source, self.folder, names)
        fits = len(names) * 3 * self.settings.crop**2 <= self._cache_bytes
        self._cache: dict[str, Tensor] | None = {} if fits else None
        self._enlarged: set[str] = set()
        self._told = False

    @property
    def size(self) -> int:
        """How many images there are; len() counts batches."""
        return len(self.names)

    def subset(self, count: int) -> Self:
        """`count` of these images, evenly spread, or all of them if they are fewer; they share the kept pixels."""
        made = self._of(spread(self.names, count))
        if self._cache is not None:
            made._cache = self._cache
        return made

    def others(self, count: int) -> Self | None:
        """Up to `count` images of the folder that are not among these, evenly spread; None if there are none."""
        taken = set(self.names)
        left = [name for name in self.available if name not in taken]
        return self._of(spread(left, count)) if left else None

    def _of(self, names: list[str]) -> Self:
        made = type(self).__new__(type(self))
        made.__dict__.update(self.__dict__)
        made._take(names)
        return made

    def __len__(self) -> int:
        return -(-len(self.names) // self.batch_size)

    @overload
    def __getitem__(self, place: int) -> Tensor: ...
    @overload
    def __getitem__(self, place: slice) -> list[Tensor]: ...
    def __getitem__(self, place: int | slice) -> Any:
        """A batch of inputs."""
        if isinstance(place, slice):
            return [self[number] for number in range(*place.indices(len(self)))]
        return self.settings.inputs(self.pixels(place).to(self.device))

    def pixels(self, place: int) -> Tensor:
        """The pixels of a batch, uint8 (batch, 3, crop, crop), as they are before normalisation."""
        begin = range(0, len(self.names), self.batch_size)[place]
        batch = torch.stack(self._decoded(self.names[begin : begin + self.batch_size]))
        if begin + self.batch_size >= len(self.names) and self._enlarged and not self._told:
            self._told = True
            crop = self.settings.crop
            log.warning(
                "%d of %d images, such as %s, are smaller than %d x %d pixels and were enlarged",
                len(self._enlarged), self.size, min(self._enlarged), crop, crop,
            )  # fmt: skip
        return batch

    def _decoded(self, names: list[str]) -> list[Tensor]:
        kept = {} if self._cache is None else self._cache
        missing = [name for name in names if name not in kept]
        found = decode_all([self.folder / name for name in missing], self.settings) if missing else []
        self._enlarged.update(name for name, (_, enlarged) in zip(missing, found, strict=True) if enlarged)
        pixels = {name: one for name, (one, _) in zip(missing, found, strict=True)}
        if self._cache is not None:
            self._cache.update(pixels)
        return [pixels[name] if name in pixels else kept[name] for name in names]

    def labelled(self) -> "LabelledBatches":
        """The batches with their classes: (inputs, classes)."""
        if self.labels is None:
            raise ConfigError(f"the images of {self.folder} have no labels; give labels=, a JSON or CSV file")
        return LabelledBatches(self, self.labels)

    def check_varied(self) -> None:
        """Raise ConfigError if each image is one colour all over: nothing can be learned from such."""
        for place in range(len(self)):
            batch = self.pixels(place).flatten(2)
            if bool((batch != batch[:, :, :1]).any()):
                return
        raise ConfigError(
            f"every image of {self.folder} is one colour all over, such as {self.names[0]}; give photographs like "
            "those that the model is for"
        )


class LabelledBatches(Sequence[tuple[Tensor, Tensor]]):
    """Batches of images with their classes, (inputs, classes)."""

    def __init__(self, images: ImageBatches, labels: Tensor):
        self.images = images
        self.labels = labels.split(images.batch_size)

    def __len__(self) -> int:
        return len(self.images)

    @overload
    def __getitem__(self, place: int) -> tuple[Tensor, Tensor]: ...
    @overload
    def __getitem__(self, place: slice) -> list[tuple[Tensor, Tensor]]: ...
    def __getitem__(self, place: int | slice) -> Any:
        """A batch: inputs and classes."""
        if isinstance(place, slice):
            return [self[number] for number in range(*place.indices(len(self)))]
        return self.images[place], self.labels[place].to(self.images.device)
