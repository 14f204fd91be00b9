"""Data in memory whose order and augmentation are functions of (seed, epoch, index): resumable at any batch."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from bitdial.errors import ConfigError
from bitdial.prepare.model_call import Batch


@dataclass
class Sample:
    """One batch: inputs for the model, targets for the loss, and the samples' indices if known."""

    inputs: Batch
    targets: Any
    index: Tensor | None = None


class TrainingData(Protocol):
    """What `train` iterates over."""

    resumable: bool
    samples: int | None

    def __len__(self) -> int:
        """Batches an epoch."""
        ...

    def batches(self, epoch: int, *, start: int = 0, rank: int = 0, world: int = 1) -> Iterator[Sample]:
        """The batches of `epoch` from number `start` on; of each, the share of `rank` among `world`."""
        ...


@dataclass(frozen=True)
class Shift:
    """Augmentation of images (batch, channels, height, width): shift by up to `pixels` with zero padding, then flip.

    `cutout` puts zeros into a square of that side, somewhere in each image; what lies beyond the border is left out.
    """

    pixels: int = 0
    flip: bool = False
    cutout: int = 0

    def __post_init__(self) -> None:
        if self.pixels < 0 or self.cutout < 0:
            raise ConfigError(f"pixels={self.pixels} and cutout={self.cutout} must not be negative")

    @property
    def draws(self) -> int:
        """Random numbers an image needs."""
        return 5 if self.cutout else 3

    def __call__(self, images: Tensor, draws: Tensor) -> Tensor:
        """Augment `images`; `draws` (batch, `self.draws`) in [0, 1) decide down, right, flip, the square's place."""
        count, _, height, width = images.shape
        span = 2 * self.pixels + 1
        if self.pixels:
            padded = F.pad(images, (self.pixels,) * 4)
            down = (draws[:, 0] * span).long()
            right = (draws[:, 1] * span).long()
            rows = down[:, None] + torch.arange(height, device=images.device)
            columns = right[:, None] + torch.arange(width, device=images.device)
            which = torch.arange(count, device=images.device)[:, None, None]
            images = padded.permute(0, 2, 3, 1)[which, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)
        if self.flip:
            images = torch.where((draws[:, 2] < 0.5)[:, None, None, None], images, images.flip(3))
        if self.cutout:
            rows, columns = (self._cut(size, draw) for size, draw in ((height, draws[:, 3]), (width, draws[:, 4])))
            images = images.masked_fill((rows[:, :, None] & columns[:, None, :])[:, None], 0.0)
        return images.contiguous()

    def _cut(self, size: int, draw: Tensor) -> Tensor:
        """Which of `size` places in a line each image's square covers: its middle may be any of them."""
        first = (draw * size).long()[:, None] - self.cutout // 2
        place = torch.arange(size, device=draw.device)
        return (place >= first) & (place < first + self.cutout)


def check_samples(inputs: Tensor, targets: Tensor, batch_size: int) -> None:
    """Raise ConfigError unless both are tensors of one length above 0, and a batch holds something."""
    for name, value in (("inputs", inputs), ("targets", targets)):
        if not isinstance(value, Tensor):
            kind = type(value).__name__
            raise ConfigError(f"{name} must be a torch tensor, got {kind}; torch.as_tensor({name}) makes one")
    if len(inputs) != len(targets) or len(inputs) == 0:
        raise ConfigError(f"inputs and targets must have one length above 0, got {len(inputs)} and {len(targets)}")
    if batch_size < 1:
        raise ConfigError(f"batch_size={batch_size} must be at least 1")


class ArrayData:
    """Training data from tensors: shuffled, batched, augmented by (seed, epoch, index) alone.

    Several ranks take equal shares of each batch. What does not divide is left out; of a last batch smaller than the
    number of ranks, each takes one sample.
    """

    resumable = True

    def __init__(
        self, inputs: Tensor, targets: Tensor, *, batch_size: int, seed: int = 0, augment: Shift | None = None
    ):
        check_samples(inputs, targets, batch_size)
        self.inputs, self.targets = inputs, targets
        self.samples: int | None = len(inputs)
        self.batch_size, self.seed, self.augment = min(batch_size, len(inputs)), seed, augment

    def __len__(self) -> int:
        return -(-len(self.inputs) // self.batch_size)

    def batches(self, epoch: int, *, start: int = 0, rank: int = 0, world: int = 1) -> Iterator[Sample]:
        """The batches of `epoch` from number `start` on."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
        order = torch.randperm(len(self.inputs), generator=generator)
        count = 0 if self.augment is None else self.augment.draws
        draws = torch.rand(len(self.inputs), count, generator=generator).to(self.inputs.device)
        for number in range(start, len(self)):
            index = order[number * self.batch_size : (number + 1) * self.batch_size]
            share = len(index) // world
            index = index[rank * share : (rank + 1) * share] if share else index[rank % len(index) :][:1]
            there = index.to(self.inputs.device)
            inputs = self.inputs[there]
            if self.augment is not None:
                inputs = self.augment(inputs, draws[there])
            yield Sample(inputs, self.targets[there], index)


class LoaderData:
    """A user's own iterable of (inputs, targets) or (inputs, targets, index) batches.

    Its order is its own affair: an exact resume needs one that repeats itself. Under several processes it must shard by
    itself (torch's DistributedSampler); `set_epoch` of its sampler is called.
    """

    resumable = False

    def __init__(self, loader: Iterable[Any]):
        if not hasattr(loader, "__len__"):
            raise ConfigError("the training data needs a length (batches an epoch) for the learning-rate schedule")
        self.loader = loader
        dataset = getattr(loader, "dataset", None)
        self.samples: int | None = len(dataset) if hasattr(dataset, "__len__") else None  # type: ignore[arg-type]

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]

    def batches(self, epoch: int, *, start: int = 0, rank: int = 0, world: int = 1) -> Iterator[Sample]:
        """The batches of `epoch` from number `start` on, by running over those before it."""
        sampler = getattr(self.loader, "sampler", None)
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)  # type: ignore[union-attr]
        for number, batch in enumerate(self.loader):
            if number < start:
                continue
            if not isinstance(batch, tuple | list) or len(batch) not in (2, 3):
                raise ConfigError(
                    "a training batch must be (inputs, targets) or (inputs, targets, index), got "
                    f"{type(batch).__name__}"
                )
            yield Sample(*batch)
