"""The tensors of a file, each checked against what the manifest says of it, and the fields of manifest entries."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from bitdial import functional as bf
from bitdial.artifact.format import LARGEST_CODE, Artifact
from bitdial.errors import ArtifactError

Fields = dict[str, type | tuple[type, ...]]  # of an entry, with their types


class ExpectedTensors:
    """The tensors of `artifact` that its manifest calls for; `names` are those met so far."""

    def __init__(self, artifact: Artifact):
        self.artifact = artifact
        self.names: set[str] = set()

    def take(self, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        """The tensor called `name`; ArtifactError unless it is of this type and shape, and finite."""
        tensor = self.artifact.tensors.get(name)
        if tensor is None:
            raise ArtifactError(f"the tensor {name!r} is missing")
        if tensor.dtype != dtype or tuple(tensor.shape) != shape:
            raise ArtifactError(
                f"the tensor {name!r} is {tensor.dtype} of shape {tuple(tensor.shape)}, "
                f"expected {dtype} of shape {shape}"
            )
        if dtype.is_floating_point and not bool(torch.isfinite(tensor).all()):
            raise ArtifactError(f"the tensor {name!r} holds NaN or infinity")
        self.names.add(name)
        return tensor

    def take_scale(self, name: str, shape: tuple[int, ...]) -> None:
        """Check a tensor of scales: positive, and no value beyond float32 at any code."""
        check_scale(name, self.take(name, torch.float32, shape))


def check_rows(name: str, values: Tensor, widths: Sequence[int]) -> None:
    """Check what is in the rows for `widths` of the tensor called `name`, of a layer, site or norm."""
    if values.is_floating_point() and not bool(torch.isfinite(values).all()):
        raise ArtifactError(f"the tensor {name!r} holds NaN or infinity")
    part = name.rpartition("/")[2]
    if part == "act_scale":
        check_scale(name, values)
    elif part == "act_clip_ratio":
        check_clip_ratios(name, values)
    elif part == "act_zero_point":
        check_zero_points(name, values, widths)
    elif part == "running_var":
        check_variances(name, values)


def check_scale(name: str, scale: Tensor) -> None:
    """Raise ArtifactError unless scales are positive, and no value is beyond float32 at any code."""
    if not bool((scale > 0).all()):
        raise ArtifactError(f"the scale {name!r} is not positive")
    if not bool((scale * LARGEST_CODE).isfinite().all()):
        raise ArtifactError(f"the scale {name!r} is so large that values overflow")


def check_clip_ratios(name: str, ratios: Tensor) -> None:
    """Raise ArtifactError unless all clip ratios are in their range."""
    least, most = bf.LEAST_CLIP_RATIO, bf.MOST_CLIP_RATIO
    if not bool(((ratios >= least) & (ratios <= most)).all()):
        raise ArtifactError(f"{name!r} has ratios that are not from {least} to {most:g}")


def check_zero_points(name: str, zero_points: Tensor, widths: Sequence[int]) -> None:
    """Raise ArtifactError unless each zero-point is a code of its width."""
    for bits, value in zip(widths, zero_points.tolist(), strict=True):
        if value >= 1 << bits:
            raise ArtifactError(f"layer {name.rpartition('/')[0]!r}: zero-point {value} does not fit {bits} bits")


def check_variances(name: str, values: Tensor) -> None:
    """Raise ArtifactError if a variance of a norm is negative."""
    if bool((values < 0).any()):
        raise ArtifactError(f"norm {name.rpartition('/')[0]!r}: a variance is negative")


def check_fields(label: str, entry: Any, fields: Fields) -> None:
    """Raise unless `entry` is a dict with exactly `fields`, each of its type (a bool is not an int)."""
    if not isinstance(entry, dict):
        raise ArtifactError(f"{label} is not a JSON object")
    if odd := sorted(set(entry) ^ set(fields)):
        raise ArtifactError(f"{label}: {odd[0]!r} is {'missing' if odd[0] in fields else 'unknown'}")
    for key, kind in fields.items():
        value = entry[key]
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise ArtifactError(f"{label}: {key} is {value!r}, which is not of the right type")


def are_sizes(shape: tuple[Any, ...]) -> bool:
    """Whether all of `shape` can be sizes of a tensor."""
    return all(type(size) is int and 0 < size < 1 << 31 for size in shape)
