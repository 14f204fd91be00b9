"""From an artifact to a model: `load` to run it, `load_trainable` to train it further."""

import copy
import functools
import logging
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from bitdial import functional as bf
from bitdial.artifact import FLOAT, Artifact, float_state, layer_table_entry, norm_table_entry, read_artifact
from bitdial.errors import ArtifactError, ConfigError
from bitdial.integer import IntegerModel
from bitdial.kernels.integer import missing_on
from bitdial.models import build_model
from bitdial.nn import (
    ActivationQuantizer,
    PackedConv2d,
    PackedLayer,
    PackedLinear,
    QuantConv2d,
    QuantLinear,
    SwitchableBatchNorm,
    TransitionalBatchNorm,
    WeightQuantizer,
)
from bitdial.packing import unpack_bytes
from bitdial.plan import STORED_PLANS, dialled_layers, set_bits
from bitdial.prepare import swap_modules

log = logging.getLogger(__name__)

PACKED: dict[str, Any] = {"Conv2d": PackedConv2d, "Linear": PackedLinear}
TRAINABLE: dict[str, Any] = {"Conv2d": QuantConv2d, "Linear": QuantLinear}


def load(
    path: str | os.PathLike[str] | Artifact,
    model: nn.Module | None = None,
    *,
    device: str | torch.device = "cpu",
    integer: bool | None = None,
) -> nn.Module:
    """A live model on integer codes, in eval mode, at its highest width; `set_bits` switches it, also to stored plans.

    `model` is a float model of the architecture that was saved (it is not changed; its weights do not matter). It can
    be left out for the models that bitdial ships. `integer` runs it on integer kernels, with the outputs of
    `code_exact`; without, codes are multiplied out and float kernels run, as in training. None chooses integer kernels
    on a GPU that has them, if the activations of all layers are quantised.
    """
    artifact = path if isinstance(path, Artifact) else read_artifact(path)
    live = _assemble(artifact, model, _packed_layers)
    live = live.eval().requires_grad_(False).to(device)
    return IntegerModel(live) if _wants_integer(live, torch.device(device), integer) else live


def _wants_integer(live: nn.Module, device: torch.device, integer: bool | None) -> bool:
    missing = missing_on(device)
    if integer is False or (integer is None and device.type != "cuda"):
        return False
    if missing is not None and device.type == "cuda":
        runs = "float kernels run" if integer is None else "slow, exact sums run"
        _say_once(f"no integer kernels on {device}: {missing}; {runs} instead")
    if integer is not None:
        return integer
    layers = dialled_layers(live).values()
    return missing is None and all(isinstance(layer, PackedLayer) and layer.act_scale is not None for layer in layers)


@functools.cache
def _say_once(message: str) -> None:
    log.warning(message)


def load_trainable(path: str | os.PathLike[str] | Artifact, model: nn.Module | None = None) -> nn.Module:
    """A prepared model to train on from, as `prepare` gives: the master weights are the values of the stored codes."""
    artifact = path if isinstance(path, Artifact) else read_artifact(path)
    return _assemble(artifact, model, _trainable_layers)


def _assemble(
    artifact: Artifact, model: nn.Module | None, make_layers: Callable[..., dict[nn.Module, nn.Module]]
) -> nn.Module:
    if model is not None and any(t.is_meta for t in (*model.parameters(), *model.buffers())):
        raise ArtifactError("the model is on the meta device, without memory; build it on the CPU")
    model = _skeleton(artifact) if model is None else copy.deepcopy(model)
    layers, norms, floats = _fit(artifact, model)
    with torch.no_grad():
        for key, tensor in floats.items():
            tensor.copy_(artifact.tensors[f"{FLOAT}{key}"])
    new = make_layers(artifact, layers)
    for name, norm in norms.items():
        new[norm] = _norm(artifact, name, norm)
    swap_modules(model, new)
    setattr(model, STORED_PLANS, dict(artifact.plans))
    set_bits(model, artifact.bit_choices[0])
    return model


def _skeleton(artifact: Artifact) -> nn.Module:
    """The float model that the file names, if it is one of ours; tried without memory before it is built."""
    architecture, layers = artifact.manifest["architecture"], len(artifact.tensors)
    if architecture is None:
        raise ArtifactError("the file does not say how to build its model; pass one: load(path, model)")
    try:
        name, arguments = architecture["name"], architecture["arguments"]
        if set(architecture) != {"name", "arguments"} or any(arguments.get(k, 1) > layers for k in ("blocks", "depth")):
            raise ConfigError("it has unknown parts, or more layers than the file has tensors")
        with torch.random.fork_rng():  # its random weights are about to be replaced
            with torch.device("meta"):
                _fit(artifact, build_model(name, **arguments))
            return build_model(name, **arguments)
    except (ConfigError, KeyError, TypeError, ValueError, RuntimeError, AttributeError, OverflowError) as problem:
        raise ArtifactError(
            f"the file names the architecture {architecture!r}, which cannot be built: {problem}; "
            "pass a model: load(path, model)"
        ) from problem


def _fit(artifact: Artifact, model: nn.Module) -> tuple[dict[str, nn.Module], dict[str, nn.Module], dict[str, Tensor]]:
    """The layers, norms and float tensors of `model` that the file speaks of; ArtifactError where they differ."""
    layers = {name: _find(model, name, "layer") for name in artifact.layers}
    for name, layer in layers.items():
        entry = {k: v for k, v in artifact.layers[name].items() if k not in ("activations", "tied_to", "fed_by")}
        _compare(f"layer {name!r}", entry, layer_table_entry(name, layer))
    norms = {name: _find(model, name, "norm") for name in artifact.norms}
    if len({*layers.values(), *norms.values()}) < len(layers) + len(norms):
        raise ArtifactError("the model uses one module where the file has several; is it the one that was saved?")
    for name, norm in norms.items():
        entry = {k: v for k, v in artifact.norms[name].items() if k not in ("follows", "fed_by", "transitions")}
        if "SyncBatchNorm" in (entry["type"], type(norm).__name__):  # one trains on many devices what the other runs
            del entry["type"]
        if not isinstance(norm, nn.modules.batchnorm._BatchNorm):
            kind = type(norm).__name__
            raise ArtifactError(f"norm {name!r}: the model has a {kind} there, the file a batch norm")
        _compare(f"norm {name!r}", entry, norm_table_entry(norm))
    return layers, norms, _fit_floats(artifact, model, (*layers.values(), *norms.values()))


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
        if tensor.shape != stored[key].shape or tensor.dtype != stored[key].dtype:
            here, there = _form(stored[key]), _form(tensor)
            raise ArtifactError(f"the float tensor {key!r} is {here} in the file and {there} in the model")
        if isinstance(tensor, nn.Parameter) and not bool(torch.isfinite(stored[key]).all()):
            raise ArtifactError(f"the float tensor {key!r} holds infinity in the file")
    return own


def _form(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


def _norm(artifact: Artifact, name: str, norm: nn.Module) -> SwitchableBatchNorm:
    entry = artifact.norms[name]
    made = SwitchableBatchNorm(norm, bit_choices=artifact.bit_choices, follows=entry["follows"])
    if entry["fed_by"] is not None:
        made = TransitionalBatchNorm(made, fed_by=entry["fed_by"], transitions=entry.get("transitions", "full"))
    for part in norm.state_dict():
        for key, row in zip(made.holders(part), artifact.tensors[f"{name}/{part}"], strict=True):
            made.sets[key].state_dict()[part].copy_(row)
    return made


def _stored_codes(artifact: Artifact, owner: str) -> Tensor:
    """Codes of the highest width, int8, in the weight's shape."""
    codes = artifact.tensors[f"{owner}/codes"]
    shape, high = artifact.layers[owner]["shape"], artifact.bit_choices[0]
    if high == 8:
        return codes.clone()
    return unpack_bytes(codes, high, torch.Size(shape).numel()).reshape(shape)


def _copy(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.clone()


def _owner(artifact: Artifact, name: str) -> str:
    return artifact.layers[name].get("tied_to", name)


def _set_bias(artifact: Artifact, name: str, layer: nn.Module) -> None:
    if (bias := artifact.part(name, "bias")) is not None:
        layer.bias = nn.Parameter(bias.clone())


def _packed_layers(artifact: Artifact, layers: dict[str, nn.Module]) -> dict[nn.Module, nn.Module]:
    narrows = bf.scheme_of(artifact.scheme).narrows
    stored: dict[str, Tensor] = {}
    new: dict[nn.Module, nn.Module] = {}
    for name, layer in layers.items():
        owner = _owner(artifact, name)
        if owner not in stored:
            stored[owner] = _stored_codes(artifact, owner) if narrows else artifact.tensors[f"{owner}/weight"].clone()
        _set_bias(artifact, name, layer)
        new[layer] = PACKED[artifact.layers[name]["type"]].from_float(
            layer,
            name=name,
            stored=stored[owner],
            weight_scale=artifact.tensors[f"{owner}/weight_scale"].clone(),
            act_kind=artifact.layers[name]["activations"],
            act_scale=_copy(artifact.part(name, "act_scale")),
            act_zero_point=_copy(artifact.part(name, "act_zero_point")),
            bit_choices=artifact.bit_choices,
            scheme=artifact.scheme,
            ties=artifact.manifest["ties"],
        )
    return new


def _trainable_layers(artifact: Artifact, layers: dict[str, nn.Module]) -> dict[nn.Module, nn.Module]:
    widths, ties = artifact.bit_choices, artifact.manifest["ties"]
    masters: dict[str, tuple[nn.Parameter, WeightQuantizer]] = {}
    new: dict[nn.Module, nn.Module] = {}
    for name, layer in layers.items():
        owner = _owner(artifact, name)
        if owner not in masters:
            scale = artifact.tensors[f"{owner}/weight_scale"]
            scales = dict(zip(widths, scale, strict=False))
            quantizer = WeightQuantizer(
                scales, bit_choices=widths, scheme=artifact.scheme, ties=ties, channels=scale.shape[1]
            )
            masters[owner] = nn.Parameter(_master_weight(artifact, owner)), quantizer
        weight, quantizer = masters[owner]
        layer.weight = weight
        _set_bias(artifact, name, layer)
        act = _act_quantizer(artifact, name)
        trainable = TRAINABLE[artifact.layers[name]["type"]].from_float(layer, quantizer, act)
        trainable.fed_by = artifact.layers[name]["fed_by"]
        new[layer] = trainable
    return new


def _master_weight(artifact: Artifact, owner: str) -> Tensor:
    """A float weight whose codes are the stored ones."""
    if not bf.scheme_of(artifact.scheme).narrows:
        return artifact.tensors[f"{owner}/weight"].clone()
    codes, scale = _stored_codes(artifact, owner), artifact.tensors[f"{owner}/weight_scale"][0]
    if bf.scheme_of(artifact.scheme).first == "floor":  # the middle of each cell, safe from rounding
        values = (codes.to(scale.dtype) + 0.5) * bf.per_channel(scale, codes)
    else:
        values = bf.dequantize(codes, scale, scheme=artifact.scheme)
    if artifact.scheme != "adabits":
        return values
    # adabits quantises tanh(W) and takes its scale from the largest, which must come out as it was; where that is 1,
    # tanh of anything above 9 gives it.
    levels = 2 ** (artifact.bit_choices[0] - 1)
    return (values.double() * (levels / (levels - 0.5))).clamp(-1 + 1e-8, 1 - 1e-8).atanh().float()


def _act_quantizer(artifact: Artifact, name: str) -> ActivationQuantizer | None:
    scale, zero_point = artifact.part(name, "act_scale"), artifact.part(name, "act_zero_point")
    if scale is None:
        return None
    widths = artifact.bit_choices
    zeros = None if zero_point is None else {b: z.float() for b, z in zip(widths, zero_point.split(1), strict=True)}
    scales = dict(zip(widths, scale.split(1), strict=True))
    return ActivationQuantizer(scales, zeros, kind=artifact.layers[name]["activations"])
