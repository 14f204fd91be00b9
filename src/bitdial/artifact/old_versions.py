"""Manifests that an earlier bitdial wrote."""

from typing import Any

from bitdial.artifact.format import VERSION
from bitdial.errors import ArtifactError
from bitdial.functional import DYNAMIC

OLD_SCHEMES = {"nested": "centred"}  # what version 1 called them
OLD_KINDS = ("Conv2d", "Linear")  # those that version 1 had


def renew(manifest: dict[str, Any]) -> None:
    """Bring a manifest of version 1 to the present one, in place. It had other names, two kinds of layer, no groups."""
    manifest["version"], manifest["scheme"] = VERSION, OLD_SCHEMES.get(manifest["scheme"], manifest["scheme"])
    for name, entry in manifest["layers"].items():
        if not isinstance(entry, dict):
            continue  # refused later
        newer = {"group_size", "fixed_bits"} & set(entry) or entry.get("activations") == DYNAMIC
        if newer or entry.get("type") not in OLD_KINDS:
            raise ArtifactError(
                f"layer {name!r}: version 1 has {' and '.join(OLD_KINDS)}, and no 'group_size', 'fixed_bits' or "
                "dynamic activations"
            )
        entry["group_size"] = None
