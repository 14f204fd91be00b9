"""Whether a model is the architecture that a file is of."""

from typing import Any

import torch
from torch import Tensor, nn

from bitdial.artifact.format import FLOAT, Artifact, float_state, layer_table_entry, norm_table_entry
from bitdial.artifact.sites import sites_there
from bitdial.errors import ArtifactError, ConfigError
from bitdial.nn import BATCH_NORMS, SwitchableBatchNorm
from bitdial.nn.decompose import decompose_again
from bitdial.nn.rotation import rotate_again

# What the table says of a layer that the float layer does not know.
NOT_OF_THE_LAYER = ("activations", "tied_to", "fed_by", "fixed_bits", "group_size")


def fit(artifact: Artifact, model: nn.Module) -> tuple[dict[str, nn.Module], dict[str, nn.Module], dict[str, Tensor]]:
    """The layers, norms and float tensors of `model` that the file speaks of; ArtifactError where they differ.

    `model` is a float model, or the prepared one that was saved. Those modules of a float model that were taken apart
    before training are taken apart in place, and it gets the rotations of a rotated one.
    """
    try:
        rotate_again(model, artifact.manifest.get("rotation"))
        decompose_again(model, artifact.manifest.get("decomposed", {}))
    except ConfigError as problem:
        raise ArtifactError(f"{problem}; is it the architecture that was saved?") from problem
    layers = {name: _find(model, name, "layer") for name in artifact.layers}
    for name, layer in layers.items():
        entry = {k: v for k, v in artifact.layers[name].items() if k not in NOT_OF_THE_LAYER}
        _compare(f"layer {name!r}", entry, layer_table_entry(name, layer))
    norms = {name: _find(model, name, "norm") for name in artifact.norms}
    if len({*layers.values(), *norms.values()}) < len(layers) + len(norms):
        raise ArtifactError("the model uses one module where the file has several; is it the one that was saved?")
    for name, norm in norms.items():
        entry = {k: v for k, v in artifact.norms[name].items() if k not in ("follows", "fed_by", "transitions")}
        norm = norm.active if isinstance(norm, SwitchableBatchNorm) else norm
        if not isinstance(norm, nn.modules.batchnorm._NormBase):
            kind = type(norm).__name__
            raise ArtifactError(f"norm {name!r}: the model has a {kind} there, the file a {entry['type']}")
        found = norm_table_entry(norm)
        plain = {kind.__name__ for kind in BATCH_NORMS}
        if "SyncBatchNorm" in (entry["type"], found["type"]) and {entry["type"], found["type"]} <= plain:
            del entry["type"]  # one trains on many devices what the other runs
        _compare(f"norm {name!r}", {"state": None, **entry}, found)
    return (
        layers,
        norms,
        _fit_floats(artifact, model, (*layers.values(), *norms.values(), *sites_there(artifact, model))),
    )


def _find(model: nn.Module, name: str, what: str) -> nn.Module:
    try:
        return model.get_submodule(name)
    except AttributeError as problem:
        raise ArtifactError(
            f"{what} {name!r} of the file is not in the model; is it the architecture that was saved?"
        ) from problem


def _compare(label: str, stored: dict[str, Any], found: dict[str, Any]) -> None:
    for key in stored:
        if key != "momentum" and stored[key] != found.get(key):
            raise ArtifactError(f"{label}: {key} is {stored[key]!r} in the file and {found.get(key)!r} in the model")


def _fit_floats(artifact: Artifact, model: nn.Module, swapped: tuple[nn.Module, ...]) -> dict[str, Tensor]:
    own, aliases = float_state(model, swapped)
    stored = {name[len(FLOAT) :]: t for name, t in artifact.tensors.items() if name.startswith(FLOAT)}
    for key in sorted(own.keys() ^ stored.keys()):
        where = "the file" if key in stored else "the model"
        raise ArtifactError(f"only {where} has the float tensor {key!r}; is it the architecture that was saved?")
    if aliases != artifact.manifest["aliases"]:
        raise ArtifactError("the model shares other tensors than the file does; is it the architecture that was saved?")
    for key, tensor in own.items():
        both_float = tensor.is_floating_point() and stored[key].is_floating_point()  # it will have the file's dtype
        if tensor.shape != stored[key].shape or (tensor.dtype != stored[key].dtype and not both_float):
            here, there = _form(stored[key]), _form(tensor)
            raise ArtifactError(f"the float tensor {key!r} is {here} in the file and {there} in the model")
        if isinstance(tensor, nn.Parameter) and not bool(torch.isfinite(stored[key]).all()):
            raise ArtifactError(f"the float tensor {key!r} holds infinity in the file")
    return own


def _form(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
