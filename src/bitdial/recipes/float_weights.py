"""Float weights that a training starts from: a model for the classes of the data, and how its inputs are made."""

import hashlib
import logging
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from bitdial.errors import ConfigError
from bitdial.images import ImageSettings, settings_of_weights
from bitdial.models import build_model
from bitdial.models.weights import WeightsFile, fill, read_weights
from bitdial.train import distributed

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class FloatWeights:
    """A file whose metadata name its model and say how images become inputs; `digest` is the SHA-256 of its bytes."""

    name: str
    file: WeightsFile
    images: ImageSettings
    digest: str

    def build(self, classes: int, seed: int) -> tuple[nn.Module, bool]:
        """The model for `classes`, in eval mode, and whether its last layer is the file's too.

        Where the file has another number of classes, the last layer starts anew, by `seed`.
        """
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            model = build_model(self.name, **self.file.metadata.arguments | {"num_classes": classes})
        given = self.file.tensors
        shapes = {name: (value.shape, given[name].shape) for name, value in model.state_dict().items() if name in given}
        anew = [
            name
            for name, (own, other) in shapes.items()
            if own != other and own[:1] == (classes,) and own[1:] == other[1:]
        ]
        fill(model, self.file, self.name, keep=anew)
        if anew and distributed.is_first():
            log.warning(
                "%s is for %d classes and the folder has %d: %s start anew, by the seed",
                self.file.metadata.path,
                len(given[anew[0]]),
                classes,
                " and ".join(anew),
            )
        return model.eval(), not anew


def read_float_weights(path: Path) -> FloatWeights:
    """The weights at `path`; ConfigError names the file and what is wrong with it, or what its metadata leave open."""
    file = read_weights(path)
    images = settings_of_weights(file.metadata)
    if file.metadata.model is None or images is None:
        missing = [key for key, found in (("model", file.metadata.model), ("images", images)) if found is None]
        raise ConfigError(
            f"{path} does not say for which model it is, or how images become its input: the metadata lack "
            f"{' and '.join(missing)}; tools/imagenet_weights.py writes such files"
        )
    return FloatWeights(file.metadata.model, file, images, hashlib.sha256(path.read_bytes()).hexdigest())
