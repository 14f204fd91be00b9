"""Images from folders in batches: decoded and cut by worker processes, in an order that (seed, epoch) decide alone.

Crops are a function of (seed, epoch, index) too, so that the number of workers, the number of processes and a stop in
the middle of an epoch change nothing of what a sample looks like.
"""

import math
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from bitdial.errors import ConfigError
from bitdial.images import ImageSettings
from bitdial.images.decode import Box, cut_out, middle, open_image
from bitdial.recipes.image_folder import ImageList
from bitdial.train.data import Sample, rank_share

AREAS = (0.08, 1.0)  # of a random part, as a share of the image
RATIOS = (3 / 4, 4 / 3)  # width over height
TRIES = 10
EVALUATED = 128  # images in a batch of evaluation
SHORT_SIDE = 256 / 224  # of an image to evaluate on, relative to the square that is cut out of its middle

Cut = Callable[[Any, int], Tensor]  # a picture and its index to uint8 (3, crop, crop)


def settings_for(size: int, inputs: ImageSettings) -> ImageSettings:
    """Inputs of `size`, normalised as `inputs` says: the shorter side of images to evaluate on is 256/224 of it."""
    resize = max(size, round(size * SHORT_SIDE))
    return replace(inputs, resize=resize, crop=size, interpolation="bilinear")


def random_box(width: int, height: int, draws: np.random.Generator) -> Box:
    """A part of 8 % to 100 % of the area, 3:4 to 4:3 in shape; the largest of such shape in the middle if ten fail."""
    areas = draws.uniform(*AREAS, TRIES) * width * height
    ratios = np.exp(draws.uniform(math.log(RATIOS[0]), math.log(RATIOS[1]), TRIES))
    widths, heights = np.rint(np.sqrt(areas * ratios)).astype(int), np.rint(np.sqrt(areas / ratios)).astype(int)
    fits = (widths >= 1) & (heights >= 1) & (widths <= width) & (heights <= height)
    if fits.any():
        which = int(fits.argmax())
        w, h = int(widths[which]), int(heights[which])
        left, top = int(draws.integers(width - w + 1)), int(draws.integers(height - h + 1))
    else:
        ratio = min(max(width / height, RATIOS[0]), RATIOS[1])
        w, h = min(width, max(1, round(height * ratio))), min(height, max(1, round(width / ratio)))
        left, top = (width - w) // 2, (height - h) // 2
    return left, top, left + w, top + h


@dataclass(frozen=True)
class RandomCut:
    """The training's: a random part, mirrored every other time, by (seed, epoch, index)."""

    settings: ImageSettings
    seed: int
    epoch: int

    def __call__(self, image: Any, index: int) -> Tensor:
        """uint8 (3, crop, crop)."""
        draws = np.random.default_rng((self.seed, self.epoch, index))
        found = cut_out(image, random_box(image.width, image.height, draws), self.settings)
        return found.flip(2) if draws.random() < 0.5 else found


@dataclass(frozen=True)
class MiddleCut:
    """The evaluation's: the middle, as `bitdial eval --images` takes it."""

    settings: ImageSettings

    def __call__(self, image: Any, index: int) -> Tensor:
        """uint8 (3, crop, crop)."""
        return middle(image, self.settings)


class _Items(Dataset[Any]):
    """What a worker does for one index: (picture, label, index), or the text of what is wrong with the file."""

    def __init__(self, images: ImageList, cut: Cut):
        self.images, self.cut = images, cut

    def __getitem__(self, index: int) -> tuple[Tensor, int, int] | str:
        try:
            picture = self.cut(open_image(self.images.path(index)), index)
        except ConfigError as problem:  # as text: an exception would come with the worker's traceback in its message
            return str(problem)
        return picture, int(self.images.labels[index]), index


def _together(items: list[Any]) -> tuple[Tensor, Tensor, Tensor] | str:
    for item in items:
        if isinstance(item, str):
            return item
    pictures, labels, index = zip(*items, strict=True)
    return torch.stack(pictures), torch.tensor(labels), torch.tensor(index)


def _ignore_signals(worker: int) -> None:
    """Ctrl-C and SIGTERM reach all processes of a run; the one that trains decides when its workers end."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


@dataclass(frozen=True)
class Reading:
    """How images are read: to which inputs, by how many workers, for which device."""

    settings: ImageSettings
    workers: int
    device: torch.device

    def load(self, images: ImageList, cut: Cut, batches: list[Any]) -> Iterator[Sample]:
        """The batches, each a list of indices of `images`, on the device."""
        loader = DataLoader(
            _Items(images, cut),
            batch_sampler=batches,
            num_workers=self.workers,
            collate_fn=_together,
            worker_init_fn=_ignore_signals,
            pin_memory=self.device.type == "cuda",
            generator=torch.Generator(),  # the global one would be drawn from at each start, also of a resumed run
        )
        for batch in loader:
            if isinstance(batch, str):
                raise ConfigError(batch)
            pictures, labels, index = batch
            pictures, labels = (tensor.to(self.device, non_blocking=True) for tensor in (pictures, labels))
            yield Sample(self.settings.inputs(pictures), labels, index)


class FolderData:
    """Training data from folders of images, by (seed, epoch, index) alone.

    Several ranks take equal shares of each batch, and what does not divide is left out. So is a last batch that is not
    full: other images in every epoch, and every step has the same shape.
    """

    resumable = True

    def __init__(self, images: ImageList, reading: Reading, *, batch_size: int, seed: int):
        self.images, self.reading, self.seed = images, reading, seed
        self.samples: int | None = len(images)
        self.batch_size = min(batch_size, len(images))

    def __len__(self) -> int:
        return len(self.images) // self.batch_size

    def batches(self, epoch: int, *, start: int = 0, rank: int = 0, world: int = 1) -> Iterator[Sample]:
        """The batches of `epoch` from number `start` on; of each, the share of `rank` among `world`."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
        order = torch.randperm(len(self.images), generator=generator)
        whole = order[: len(self) * self.batch_size].view(len(self), self.batch_size)[start:]
        shares = [rank_share(index, rank, world).tolist() for index in whole]
        yield from self.reading.load(self.images, RandomCut(self.reading.settings, self.seed, epoch), shares)


class EvaluationData:
    """Images of folders to evaluate on, the middle of each, as often as one likes; each rank has its share."""

    def __init__(self, images: ImageList, reading: Reading, *, rank: int = 0, world: int = 1):
        self.images, self.reading = images, reading
        self.mine = list(range(rank, len(images), world))

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        batches = [self.mine[start : start + EVALUATED] for start in range(0, len(self.mine), EVALUATED)]
        for sample in self.reading.load(self.images, MiddleCut(self.reading.settings), batches):
            assert isinstance(sample.inputs, Tensor)
            yield sample.inputs, sample.targets


def usual_workers() -> int:
    """The cores of this machine, shared among the processes that torchrun started on it; 16 at most."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(16, cores // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))
