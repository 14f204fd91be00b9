"""Random changes of an image and its instance map alike: a part of it, its scale, mirrored, turned."""

import math
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from bitdial.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class InstanceAugment:
    """What may happen to an image; every draw comes from the generator that is given.

    crop      the sides of what comes out are at most so many pixels; a part is cut out at random where there is more
    scale     the factor of the size is between these, evenly on a logarithmic axis
    flip      mirrored left to right every other time
    turn      turned by 0, 90, 180 or 270 degrees; for what has no upper side, such as cells
    smallest  objects that a cut leaves fewer pixels are no targets
    """

    crop: int = 512
    scale: tuple[float, float] = (0.8, 1.25)
    flip: bool = True
    turn: bool = False
    smallest: int = 4

    def __post_init__(self) -> None:
        if self.crop < 1 or self.smallest < 1:
            raise ConfigError(f"crop={self.crop} and smallest={self.smallest} must be at least 1 pixel")
        low, high = self.scale
        if not 0 < low <= high < math.inf:
            raise ConfigError(f"scale={self.scale} must be two factors above 0, the smaller one first")

    def __call__(self, pixels: Tensor, instances: Tensor, draws: np.random.Generator) -> tuple[Tensor, Tensor]:
        """`pixels` uint8 (3, height, width) to float32 from 0 to 1, and `instances` (height, width) with it."""
        low, high = (math.log(end) for end in self.scale)
        factor = math.exp(draws.uniform(low, high))
        rows = self._cut(pixels.shape[1], factor, draws)
        columns = self._cut(pixels.shape[2], factor, draws)
        image, chosen = pixels[:, rows, columns].float() / 255, instances[rows, columns]
        size = [max(1, min(self.crop, round(factor * side))) for side in chosen.shape]
        if size != list(chosen.shape):
            image = F.interpolate(image[None], size=size, mode="bilinear", antialias=True)[0].clamp_(0, 1)
            chosen = F.interpolate(chosen[None, None].float(), size=size, mode="nearest-exact")[0, 0]
        if self.flip and draws.random() < 0.5:
            image, chosen = image.flip(-1), chosen.flip(-1)
        if self.turn:
            quarter = int(draws.integers(4))
            image, chosen = torch.rot90(image, quarter, (1, 2)), torch.rot90(chosen, quarter, (0, 1))
        return image.contiguous(), chosen.long().contiguous()

    def _cut(self, side: int, factor: float, draws: np.random.Generator) -> slice:
        """The part of a side that the crop has room for once it is scaled."""
        kept = max(1, min(side, math.floor(self.crop / factor)))
        first = int(draws.integers(side - kept + 1))
        return slice(first, first + kept)
