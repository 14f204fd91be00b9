"""Check the entries of a file's table of norms, and the tensors that they call for."""

import math
from typing import Any

import torch

from bitdial.artifact.tensors import ExpectedTensors, Fields, are_sizes, check_fields, check_variances
from bitdial.errors import ArtifactError
from bitdial.nn import NORM_STATE

_NORM: Fields = {
    "type": str,
    "num_features": int,
    "eps": float,
    "momentum": (float, type(None)),
    "affine": bool,
    "track_running_stats": bool,
    "follows": str,
    "fed_by": (str, type(None)),
}


def check_norm(tensors: ExpectedTensors, name: str, entry: Any) -> None:
    """Check the entry of the norm called `name`; ArtifactError says what is wrong."""
    label = f"norm {name!r}"
    optional = {"transitions": str, "state": list}
    given = {key: kind for key, kind in optional.items() if isinstance(entry, dict) and key in entry}
    check_fields(label, entry, {**_NORM, **given})
    shared = "transitions" in given
    if entry["follows"] not in tensors.artifact.layers:
        raise ArtifactError(f"{label}: it follows {entry['follows']!r}, which is not a quantised layer")
    if not are_sizes((entry["num_features"],)) or not 0 <= entry["eps"] < math.inf:
        raise ArtifactError(f"{label}: num_features and eps must be positive")
    if shared and (entry["transitions"] != "statistics" or entry["fed_by"] is None):
        raise ArtifactError(
            f"{label}: transitions={entry['transitions']!r} with fed_by={entry['fed_by']!r}; expected 'statistics' "
            "and a layer, or no such field"
        )
    sets = affine_sets = len(tensors.artifact.bit_choices)
    if entry["fed_by"] is not None:
        if entry["fed_by"] not in tensors.artifact.layers:
            raise ArtifactError(f"{label}: it goes by {entry['fed_by']!r}, which is not a quantised layer")
        sets **= 2
        affine_sets = affine_sets if shared else sets
    _norm_state(tensors, name, entry, sets, affine_sets)


def _norm_state(tensors: ExpectedTensors, name: str, entry: dict[str, Any], sets: int, affine_sets: int) -> None:
    """The tensors of a norm: those that its settings call for, or those that it names."""
    usual = [
        *(NORM_STATE[:2] if entry["affine"] else ()),
        *(NORM_STATE[2:] if entry["track_running_stats"] else ()),
    ]
    for part in entry.get("state", usual):
        if not isinstance(part, str):
            raise ArtifactError(f"norm {name!r}: {part!r} in its state is no name")
        if part in ("weight", "bias"):
            tensors.take(f"{name}/{part}", torch.float32, (affine_sets, entry["num_features"]))
        elif part in ("running_mean", "running_var"):
            tensor = tensors.take(f"{name}/{part}", torch.float32, (sets, entry["num_features"]))
            if part == "running_var":
                check_variances(f"{name}/{part}", tensor)
        elif part == "num_batches_tracked":
            tensors.take(f"{name}/{part}", torch.int64, (sets,))
        else:
            _own_state(tensors, name, part, (sets, affine_sets))


def _own_state(tensors: ExpectedTensors, name: str, part: str, rows: tuple[int, ...]) -> None:
    """A tensor that a norm of the user's own has; loading compares its shape with the model's."""
    tensor = tensors.artifact.part(name, part)
    if tensor is None or tensor.dim() == 0 or len(tensor) not in rows:
        raise ArtifactError(f"norm {name!r}: its tensor {part!r} is missing or does not hold its sets")
    tensors.take(f"{name}/{part}", torch.float32 if tensor.is_floating_point() else tensor.dtype, tensor.shape)
