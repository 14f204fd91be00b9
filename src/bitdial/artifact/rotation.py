"""Rotations in a file: the field `rotation` of the manifest, by which loading rebuilds the rotated structure."""

from typing import Any

from bitdial.errors import ArtifactError
from bitdial.nn.rotation import BESIDE, HADAMARD, RESIDUAL

FIELDS: dict[str, type] = {"seed": int, "residual": object, "values": bool, "untied": list, "online": dict}


def check_rotation(entry: dict[str, Any]) -> None:
    """Raise ArtifactError unless `entry` describes rotations; whether they fit a model is for loading to see."""
    if set(entry) != {*FIELDS}:
        raise ArtifactError(f"rotation: it is no JSON object of {', '.join(FIELDS)}")
    for field, kind in FIELDS.items():
        if kind is not object and type(entry[field]) is not kind:
            raise ArtifactError(f"rotation: {field} is {entry[field]!r}, which is not of the right type")
    if not 0 <= entry["seed"] < 1 << 63:
        raise ArtifactError(f"rotation: seed={entry['seed']} is out of range")
    if entry["residual"] not in RESIDUAL:
        raise ArtifactError(f"rotation: residual is {entry['residual']!r}, expected 'merged', 'online' or null")
    untied, online = entry["untied"], entry["online"]
    if not all(isinstance(name, str) and name for name in untied) or len({*untied}) < len(untied):
        raise ArtifactError(f"rotation: untied={untied!r} is no list of names, each once")
    for name, each in online.items():
        if not name or not isinstance(each, dict) or set(each) != {"form", "size"}:
            raise ArtifactError(f"rotation of {name!r}: it is no JSON object of form, size")
        if not isinstance(each["form"], str) or each["form"] not in BESIDE:
            raise ArtifactError(f"rotation of {name!r}: form {each['form']!r} is not one of {', '.join(BESIDE)}")
        size = each["size"]
        if type(size) is not int or not 0 < size < 1 << 31:
            raise ArtifactError(f"rotation of {name!r}: size={size!r} is no size")
        if each["form"] == HADAMARD and (size < 2 or size & (size - 1)):
            raise ArtifactError(f"rotation of {name!r}: size={size} is no power of two from 2 on")
