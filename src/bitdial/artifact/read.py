"""Read an artifact, and check everything that must hold of it before a model sees it. Hostile files are expected."""

import math
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bitdial import functional as bf
from bitdial.artifact.fixed import check_fixed_bits
from bitdial.artifact.format import (
    FLOAT,
    LARGEST_CODE,
    VERSION,
    Artifact,
    check_sensitivity,
)
from bitdial.artifact.graph import check_graph_entry
from bitdial.artifact.old_versions import renew
from bitdial.artifact.rotation import check_rotation
from bitdial.artifact.sites import check_sites
from bitdial.config import check_bit_choices
from bitdial.dial.plan import BitPlan
from bitdial.errors import ArtifactError, BitdialError, ConfigError, PlanError
from bitdial.files.container import read_container
from bitdial.functional.bitstream import unpack_bytes
from bitdial.nn import KINDS, NORM_STATE, UNKNOWN, LayerKind
from bitdial.nn.decompose import DECOMPOSITIONS
from bitdial.nn.layer_kinds import LINEAR
from bitdial.prepare.report import ModelReport
from bitdial.sensitivity.result import Sensitivity

_MANIFEST: dict[str, type | tuple[type, ...]] = {
    "kind": str,
    "version": int,
    "written_by": str,
    "scheme": str,
    "ties": str,
    "bit_choices": list,
    "layers": dict,
    "norms": dict,
    "aliases": dict,
    "architecture": (dict, type(None)),
    "plans": dict,
    "metrics": dict,
    "sensitivity": (dict, type(None)),
}
_LAYER: dict[str, type | tuple[type, ...]] = {
    "type": str,
    "shape": list,
    "bias": bool,
    "activations": str,
    "fed_by": (str, type(None)),
    "group_size": (int, type(None)),
}
_OPTIONAL: dict[str, type] = {"tied_to": str, "fixed_bits": int}  # in a layer's entry
_SETTINGS: dict[str, type | tuple[type, ...]] = {  # of any kind, by the names in its record
    "stride": list,
    "padding": (list, str),
    "dilation": list,
    "groups": int,
    "padding_mode": str,
    "output_padding": list,
    "padding_idx": (int, type(None)),
}
_NORM: dict[str, type | tuple[type, ...]] = {
    "type": str,
    "num_features": int,
    "eps": float,
    "momentum": (float, type(None)),
    "affine": bool,
    "track_running_stats": bool,
    "follows": str,
    "fed_by": (str, type(None)),
}


def read_artifact(path: str | os.PathLike[str]) -> Artifact:
    """Read and check the artifact at `path`; ArtifactError names the file and what is wrong with it."""
    path = Path(path)
    tensors, manifest, digest = read_container(path, error=ArtifactError, shared=True)
    artifact = Artifact(manifest, tensors, digest, path.stat().st_size)
    try:
        _Checker(artifact).check()
    except BitdialError as problem:
        raise ArtifactError(f"{path}: {problem}") from problem
    return artifact


class _Checker:
    """One pass over an artifact; fills in what its manifest holds. `expected` collects the tensors met so far."""

    def __init__(self, artifact: Artifact):
        self.artifact = artifact
        self.expected: set[str] = set()

    def check(self) -> None:
        manifest = self.artifact.manifest
        if manifest.get("kind") != "artifact":
            raise ArtifactError("it is not an artifact (a checkpoint?); save(model, path) writes artifacts")
        if type(version := manifest.get("version")) is not int or version not in (1, VERSION):
            raise ArtifactError(
                f"its format version is {version!r}, this bitdial reads 1 and {VERSION}; "
                "use the release of bitdial that wrote it, or a newer one"
            )
        known = ("decomposed", "graph", "report", "rotation", "sites") if version == VERSION else ()
        optional: dict[str, type] = {key: dict for key in known if key in manifest}
        _fields("the manifest", manifest, {**_MANIFEST, **optional})
        if version == 1:
            renew(manifest)
        try:
            high = check_bit_choices(manifest["bit_choices"])[0]
            self.scheme = bf.scheme_of(manifest["scheme"])
            bf.check_phase(manifest["scheme"], high)
        except ConfigError as problem:
            raise ArtifactError(str(problem)) from problem
        if manifest["ties"] not in bf.TIE_RULES:
            raise ArtifactError(f"its tie rule {manifest['ties']!r} is not known")
        if not manifest["layers"]:
            raise ArtifactError("it has no quantised layer")
        for name, how in manifest.get("decomposed", {}).items():
            if not isinstance(how, str) or how not in DECOMPOSITIONS:
                raise ArtifactError(f"module {name!r}: {how!r} is not one of {', '.join(DECOMPOSITIONS)}")
        if "rotation" in optional:
            check_rotation(manifest["rotation"])
        for name, entry in manifest["layers"].items():
            self._layer(name, entry)
        check_fixed_bits(self.artifact)
        for name, entry in manifest["norms"].items():
            self._norm(name, entry)
        check_sites(self.artifact)
        for name in self.artifact.sites:
            self._scale(f"{name}/act_scale", (len(self.artifact.bit_choices),))
        self._floats()
        self._plans()
        if manifest["sensitivity"] is not None:
            self._sensitivity()
        if "graph" in optional:
            check_graph_entry(manifest["graph"])
        if "report" in optional:
            self._report()

    def _tensor(self, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        tensor = self.artifact.tensors.get(name)
        if tensor is None:
            raise ArtifactError(f"the tensor {name!r} is missing")
        if tensor.dtype != dtype or tuple(tensor.shape) != shape:
            raise ArtifactError(
                f"the tensor {name!r} is {tensor.dtype} of shape {tuple(tensor.shape)}, "
                f"expected {dtype} of shape {shape}"
            )
        if dtype == torch.float32 and not bool(torch.isfinite(tensor).all()):
            raise ArtifactError(f"the tensor {name!r} holds NaN or infinity")
        self.expected.add(name)
        return tensor

    def _scale(self, name: str, shape: tuple[int, ...]) -> None:
        scale = self._tensor(name, torch.float32, shape)
        if not bool((scale > 0).all()):
            raise ArtifactError(f"the scale {name!r} is not positive")
        if not bool((scale * LARGEST_CODE).isfinite().all()):
            raise ArtifactError(f"the scale {name!r} is so large that values overflow")

    def _layer(self, name: str, entry: Any) -> None:
        label = f"layer {name!r}"
        called = entry.get("type") if isinstance(entry, dict) else None
        if not isinstance(called, str) or called not in KINDS:
            raise ArtifactError(f"{label}: type {called!r} is not one of {', '.join(KINDS)}")
        kind = KINDS[called]
        optional = {key: form for key, form in _OPTIONAL.items() if key in entry}
        _fields(label, entry, {**_LAYER, **{key: _SETTINGS[key] for key in kind.settings}, **optional})
        shape = tuple(entry["shape"])
        if len(shape) != kind.weight_dims or not _sizes(shape):
            raise ArtifactError(f"{label}: {list(shape)} is not the shape of a {kind.name} weight")
        if entry["bias"] and not kind.has_bias:
            raise ArtifactError(f"{label}: a {kind.name} has no bias")
        if entry["activations"] != "float" and not kind.multiplies:
            raise ArtifactError(f"{label}: the input of a {kind.name} is not quantised")
        for key in kind.settings:
            if isinstance(entry[key], list) and not all(type(v) is int and 0 <= v < 1 << 31 for v in entry[key]):
                raise ArtifactError(f"{label}: {key}={entry[key]!r} is not a list of whole numbers")
        if entry["fed_by"] not in (None, UNKNOWN) and entry["fed_by"] not in {*self.artifact.layers} - {name}:
            raise ArtifactError(f"{label}: it is fed by {entry['fed_by']!r}, which is not another quantised layer")
        self._groups(name, entry)
        if "tied_to" in entry:
            owner = self.artifact.layers.get(entry["tied_to"])
            same = ("shape", "group_size")
            if not isinstance(owner, dict) or "tied_to" in owner or any(owner.get(k) != entry[k] for k in same):
                raise ArtifactError(f"{label}: it is tied to {entry['tied_to']!r}, which does not store such a weight")
        else:
            self._weight(name, shape, entry["group_size"])
        if entry["bias"]:
            self._tensor(f"{name}/bias", torch.float32, shape[:1])
        self._activations(name, entry["activations"], kind)

    def _groups(self, name: str, entry: dict[str, Any]) -> None:
        """Whether the layer can have groups of that size; of a tied layer, whether it can use those of the owner."""
        size, inputs = entry["group_size"], entry["shape"][1]
        if size is None:
            return
        if not self.scheme.narrows:
            raise ArtifactError(f"layer {name!r}: groups of inputs do not go with {self.artifact.scheme!r}")
        if not 0 < size < inputs or inputs % size:
            raise ArtifactError(
                f"layer {name!r}: its {inputs} inputs cannot be groups of {size}; expected a smaller number that "
                "divides them, or null"
            )
        whole = self.artifact.group_scale(self.artifact.owner(name)) is not None
        if not whole and entry["activations"] != "float":
            raise ArtifactError(
                f"layer {name!r}: its activations are quantised, so its groups need whole multipliers, but there is "
                f"no {self.artifact.owner(name) + '/group_scale'!r}"
            )

    def _weight(self, name: str, shape: tuple[int, ...], group_size: int | None) -> None:
        widths = self.artifact.bit_choices
        count, high = math.prod(shape), widths[0]
        if not self.scheme.narrows:
            self._tensor(f"{name}/weight", torch.float32, shape)
        elif high == 8:
            self._phase(name, self._tensor(f"{name}/codes", torch.int8, shape))
        else:
            packed = self._tensor(f"{name}/codes", torch.uint8, (-(-count * high // 8),))
            try:
                self._phase(name, unpack_bytes(packed, high, count))
            except BitdialError as problem:
                raise ArtifactError(f"layer {name!r}: {problem}") from problem
        if group_size is not None:
            self._group_scales(name, (shape[0], shape[1] // group_size))
            return
        scale = self.artifact.part(name, "weight_scale")
        channels = scale.shape[-1] if scale is not None and scale.dim() == 2 else 1
        if channels not in (1, shape[0]):
            raise ArtifactError(f"layer {name!r}: {channels} weight scales for {shape[0]} output channels")
        self._scale(f"{name}/weight_scale", (1 if self.scheme.narrows else len(widths), channels))

    def _phase(self, name: str, codes: Tensor) -> None:
        """A phase leaves the lowest codes out: their values lie below all weight integers."""
        high = self.artifact.bit_choices[0]
        least, _ = self.scheme.stored_range(high)
        if least != bf.code_range(high)[0] and codes.numel() and int(codes.min()) < least:
            raise ArtifactError(f"layer {name!r}: code {int(codes.min())} is below {least}, the least of this scheme")

    def _group_scales(self, name: str, shape: tuple[int, int]) -> None:
        """The scales of a layer with groups, (rows, groups): a row's times whole multipliers, or floats."""
        if self.artifact.group_scale(name) is None:
            self._scale(f"{name}/weight_scale", (1, *shape))
            return
        multipliers = self._tensor(f"{name}/group_scale", torch.uint8, shape)
        if not bool(((multipliers >= 1) & (multipliers <= bf.MOST_MULTIPLIER)).all()):
            raise ArtifactError(
                f"{name + '/group_scale'!r} has multipliers that are not from 1 to {bf.MOST_MULTIPLIER}"
            )
        self._scale(f"{name}/weight_scale", (1, shape[0]))
        if not bool((self.artifact.weight_scale(name) * LARGEST_CODE).isfinite().all()):
            raise ArtifactError(f"the scale {name + '/weight_scale'!r} is so large that values overflow")

    def _activations(self, name: str, kind: str, layer_kind: LayerKind) -> None:
        if kind == "float":
            return
        if kind not in bf.ACTIVATION_KINDS:
            raise ArtifactError(f"layer {name!r}: activations {kind!r} are not known")
        widths = self.artifact.bit_choices
        if kind == bf.DYNAMIC:
            if layer_kind != LINEAR:
                raise ArtifactError(f"layer {name!r}: the input of a {layer_kind.name} has no tokens to be dynamic by")
            ratios = self._tensor(f"{name}/act_clip_ratio", torch.float32, (len(widths),))
            least, most = bf.LEAST_CLIP_RATIO, bf.MOST_CLIP_RATIO
            if not bool(((ratios >= least) & (ratios <= most)).all()):
                raise ArtifactError(f"{name + '/act_clip_ratio'!r} has ratios that are not from {least} to {most:g}")
            return
        self._scale(f"{name}/act_scale", (len(widths),))
        if kind == "asymmetric":
            zero_points = self._tensor(f"{name}/act_zero_point", torch.uint8, (len(widths),))
            for bits, value in zip(widths, zero_points.tolist(), strict=True):
                if value >= 1 << bits:
                    raise ArtifactError(f"layer {name!r}: zero-point {value} does not fit {bits} bits")

    def _norm(self, name: str, entry: Any) -> None:
        label = f"norm {name!r}"
        optional = {"transitions": str, "state": list}
        given = {key: kind for key, kind in optional.items() if isinstance(entry, dict) and key in entry}
        _fields(label, entry, {**_NORM, **given})
        shared = "transitions" in given
        if entry["follows"] not in self.artifact.layers:
            raise ArtifactError(f"{label}: it follows {entry['follows']!r}, which is not a quantised layer")
        if not _sizes((entry["num_features"],)) or not 0 <= entry["eps"] < math.inf:
            raise ArtifactError(f"{label}: num_features and eps must be positive")
        if shared and (entry["transitions"] != "statistics" or entry["fed_by"] is None):
            raise ArtifactError(
                f"{label}: transitions={entry['transitions']!r} with fed_by={entry['fed_by']!r}; expected 'statistics' "
                "and a layer, or no such field"
            )
        sets = affine_sets = len(self.artifact.bit_choices)
        if entry["fed_by"] is not None:
            if entry["fed_by"] not in self.artifact.layers:
                raise ArtifactError(f"{label}: it goes by {entry['fed_by']!r}, which is not a quantised layer")
            sets **= 2
            affine_sets = affine_sets if shared else sets
        self._norm_state(name, entry, sets, affine_sets)

    def _norm_state(self, name: str, entry: dict[str, Any], sets: int, affine_sets: int) -> None:
        """The tensors of a norm: those that its settings call for, or those that it names."""
        usual = [
            *(NORM_STATE[:2] if entry["affine"] else ()),
            *(NORM_STATE[2:] if entry["track_running_stats"] else ()),
        ]
        for part in entry.get("state", usual):
            if not isinstance(part, str):
                raise ArtifactError(f"norm {name!r}: {part!r} in its state is no name")
            if part in ("weight", "bias"):
                self._tensor(f"{name}/{part}", torch.float32, (affine_sets, entry["num_features"]))
            elif part in ("running_mean", "running_var"):
                tensor = self._tensor(f"{name}/{part}", torch.float32, (sets, entry["num_features"]))
                if part == "running_var" and bool((tensor < 0).any()):
                    raise ArtifactError(f"norm {name!r}: a variance is negative")
            elif part == "num_batches_tracked":
                self._tensor(f"{name}/{part}", torch.int64, (sets,))
            else:
                self._own_state(name, part, (sets, affine_sets))

    def _own_state(self, name: str, part: str, rows: tuple[int, ...]) -> None:
        """A tensor that a norm of the user's own has; loading compares its shape with the model's."""
        tensor = self.artifact.part(name, part)
        if tensor is None or tensor.dim() == 0 or len(tensor) not in rows:
            raise ArtifactError(f"norm {name!r}: its tensor {part!r} is missing or does not hold its sets")
        self._tensor(f"{name}/{part}", torch.float32 if tensor.is_floating_point() else tensor.dtype, tensor.shape)

    def _floats(self) -> None:
        tensors = self.artifact.tensors
        self.expected |= {name for name in tensors if name.startswith(FLOAT)}
        for name in tensors:
            if name.startswith(FLOAT) and tensors[name].is_floating_point() and bool(tensors[name].isnan().any()):
                raise ArtifactError(f"the tensor {name!r} holds NaN")
        if extra := sorted(set(tensors) - self.expected):
            raise ArtifactError(f"the tensor {extra[0]!r} belongs to nothing in the manifest")
        for key, target in self.artifact.manifest["aliases"].items():
            if f"{FLOAT}{target}" not in tensors or f"{FLOAT}{key}" in tensors:
                raise ArtifactError(f"the alias {key!r} of {target!r} leads nowhere")

    def _plans(self) -> None:
        layers, choices = self.artifact.layers, self.artifact.bit_choices
        for name, values in self.artifact.manifest["plans"].items():
            try:
                plan = BitPlan.from_dict(values)
            except PlanError as problem:
                raise ArtifactError(f"plan {name!r}: {problem}") from problem
            pairs = [plan[layer] for layer in plan] + ([plan.default] if plan.default else [])
            if any(layer not in layers for layer in plan) or any(b not in choices for pair in pairs for b in pair):
                raise ArtifactError(f"plan {name!r} names a layer or a width that the file does not have")
            if plan.default is None and len(plan) != len(layers):
                raise ArtifactError(f"plan {name!r} does not cover every layer")
            self.artifact.plans[name] = plan

    def _sensitivity(self) -> None:
        try:
            found = Sensitivity.from_dict(self.artifact.manifest["sensitivity"])
        except ConfigError as problem:
            raise ArtifactError(f"sensitivity: {problem}") from problem
        check_sensitivity(found, self.artifact.layers)
        self.artifact.sensitivity = found

    def _report(self) -> None:
        try:
            self.artifact.report = ModelReport.from_dict(self.artifact.manifest["report"])
        except ConfigError as problem:
            raise ArtifactError(str(problem)) from problem


def _fields(label: str, entry: Any, fields: dict[str, type | tuple[type, ...]]) -> None:
    """Raise unless `entry` is a dict with exactly `fields`, each of its type (a bool is not an int)."""
    if not isinstance(entry, dict):
        raise ArtifactError(f"{label} is not a JSON object")
    if odd := sorted(set(entry) ^ set(fields)):
        raise ArtifactError(f"{label}: {odd[0]!r} is {'missing' if odd[0] in fields else 'unknown'}")
    for key, kind in fields.items():
        value = entry[key]
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise ArtifactError(f"{label}: {key} is {value!r}, which is not of the right type")


def _sizes(shape: tuple[Any, ...]) -> bool:
    return all(type(size) is int and 0 < size < 1 << 31 for size in shape)
