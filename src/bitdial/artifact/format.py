"""What an artifact is made of; docs/artifact-format.md is its specification."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn

from bitdial import functional as bf
from bitdial.dial.plan import BitPlan, resolve_bits
from bitdial.errors import ArtifactError, PlanError
from bitdial.files.parts import FilePart
from bitdial.functional.bitstream import unpack_bytes
from bitdial.nn import KINDS, QuantLayer, kind_of, usual_state
from bitdial.prepare.report import ModelReport
from bitdial.sensitivity.result import Sensitivity

VERSION = 2
OLD_SCHEMES = {"nested": "centred"}  # what version 1 called them
OLD_KINDS = ("Conv2d", "Linear")  # those that version 1 had
LARGEST_CODE = 256  # no code, narrowed or not, times its step exceeds this many highest-width scales
EXTRA_STATE = "_extra_state"  # what PyTorch calls a module's own objects in its state
FLOAT = ".float/"  # prefix of the float layers' tensors; no module name begins with a dot


@dataclass
class Artifact:
    """A checked artifact in memory: its manifest, its tensors, its digest and the size of its file.

    `parts` are those of a progressive file, and `widest` the width of the last one that was read, None if the file is
    whole. In codes, what only wider widths need is then zero.
    """

    manifest: dict[str, Any]
    tensors: dict[str, Tensor]
    digest: str
    file_bytes: int
    plans: dict[str, BitPlan] = field(default_factory=dict)
    sensitivity: Sensitivity | None = None
    report: ModelReport | None = None
    parts: tuple[FilePart, ...] = ()
    widest: int | None = None

    @property
    def scheme(self) -> str:
        """The weight scheme."""
        return self.manifest["scheme"]

    @property
    def bit_choices(self) -> tuple[int, ...]:
        """The widths of the file, descending."""
        return tuple(self.manifest["bit_choices"])

    @property
    def available(self) -> tuple[int, ...]:
        """The widths it runs at, descending: all of the file's, unless parts are missing."""
        return tuple(bits for bits in self.bit_choices if self.widest is None or bits <= self.widest)

    @property
    def layers(self) -> dict[str, dict[str, Any]]:
        """The table of quantised layers."""
        return self.manifest["layers"]

    @property
    def norms(self) -> dict[str, dict[str, Any]]:
        """The table of switchable batch norms."""
        return self.manifest["norms"]

    @property
    def sites(self) -> dict[str, dict[str, Any]]:
        """The table of quantizers that belong to no layer: those of attention products."""
        return self.manifest.get("sites", {})

    @property
    def fixed_bits(self) -> dict[str, int]:
        """The layers with a width of their own, and those widths."""
        return {name: entry["fixed_bits"] for name, entry in self.layers.items() if "fixed_bits" in entry}

    def available_plans(self) -> dict[str, BitPlan]:
        """The stored plans that give layers only widths which are there."""
        if self.widest is None:
            return dict(self.plans)
        choices = {name: self.widths_of(name, self.available) for name in self.layers}
        return {name: plan for name, plan in self.plans.items() if _fits(plan, choices, self.fixed_bits)}

    def widths_of(self, layer: str, offered: tuple[int, ...]) -> tuple[int, ...]:
        """The widths of a layer in a model that offers `offered`: these, and its own if it has one."""
        return tuple(sorted({*offered, self.layers[layer].get("fixed_bits", offered[0])}, reverse=True))

    @property
    def metrics(self) -> dict[str, Any]:
        """Whatever figures were stored with the model."""
        return self.manifest["metrics"]

    def part(self, owner: str, name: str) -> Tensor | None:
        """The tensor `name` of a layer or norm, None if it has no such."""
        return self.tensors.get(f"{owner}/{name}")

    def wide(self, name: str) -> Tensor:
        """The tensor of that full name; in float32 if the file has it in 16 bits and the model does not."""
        tensor = self.tensors[name]
        return tensor.float() if name in self.manifest.get("widened", ()) else tensor

    def owner(self, layer: str) -> str:
        """The layer whose weight `layer` uses: itself, or the one that it is tied to."""
        return self.layers[layer].get("tied_to", layer)

    def weight_scale(self, owner: str, bits: int | None = None) -> Tensor:
        """The scale of the stored codes: (1,), (rows,) or (rows, groups); of schemes that cannot narrow, at `bits`."""
        stored = self.tensors[f"{owner}/weight_scale"]
        if not bf.scheme_of(self.scheme).narrows:
            assert bits is not None
            return stored[self.bit_choices.index(bits)]
        multipliers = self.group_scale(owner)
        return stored[0] if multipliers is None else bf.join_scale(stored[0], multipliers)

    def row_scale(self, owner: str) -> Tensor:
        """The scale (rows,) or (1,) that the multipliers of `group_scale` multiply, or the only one without groups."""
        assert bf.scheme_of(self.scheme).narrows
        return self.tensors[f"{owner}/weight_scale"][0]

    def group_scale(self, owner: str) -> Tensor | None:
        """The multipliers (rows, groups), uint8, from 1 to 15; None without groups, or if their scales are floats."""
        return self.part(owner, "group_scale")

    def act_scale(self, name: str) -> Tensor | None:
        """The activation scales (widths,) of a layer or site, or its clip ratios if it is dynamic; None: in float."""
        scale = self.part(name, "act_scale")
        return self.part(name, "act_clip_ratio") if scale is None else scale

    def codes(self, owner: str) -> Tensor:
        """Codes of the highest width, int8, in the weight's shape; only for schemes that narrow."""
        assert bf.scheme_of(self.scheme).narrows
        stored, shape, high = self.tensors[f"{owner}/codes"], self.layers[owner]["shape"], self.bit_choices[0]
        return stored if high == 8 else unpack_bytes(stored, high, torch.Size(shape).numel()).reshape(shape)


def _fits(plan: BitPlan, choices: dict[str, tuple[int, ...]], fixed: dict[str, int]) -> bool:
    try:
        resolve_bits(choices, plan, fixed)
    except PlanError:
        return False
    return True


def layer_table_entry(name: str, layer: nn.Module) -> dict[str, Any]:
    """What the layer table says of the form of a layer; loading compares it with the model."""
    kind = layer.kind if isinstance(layer, QuantLayer) else kind_of(layer)
    if kind is None:
        raise ArtifactError(f"layer {name!r} is a {type(layer).__name__}; an artifact holds {', '.join(KINDS)}")
    shape = kind.to_rows(layer, cast(Tensor, layer.weight).detach()).shape
    settings = {key: getattr(layer, key) for key in kind.settings}
    plain = {key: list(v) if isinstance(v, tuple) else v for key, v in settings.items()}
    return {"type": kind.name, "shape": list(shape), **plain, "bias": getattr(layer, "bias", None) is not None}


def norm_table_entry(norm: nn.Module) -> dict[str, Any]:
    """What the norm table says of a norm; loading compares it with the model.

    `state` are the names of its tensors, if they are not those that PyTorch's norms have with these settings.
    """
    norm = cast(nn.modules.batchnorm._NormBase, norm)
    state = norm.state_dict()
    unusual = {"state": sorted(state)} if set(state) != usual_state(norm) else {}
    return {
        "type": type(norm).__name__,
        "num_features": norm.num_features,
        "eps": float(norm.eps),
        "momentum": None if norm.momentum is None else float(norm.momentum),
        "affine": norm.affine,
        "track_running_stats": norm.track_running_stats,
        **unusual,
    }


def check_named(plans: Mapping[str, object] | None, metrics: Mapping[str, object] | None) -> None:
    """Raise ArtifactError unless what is to be stored by names comes with them."""
    for what, given in (("plans", plans), ("metrics", metrics)):
        if given is not None and not isinstance(given, Mapping):
            raise ArtifactError(f"{what} is a {type(given).__name__}; give a dict: {what}={{name: ...}}")
    if odd := [name for name in plans or {} if not isinstance(name, str)]:
        raise ArtifactError(f"a plan is called {odd[0]!r}; its name must be text")


def check_sensitivity(sensitivity: Sensitivity, layers: Mapping[str, dict[str, Any]]) -> None:
    """Raise ArtifactError unless the layer table has the layers of `sensitivity`, with as many weights."""
    for name, entry in sensitivity.layers.items():
        if name not in layers:
            raise ArtifactError(f"the sensitivity names layer {name!r}, which is not a quantised layer of the model")
        if entry.parameters != (weights := math.prod(layers[name]["shape"])):
            raise ArtifactError(
                f"the sensitivity of layer {name!r} is that of {entry.parameters} weights, but it has {weights}; "
                "is it that of another model?"
            )


def float_state(model: nn.Module, swapped: tuple[nn.Module, ...]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The state of `model` outside the `swapped` modules: each tensor once, and the other names of shared ones."""
    mine = set(swapped)
    prefixes = tuple(f"{name}." for name, m in model.named_modules(remove_duplicate=False) if m in mine)
    floats: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    first_name: dict[int, str] = {}
    for key, value in model.state_dict(keep_vars=True).items():
        if key.startswith(prefixes):
            continue
        if not isinstance(value, Tensor):
            raise ArtifactError(f"the model's state {key!r} is not a tensor; bitdial does not write objects")
        if key.rpartition(".")[2] == EXTRA_STATE:
            raise ArtifactError(f"the model's state {key!r} is no parameter or buffer; make it a buffer to keep it")
        if first_name.setdefault(id(value), key) != key:
            aliases[key] = first_name[id(value)]
        else:
            floats[key] = value
    return floats, aliases
