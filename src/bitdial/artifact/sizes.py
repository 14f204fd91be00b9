"""Bytes: of the file's parts, and of the separate files that it replaces."""

import math
from typing import Any

from bitdial.artifact.format import FLOAT, Artifact
from bitdial.nn import TRANSITIONS, UNKNOWN
from bitdial.prepare.sizes import SITE_BYTES


def sizes(artifact: Artifact) -> dict[str, Any]:
    """Bytes of the tensors by what they are, of the file, and of `separate` files that would each hold one width.

    A separate file counts that width's packed codes (of layers with a width of their own, those of that), its scales,
    its norm set and the float layers.
    `norms_by_transitions` is what the norms take, or would take, without transitions and with each kind of them.
    """
    parts = {"codes": 0, "scales": 0, "norms": 0, "float": 0}
    one_set = 0
    for name, tensor in artifact.tensors.items():
        kind = _kind(artifact, name)
        parts[kind] += tensor.nbytes
        one_set += tensor.nbytes // len(tensor) if kind == "norms" else 0
    separate = {}
    for bits in artifact.bit_choices:
        one = parts["float"] + one_set + SITE_BYTES * len(artifact.sites)
        for name, entry in artifact.layers.items():
            if "tied_to" not in entry:
                one += math.ceil(math.prod(entry["shape"]) * entry.get("fixed_bits", bits) / 8)
                one += 4 * artifact.tensors[f"{name}/weight_scale"][0].numel()  # that of one width
                multipliers = artifact.group_scale(name)
                one += 0 if multipliers is None else multipliers.numel()
            one += artifact.tensors[f"{name}/bias"].nbytes if entry["bias"] else 0
            one += {"float": 0, "asymmetric": 5}.get(entry["activations"], 4)
        separate[bits] = one
    return {
        **parts,
        "tensors": sum(parts.values()),
        "file": artifact.file_bytes,
        "separate": separate,
        "norms_by_transitions": _norms_by_transitions(artifact),
    }


def _norms_by_transitions(artifact: Artifact) -> dict[str, int]:
    """A norm has pairs if a quantised layer feeds the one that it follows, as `add_transitions` does it."""
    widths = len(artifact.bit_choices)
    found = dict.fromkeys(("none", *TRANSITIONS), 0)
    one_set = {name: {"affine": 0, "statistics": 0} for name in artifact.norms}
    for key, tensor in artifact.tensors.items():
        owner, _, part = key.rpartition("/")
        if owner in one_set and _kind(artifact, key) == "norms":
            one_set[owner]["affine" if part in ("weight", "bias") else "statistics"] += tensor.nbytes // len(tensor)
    for name, entry in artifact.norms.items():
        affine, statistics = one_set[name].values()
        unpaired = artifact.layers[entry["follows"]]["fed_by"] in (None, UNKNOWN)
        pairs = widths if unpaired else widths**2
        found["none"] += widths * (affine + statistics)
        found["statistics"] += widths * affine + pairs * statistics
        found["full"] += pairs * (affine + statistics)
    return found


def _kind(artifact: Artifact, name: str) -> str:
    """Which share a tensor counts to; a quantised layer's bias counts with its scales."""
    if name.startswith(FLOAT):
        return "float"
    owner, _, part = name.rpartition("/")
    if owner in artifact.norms:
        return "norms"
    return "codes" if part in ("codes", "weight") else "scales"
