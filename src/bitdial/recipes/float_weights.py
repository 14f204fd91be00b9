"""Float weights of a ready-made model in a .safetensors file, as tools/imagenet_weights.py writes it.

The metadata says which model they are for (`model`, `arguments` of build_model) and how images become its input
(`images`: mean, std and order of the channels).
"""

import hashlib
import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from bitdial.errors import ConfigError
from bitdial.models import build_model
from bitdial.recipes.image_batches import Pixels
from bitdial.train import distributed

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class FloatWeights:
    """What such a file holds; `digest` is the SHA-256 of its bytes."""

    path: Path
    name: str
    arguments: dict[str, Any]
    pixels: Pixels
    tensors: dict[str, Tensor]
    digest: str

    def build(self, classes: int, seed: int) -> tuple[nn.Module, bool]:
        """The model for `classes`, in eval mode, and whether its last layer is the file's too.

        Where the file has another number of classes, the last layer starts anew, by `seed`.
        """
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            model = build_model(self.name, **self.arguments | {"num_classes": classes})
        own = model.state_dict()
        if odd := sorted(own.keys() ^ self.tensors.keys()):
            raise ConfigError(f"{self.path} does not fit {self.name}: {odd[0]!r} is only in one of them")
        anew = [name for name, value in own.items() if value.shape != self.tensors[name].shape]
        for name in anew:
            if own[name].shape[0] != classes or own[name].shape[1:] != self.tensors[name].shape[1:]:
                shapes = f"{tuple(self.tensors[name].shape)} in place of {tuple(own[name].shape)}"
                raise ConfigError(f"{self.path} does not fit {self.name}: {name!r} is {shapes}")
        model.load_state_dict(own | {n: v for n, v in self.tensors.items() if n not in anew})
        if anew and distributed.is_first():
            log.warning(
                "%s is for %d classes and the folder has %d: %s start anew, by the seed",
                self.path,
                len(self.tensors[anew[0]]),
                classes,
                " and ".join(anew),
            )
        return model.eval(), not anew


def read_weights(path: Path) -> FloatWeights:
    """The weights at `path`; ConfigError names the file and what is wrong with it."""
    try:
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        if missing := {"model", "arguments", "images"} - metadata.keys():
            raise ConfigError(
                f"{path} does not say for which model it is, or how images become its input: the metadata lack "
                f"{', '.join(sorted(missing))}; tools/imagenet_weights.py writes such files"
            )
        arguments, images = json.loads(metadata["arguments"]), json.loads(metadata["images"])
    except (OSError, SafetensorError, ValueError) as problem:
        if isinstance(problem, ConfigError):
            raise
        raise ConfigError(f"{path} is not a .safetensors file of float weights: {problem}") from problem
    if not isinstance(arguments, dict):
        raise ConfigError(f"{path}: the arguments of the model are {arguments!r:.60}; a JSON object is expected")
    return FloatWeights(path, metadata["model"], arguments, Pixels.from_dict(images, path), tensors, digest)
