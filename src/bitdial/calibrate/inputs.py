"""The batches of a calibration: inputs alone, finite, and something to see in them."""

from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from bitdial.errors import ConfigError, QuantizationError
from bitdial.prepare.model_call import INPUTS_ALONE, Batch, sample_count

FEW = 32  # samples, below which a warning is due


def checked(batches: Tensor | dict[str, object] | Iterable[Batch]) -> tuple[list[Batch], list[str]]:
    """`batches` as a list, and warnings; an error if there is none, or if they are no inputs."""
    found: list[Any] = [batches] if isinstance(batches, Tensor | dict) else list(batches)
    if not found:
        raise ConfigError("there is no batch to calibrate on; give some hundred samples, such as [x1, x2, ...]")
    samples = 0
    for number, batch in enumerate(found, start=1):
        if not isinstance(batch, Tensor | list | tuple | dict):
            raise ConfigError(f"batch {number} is a {type(batch).__name__}; give a tensor, a tuple or a dict of inputs")
        tensors = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]
        if not tensors or any(tensor.numel() == 0 for tensor in tensors):
            raise ConfigError(f"batch {number} has no samples; leave it out")
        if isinstance(batch, Tensor) and isinstance(found[0], Tensor) and batch.dtype != found[0].dtype:
            kinds = f"batch {number} is {batch.dtype}, batch 1 {found[0].dtype}"
            raise ConfigError(f"{kinds}: are they of one kind? {INPUTS_ALONE}")
        if isinstance(batch, Tensor) and not bool(torch.isfinite(batch).all()):
            raise QuantizationError(f"batch {number} holds NaN or infinity; check the inputs")
        samples += sample_count(batch) or 1
    return cast(list[Batch], found), _warnings(found, samples)


def _warnings(batches: list[Any], samples: int) -> list[str]:
    warnings = []
    if samples < FEW:
        warnings.append(
            f"there are {samples} samples to calibrate on; statistics of fewer than {FEW} say little. Some hundred are "
            "usual"
        )
    floats = [leaf for leaf in tree_leaves(batches) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    if floats and all(bool((leaf == leaf.flatten()[0]).all()) for leaf in floats):
        warnings.append("all inputs have one value, so nothing can be learned from them; check how they are read")
    return warnings


def moved(batches: list[Batch], device: torch.device) -> list[Batch]:
    """`batches` on the model's device."""
    return tree_map_only(Tensor, lambda tensor: tensor.to(device), batches)
