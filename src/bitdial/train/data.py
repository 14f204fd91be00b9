"""Data in memory whose order and augmentation are functions of (seed, epoch, index): resumable at any batch."""

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from bitdial.errors import ConfigError, TrainingError
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


def rank_share(index: Tensor, rank: int, world: int) -> Tensor:
    """The share of `rank` in a batch (samples,): all have equal ones, or one sample if there are fewer than ranks."""
    share = len(index) // world
    return index[rank * share : (rank + 1) * share] if share else index[rank % len(index) :][:1]


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
            index = rank_share(index, rank, world)
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
        try:
            self.length = len(loader)  # type: ignore[arg-type]
        except TypeError as problem:  # also of a DataLoader over an IterableDataset
            raise ConfigError(
                "the training data needs a length (batches an epoch) for the learning-rate schedule; for data without "
                "one, TrainConfig(steps_per_epoch=1000) says it"
            ) from problem
        self.loader = loader
        self.samples = _samples(loader)

    def __len__(self) -> int:
        return self.length

    def batches(self, epoch: int, *, start: int = 0, rank: int = 0, world: int = 1) -> Iterator[Sample]:
        """The batches of `epoch` from number `start` on, by running over those before it."""
        _set_epoch(self.loader, epoch)
        for number, batch in enumerate(self.loader):
            if number >= start:
                yield _sample(batch)


class StreamData:
    """A user's own iterable, in epochs of `steps` batches: each goes on where the one before ended.

    When the iterable ends, it is begun again. One that can be gone through only once, a generator, has to last for the
    whole run. To resume, it runs over all batches before.
    """

    resumable = False

    def __init__(self, loader: Iterable[Any], steps: int):
        self.loader, self.steps = loader, steps
        self.samples = _samples(loader)
        self._given = 0  # batches of the whole run, so far
        self._stream = self._endless()

    def __len__(self) -> int:
        return self.steps

    def batches(self, epoch: int, *, start: int = 0, rank: int = 0, world: int = 1) -> Iterator[Sample]:
        """The batches of `epoch` from number `start` on, by running over those of the run before it."""
        if self._given > epoch * self.steps + start:
            self._given, self._stream = 0, self._endless()
        while self._given < (epoch + 1) * self.steps:
            batch = next(self._stream)
            self._given += 1
            if self._given > epoch * self.steps + start:
                yield _sample(batch)

    def _endless(self) -> Iterator[Any]:
        for times in itertools.count():
            _set_epoch(self.loader, times)
            empty = True
            for batch in self.loader:
                empty = False
                yield batch
            if empty:
                raise TrainingError(
                    f"the data ended after {self._given} batches, and gave none when it was begun again; give an "
                    "iterable that can be gone through more than once, or fewer epochs or steps_per_epoch"
                )


def as_training_data(data: Any, steps_per_epoch: int | None) -> TrainingData:
    """`data` as `train` iterates over it, in epochs of `steps_per_epoch` if that is given."""
    if hasattr(data, "batches"):
        if steps_per_epoch is not None:
            raise ConfigError(f"steps_per_epoch={steps_per_epoch}: {type(data).__name__} has a length of its own")
        return cast(TrainingData, data)
    return LoaderData(data) if steps_per_epoch is None else StreamData(data, steps_per_epoch)


def _samples(loader: Any) -> int | None:
    dataset: Any = getattr(loader, "dataset", None)
    return len(dataset) if hasattr(dataset, "__len__") else None


def _set_epoch(loader: Any, epoch: int) -> None:
    sampler: Any = getattr(loader, "sampler", None)
    if hasattr(sampler, "set_epoch"):
        sampler.set_epoch(epoch)


def _sample(batch: Any) -> Sample:
    if not isinstance(batch, tuple | list) or len(batch) not in (2, 3):
        raise ConfigError(
            f"a training batch must be (inputs, targets) or (inputs, targets, index), got {type(batch).__name__}"
        )
    return Sample(*batch)
