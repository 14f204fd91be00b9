"""Tensors that a file has in 16 bits and the model in float32: the field `widened` of the manifest.

They are the float tensors and biases that were in bfloat16 or float16 before `prepare` and have such values still. So
they are stored without loss; what training has changed is stored in float32.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from bitdial.artifact.format import FLOAT, Artifact
from bitdial.errors import ArtifactError
from bitdial.nn.own_dtypes import SHORT, remember, shortest, shortest_of


def shorten(model: nn.Module, layers: Mapping[str, nn.Module], tensors: dict[str, Tensor]) -> list[str]:
    """Put what of `tensors` can be stored in 16 bits without loss there in that type; the names of these."""
    changed = []
    for name, tensor in tensors.items():
        owner, _, part = name.rpartition("/")
        if name.startswith(FLOAT):
            short = shortest_of(model, name.removeprefix(FLOAT), tensor)
        elif part == "bias" and owner in layers:
            short = shortest(layers[owner], part, tensor)
        else:
            continue
        if short is not tensor:
            tensors[name] = short
            changed.append(name)
    return changed


def remember_widened(artifact: Artifact, model: nn.Module) -> None:
    """Let the modules of the float `model` remember, in place, which of their tensors the file has in 16 bits."""
    for name in artifact.manifest.get("widened", []):
        key = name.removeprefix(FLOAT) if name.startswith(FLOAT) else name.removesuffix("/bias") + ".bias"
        place, _, part = key.rpartition(".")
        remember(model.get_submodule(place), part, artifact.tensors[name].dtype)


def check_widened(artifact: Artifact) -> None:
    """Raise ArtifactError unless the field is a list of float tensors and biases that are in 16 bits."""
    names: list[Any] = artifact.manifest.get("widened", [])
    biases = {f"{layer}/bias" for layer, entry in artifact.layers.items() if isinstance(entry, dict)}
    for name in names:
        if not isinstance(name, str) or not (name.startswith(FLOAT) or name in biases):
            raise ArtifactError(f"widened: {name!r} is neither a float tensor nor a bias of a layer")
        found = artifact.tensors.get(name)
        if found is None or found.dtype not in SHORT:
            raise ArtifactError(f"widened: the tensor {name!r} is missing or not in 16 bits")
    if len({*names}) < len(names):
        raise ArtifactError("widened: a tensor is named twice")
