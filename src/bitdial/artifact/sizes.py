"""Bytes: of the file's parts, and of the separate files that it replaces."""

import math
from typing import Any

from bitdial.artifact.format import FLOAT, Artifact


def sizes(artifact: Artifact) -> dict[str, Any]:
    """Bytes of the tensors by what they are, of the file, and of `separate` files that would each hold one width.

    A separate file counts that width's packed codes, its scales, its norm set and the float layers.
    """
    parts = {"codes": 0, "scales": 0, "norms": 0, "float": 0}
    one_set = 0
    for name, tensor in artifact.tensors.items():
        kind = _kind(artifact, name)
        parts[kind] += tensor.nbytes
        one_set += tensor.nbytes // len(tensor) if kind == "norms" else 0
    separate = {}
    for bits in artifact.bit_choices:
        one = parts["float"] + one_set
        for name, entry in artifact.layers.items():
            if "tied_to" not in entry:
                one += math.ceil(math.prod(entry["shape"]) * bits / 8)
                one += 4 * artifact.tensors[f"{name}/weight_scale"].shape[1]
            one += 4 * entry["shape"][0] if entry["bias"] else 0
            one += {"float": 0, "asymmetric": 5}.get(entry["activations"], 4)
        separate[bits] = one
    return {**parts, "tensors": sum(parts.values()), "file": artifact.file_bytes, "separate": separate}


def _kind(artifact: Artifact, name: str) -> str:
    """Which share a tensor counts to; a quantised layer's bias counts with its scales."""
    if name.startswith(FLOAT):
        return "float"
    owner, _, part = name.rpartition("/")
    if owner in artifact.norms:
        return "norms"
    return "codes" if part in ("codes", "weight") else "scales"
