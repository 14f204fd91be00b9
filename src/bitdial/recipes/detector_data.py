"""Images with objects in batches, for training and for evaluation; images of a batch have sizes of their own."""

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, overload

import numpy as np
import torch
from torch import Tensor

from bitdial.images import InstanceAugment, InstanceFolder
from bitdial.images.instances import Target, instance_target, with_masks
from bitdial.train.data import Sample, rank_share

Item = tuple[Tensor, Target]


class DetectionData:
    """Training data for a detector, cut and mirrored by (seed, epoch, index) alone, so that a run can stop anywhere.

    A sample has a list of images and a list of targets. `workers` threads read the next batch while the model trains
    on the one before. A last batch that is not full is left out: other images in every epoch.
    """

    resumable = True

    def __init__(
        self,
        images: InstanceFolder,
        augment: InstanceAugment,
        *,
        batch_size: int,
        seed: int,
        device: torch.device,
        workers: int = 4,
    ):
        self.images, self.augment, self.seed, self.device = images, augment, seed, device
        self.batch_size, self.workers = min(batch_size, len(images)), workers
        self.samples: int | None = len(images)

    def __len__(self) -> int:
        return len(self.images) // self.batch_size

    def batches(self, epoch: int, *, start: int = 0, rank: int = 0, world: int = 1) -> Iterator[Sample]:
        """The batches of `epoch` from number `start` on; of each, the share of `rank` among `world`."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
        order = torch.randperm(len(self.images), generator=generator)
        whole = order[: len(self) * self.batch_size].view(len(self), self.batch_size)[start:]
        shares = [rank_share(index, rank, world) for index in whole]
        with ThreadPoolExecutor(self.workers) as pool:
            ahead = self._begin(pool, epoch, shares[0]) if shares else []
            for number, index in enumerate(shares):
                now = ahead
                ahead = self._begin(pool, epoch, shares[number + 1]) if number + 1 < len(shares) else []
                yield self._sample([one.result() for one in now], index)

    def _begin(self, pool: ThreadPoolExecutor, epoch: int, index: Tensor) -> list[Future[tuple[Tensor, Tensor]]]:
        return [pool.submit(self._changed, epoch, place) for place in index.tolist()]

    def _changed(self, epoch: int, place: int) -> tuple[Tensor, Tensor]:
        return self.augment(*self.images.pixels(place), np.random.default_rng((self.seed, epoch, place)))

    def _sample(self, read: list[tuple[Tensor, Tensor]], index: Tensor) -> Sample:
        images, targets = [], []
        for (image, instances), place in zip(read, index.tolist(), strict=True):
            images.append(image.to(self.device, non_blocking=True))
            classes = self.images.entries[place].classes
            target = instance_target(instances.to(self.device), classes, smallest=self.augment.smallest)
            targets.append(with_masks(target))
        return Sample(images, targets, index)

    def inputs(self, count: int) -> list[list[Tensor]]:
        """The first `count` images of the training as inputs alone, each a batch: to prepare and to calibrate on."""
        found: list[list[Tensor]] = []
        for epoch in range(count):  # more than one only where there are fewer images
            for sample in self.batches(epoch):
                assert isinstance(sample.inputs, list)
                found += [[image] for image in sample.inputs]
                if len(found) >= count:
                    return found[:count]
        return found


class DetectionImages(Sequence[tuple[list[Tensor], list[Target]]]):
    """Images as they are, one in a batch, with their targets, on the device: to evaluate on."""

    def __init__(self, images: InstanceFolder, device: torch.device | str):
        self.images, self.device = images, torch.device(device)

    def __len__(self) -> int:
        return len(self.images)

    @overload
    def __getitem__(self, place: int) -> tuple[list[Tensor], list[Target]]: ...
    @overload
    def __getitem__(self, place: slice) -> list[tuple[list[Tensor], list[Target]]]: ...
    def __getitem__(self, place: int | slice) -> Any:
        """A batch."""
        if isinstance(place, slice):
            return [self[number] for number in range(*place.indices(len(self)))]
        image, target = self.images[place]
        return [image.to(self.device)], [target]
