"""Check the entries of a file's table of layers, and the tensors that they call for."""

import math
from typing import Any

import torch
from torch import Tensor

from bitdial import functional as bf
from bitdial.artifact.format import LARGEST_CODE, Artifact
from bitdial.artifact.tensors import (
    ExpectedTensors,
    Fields,
    are_sizes,
    check_clip_ratios,
    check_fields,
    check_zero_points,
)
from bitdial.errors import ArtifactError, BitdialError
from bitdial.functional.bitstream import unpack_bytes
from bitdial.nn import KINDS, UNKNOWN, LayerKind
from bitdial.nn.layer_kinds import LINEAR

_LAYER: Fields = {
    "type": str,
    "shape": list,
    "bias": bool,
    "activations": str,
    "fed_by": (str, type(None)),
    "group_size": (int, type(None)),
}
_OPTIONAL: dict[str, type] = {"tied_to": str, "fixed_bits": int}  # in a layer's entry
_SETTINGS: Fields = {  # of any kind, by the names in its record
    "stride": list,
    "padding": (list, str),
    "dilation": list,
    "groups": int,
    "padding_mode": str,
    "output_padding": list,
    "padding_idx": (int, type(None)),
}


def check_layer(tensors: ExpectedTensors, name: str, entry: Any) -> None:
    """Check the entry of the layer called `name`; ArtifactError says what is wrong."""
    label = f"layer {name!r}"
    called = entry.get("type") if isinstance(entry, dict) else None
    if not isinstance(called, str) or called not in KINDS:
        raise ArtifactError(f"{label}: type {called!r} is not one of {', '.join(KINDS)}")
    kind = KINDS[called]
    optional = {key: form for key, form in _OPTIONAL.items() if key in entry}
    check_fields(label, entry, {**_LAYER, **{key: _SETTINGS[key] for key in kind.settings}, **optional})
    shape = tuple(entry["shape"])
    if len(shape) != kind.weight_dims or not are_sizes(shape):
        raise ArtifactError(f"{label}: {list(shape)} is not the shape of a {kind.name} weight")
    if entry["bias"] and not kind.has_bias:
        raise ArtifactError(f"{label}: a {kind.name} has no bias")
    if entry["activations"] != "float" and not kind.multiplies:
        raise ArtifactError(f"{label}: the input of a {kind.name} is not quantised")
    for key in kind.settings:
        if isinstance(entry[key], list) and not all(type(v) is int and 0 <= v < 1 << 31 for v in entry[key]):
            raise ArtifactError(f"{label}: {key}={entry[key]!r} is not a list of whole numbers")
    if entry["fed_by"] not in (None, UNKNOWN) and entry["fed_by"] not in {*tensors.artifact.layers} - {name}:
        raise ArtifactError(f"{label}: it is fed by {entry['fed_by']!r}, which is not another quantised layer")
    _groups(tensors, name, entry)
    if "tied_to" in entry:
        owner = tensors.artifact.layers.get(entry["tied_to"])
        same = ("shape", "group_size")
        if not isinstance(owner, dict) or "tied_to" in owner or any(owner.get(k) != entry[k] for k in same):
            raise ArtifactError(f"{label}: it is tied to {entry['tied_to']!r}, which does not store such a weight")
    else:
        _weight(tensors, name, shape, entry["group_size"])
    if entry["bias"]:
        bias = f"{name}/bias"
        widened = bias in tensors.artifact.manifest.get("widened", ())
        tensors.take(bias, tensors.artifact.tensors[bias].dtype if widened else torch.float32, shape[:1])
    _activations(tensors, name, entry["activations"], kind)


def _groups(tensors: ExpectedTensors, name: str, entry: dict[str, Any]) -> None:
    """Whether the layer can have groups of that size; of a tied layer, whether it can use those of the owner."""
    size, inputs = entry["group_size"], entry["shape"][1]
    if size is None:
        return
    if not bf.scheme_of(tensors.artifact.scheme).narrows:
        raise ArtifactError(f"layer {name!r}: groups of inputs do not go with {tensors.artifact.scheme!r}")
    if not 0 < size < inputs or inputs % size:
        raise ArtifactError(
            f"layer {name!r}: its {inputs} inputs cannot be groups of {size}; expected a smaller number that "
            "divides them, or null"
        )
    whole = tensors.artifact.group_scale(tensors.artifact.owner(name)) is not None
    if not whole and entry["activations"] != "float":
        raise ArtifactError(
            f"layer {name!r}: its activations are quantised, so its groups need whole multipliers, but there is "
            f"no {tensors.artifact.owner(name) + '/group_scale'!r}"
        )


def _weight(tensors: ExpectedTensors, name: str, shape: tuple[int, ...], group_size: int | None) -> None:
    widths, narrows = tensors.artifact.bit_choices, bf.scheme_of(tensors.artifact.scheme).narrows
    count, high = math.prod(shape), widths[0]
    if not narrows:
        tensors.take(f"{name}/weight", torch.float32, shape)
    elif high == 8:
        check_phase_of(tensors.artifact, name, tensors.take(f"{name}/codes", torch.int8, shape))
    else:
        packed = tensors.take(f"{name}/codes", torch.uint8, (-(-count * high // 8),))
        try:
            check_phase_of(tensors.artifact, name, unpack_bytes(packed, high, count))
        except BitdialError as problem:
            raise ArtifactError(f"layer {name!r}: {problem}") from problem
    if group_size is not None:
        _group_scales(tensors, name, (shape[0], shape[1] // group_size))
        return
    scale = tensors.artifact.part(name, "weight_scale")
    channels = scale.shape[-1] if scale is not None and scale.dim() == 2 else 1
    if channels not in (1, shape[0]):
        raise ArtifactError(f"layer {name!r}: {channels} weight scales for {shape[0]} output channels")
    tensors.take_scale(f"{name}/weight_scale", (1 if narrows else len(widths), channels))


def check_phase_of(artifact: Artifact, name: str, codes: Tensor) -> None:
    """A phase leaves the lowest codes out: their values lie below all weight integers."""
    high = artifact.bit_choices[0]
    least, _ = bf.scheme_of(artifact.scheme).stored_range(high)
    unknown = max(0, high - artifact.widths_of(name, artifact.available)[0])  # planes that were not read
    least = least >> unknown << unknown
    if least != bf.code_range(high)[0] and codes.numel() and int(codes.min()) < least:
        raise ArtifactError(f"layer {name!r}: code {int(codes.min())} is below {least}, the least of this scheme")


def _group_scales(tensors: ExpectedTensors, name: str, shape: tuple[int, int]) -> None:
    """The scales of a layer with groups, (rows, groups): a row's times whole multipliers, or floats."""
    if tensors.artifact.group_scale(name) is None:
        tensors.take_scale(f"{name}/weight_scale", (1, *shape))
        return
    multipliers = tensors.take(f"{name}/group_scale", torch.uint8, shape)
    if not bool(((multipliers >= 1) & (multipliers <= bf.MOST_MULTIPLIER)).all()):
        raise ArtifactError(f"{name + '/group_scale'!r} has multipliers that are not from 1 to {bf.MOST_MULTIPLIER}")
    tensors.take_scale(f"{name}/weight_scale", (1, shape[0]))
    if not bool((tensors.artifact.weight_scale(name) * LARGEST_CODE).isfinite().all()):
        raise ArtifactError(f"the scale {name + '/weight_scale'!r} is so large that values overflow")


def _activations(tensors: ExpectedTensors, name: str, kind: str, layer_kind: LayerKind) -> None:
    if kind == "float":
        return
    if kind not in bf.ACTIVATION_KINDS:
        raise ArtifactError(f"layer {name!r}: activations {kind!r} are not known")
    widths = tensors.artifact.bit_choices
    if kind == bf.DYNAMIC:
        if layer_kind != LINEAR:
            raise ArtifactError(f"layer {name!r}: the input of a {layer_kind.name} has no tokens to be dynamic by")
        ratios = f"{name}/act_clip_ratio"
        check_clip_ratios(ratios, tensors.take(ratios, torch.float32, (len(widths),)))
        return
    tensors.take_scale(f"{name}/act_scale", (len(widths),))
    if kind == "asymmetric":
        zero_points = f"{name}/act_zero_point"
        check_zero_points(zero_points, tensors.take(zero_points, torch.uint8, (len(widths),)), widths)
