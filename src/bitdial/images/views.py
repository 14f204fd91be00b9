"""Changed copies of images: more to learn from than the images alone."""

from collections.abc import Sequence
from typing import Any, overload

import torch
import torch.nn.functional as F
from torch import Tensor

from bitdial.errors import ConfigError

SMALLEST = 0.5  # of an image's area, that a part of it has at least


class ImageViews(Sequence[Tensor]):
    """The batches of `images`, then `count - 1` changed copies of each: ImageViews(images, 4) has four times as many.

    The first copy is mirrored. Each further one is a random part of the image, of its shape and at least half of its
    area, enlarged to the size of the whole, and mirrored every other time. A batch is the same each time it is asked
    for: its place and `seed` decide.
    """

    def __init__(self, images: Sequence[Tensor], count: int, *, seed: int = 0):
        if type(count) is not int or count < 1:
            raise ConfigError(f"views={count!r} must be a whole number of at least 1: the images, and their copies")
        self.images, self.views, self.seed = images, count, seed

    def __len__(self) -> int:
        return self.views * len(self.images)

    @overload
    def __getitem__(self, place: int) -> Tensor: ...
    @overload
    def __getitem__(self, place: slice) -> list[Tensor]: ...
    def __getitem__(self, place: int | slice) -> Any:
        """A batch of inputs (batch, channels, height, width)."""
        if isinstance(place, slice):
            return [self[number] for number in range(*place.indices(len(self)))]
        place = range(len(self))[place]
        view, at = divmod(place, len(self.images))
        batch = self.images[at]
        if view == 0:
            return batch
        return batch.flip(-1) if view == 1 else self._parts(batch, place)

    def _parts(self, batch: Tensor, place: int) -> Tensor:
        draws = torch.Generator().manual_seed(self.seed * 1_000_003 + place)
        side = torch.empty(len(batch)).uniform_(SMALLEST, 1, generator=draws).sqrt()
        centre = torch.empty(len(batch), 2).uniform_(-1, 1, generator=draws) * (1 - side)[:, None]
        turn = torch.randint(2, (len(batch),), generator=draws) * 2.0 - 1
        where = torch.zeros(len(batch), 2, 3)
        where[:, 0, 0], where[:, 1, 1], where[:, :, 2] = side * turn, side, centre
        grid = F.affine_grid(where.to(batch.device), list(batch.shape), align_corners=False)
        return F.grid_sample(batch, grid.to(batch.dtype), padding_mode="border", align_corners=False)
