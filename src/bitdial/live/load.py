"""From an artifact to a model: `load` to run it, `load_trainable` to train it further."""

import copy
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from bitdial import functional as bf
from bitdial.artifact import FLOAT, Artifact, float_state, layer_table_entry, norm_table_entry, read_artifact
from bitdial.dial.dial import STORED_PLANS, set_bits
from bitdial.errors import ArtifactError, ConfigError
from bitdial.live.engines.integer import IntegerModel
from bitdial.live.engines.packed import ArenaLinear, WordsLinear, packed_linears
from bitdial.live.kernel_choice import check_offer, choose_kernels, unserved
from bitdial.live.layers import PackedConv2d, PackedLayer, PackedLinear
from bitdial.models import build_model
from bitdial.nn import (
    ActivationQuantizer,
    QuantConv2d,
    QuantLinear,
    SwitchableBatchNorm,
    TransitionalBatchNorm,
    WeightQuantizer,
)
from bitdial.nn.swap import swap_modules

PACKED: dict[str, Any] = {"Conv2d": PackedConv2d, "Linear": PackedLinear}
TRAINABLE: dict[str, Any] = {"Conv2d": QuantConv2d, "Linear": QuantLinear}


@torch.inference_mode(False)  # what is made within inference mode could not be switched outside
def load(
    path: str | os.PathLike[str] | Artifact,
    model: nn.Module | None = None,
    *,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | None = None,
    kernels: str | None = None,
    bit_choices: Sequence[int] | None = None,
    master: str = "device",
) -> nn.Module:
    """A live model on integer codes, in eval mode, at its highest width; `set_bits` switches it, also to stored plans.

    `model` is a float model of the architecture that was saved (it is not changed; its weights do not matter). It can
    be left out for the models that bitdial ships.

    dtype        what a weight-only model runs in: torch.bfloat16 or torch.float16; None is the file's float32
    kernels      'float': codes are multiplied out and torch's kernels run, as in training. 'integer': integer kernels,
                 with the outputs of `code_exact`. 'packed': weight-only Linear layers read b bits a weight, others run
                 as with 'float'. None chooses on a GPU: integer if the activations of all layers are quantised, packed
                 for a weight-only model in 16 bits; else float.
    bit_choices  for packed kernels: which of the file's widths to offer. Memory is for the widest of them
    master       for packed kernels of a scheme that rounds anew at each width (double_rounding): 'host' keeps the
                 stored codes in host memory, so that the GPU holds only the words in use
    """
    artifact = path if isinstance(path, Artifact) else read_artifact(path)
    skeleton = _skeleton(artifact) if model is None else _copy_of(model)
    return load_into(
        skeleton, artifact, device=device, dtype=dtype, kernels=kernels, bit_choices=bit_choices, master=master
    )


@torch.inference_mode(False)
def load_into(
    model: nn.Module,
    artifact: Artifact,
    *,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | None = None,
    kernels: str | None = None,
    bit_choices: Sequence[int] | None = None,
    master: str = "device",
) -> nn.Module:
    """`load`, but `model` itself becomes the live model, where a copy of it would take too much memory."""
    device = _usable(device)
    kernels = choose_kernels(artifact, device, dtype, kernels)
    offered = check_offer(artifact, kernels, bit_choices, master)

    def make_layers(artifact: Artifact, layers: dict[str, nn.Module]) -> dict[nn.Module, nn.Module]:
        served = {n: m for n, m in layers.items() if kernels == "packed" and unserved(artifact, n) is None}
        for name, layer in served.items():
            _set_bias(artifact, name, layer)
        words = packed_linears(artifact, served, bit_choices=offered, device=device, master=master) if served else {}
        return words | _packed_layers(artifact, {n: m for n, m in layers.items() if n not in served})

    live = _assemble(artifact, model, make_layers, bits=offered[0]).eval().requires_grad_(False)
    for board in {layer.board for layer in live.modules() if isinstance(layer, ArenaLinear)}:  # there is one or none
        board.attach(live)
    if dtype is not None:
        _convert(live, dtype)
    live = live.to(device)
    return IntegerModel(live) if kernels == "integer" else live


def _usable(device: str | torch.device) -> torch.device:
    """`device`, if this machine has it."""
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError) as problem:
        raise ConfigError(f"device={device!r} is not a device; give 'cpu' or 'cuda'") from problem
    if found.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device {found}: PyTorch finds no GPU here; leave it out to run on the CPU")
    if found.type == "cuda" and (found.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"device {found}: PyTorch finds {torch.cuda.device_count()} GPUs here, counted from 0")
    return found


def _copy_of(model: nn.Module) -> nn.Module:
    if not isinstance(model, nn.Module):
        what = f"the class {model.__name__}; make one: " if isinstance(model, type) else f"{type(model).__name__}; "
        raise ConfigError(
            f"the model must be a float nn.Module of the architecture that was saved, got {what}load(path, Net())"
        )
    if any(t.is_meta for t in (*model.parameters(), *model.buffers())):
        raise ArtifactError("the model is on the meta device, without memory; build it on the CPU")
    return copy.deepcopy(model)


def _convert(live: nn.Module, dtype: torch.dtype) -> None:
    """Convert in place what a weight-only model computes with: parameters and multiplied-out weights.

    Scales stay in float32, and so do other buffers: tables such as rotary frequencies lose their meaning in 16 bits.
    """
    for name, parameter in live.named_parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)
            if not bool(parameter.isfinite().all()):
                raise ConfigError(f"the parameter {name!r} has values beyond {dtype}; choose torch.bfloat16")
    for layer in live.modules():
        if isinstance(layer, PackedLayer | WordsLinear):
            layer.active = layer.active.to(dtype)


@torch.inference_mode(False)
def load_trainable(path: str | os.PathLike[str] | Artifact, model: nn.Module | None = None) -> nn.Module:
    """A prepared model to train on from, as `prepare` gives: the master weights are the values of the stored codes."""
    artifact = path if isinstance(path, Artifact) else read_artifact(path)
    skeleton = _skeleton(artifact) if model is None else _copy_of(model)
    return _assemble(artifact, skeleton, _trainable_layers, bits=artifact.bit_choices[0])


def _assemble(
    artifact: Artifact, model: nn.Module, make_layers: Callable[..., dict[nn.Module, nn.Module]], *, bits: int
) -> nn.Module:
    """Put the file's content into `model`, in place."""
    layers, norms, floats = fit(artifact, model)
    with torch.no_grad():
        for key, tensor in floats.items():
            tensor.copy_(artifact.tensors[f"{FLOAT}{key}"])
    new = make_layers(artifact, layers)
    for name, norm in norms.items():
        new[norm] = _norm(artifact, name, norm)
    swap_modules(model, new)
    setattr(model, STORED_PLANS, dict(artifact.plans))
    set_bits(model, bits)
    return model


def _skeleton(artifact: Artifact) -> nn.Module:
    """The float model that the file names, if it is one of ours; tried without memory before it is built."""
    architecture, layers = artifact.manifest["architecture"], len(artifact.tensors)
    if architecture is None:
        raise ArtifactError(
            "the file is of a model that bitdial does not build; in Python, pass it: load(path, model). Commands need "
            "a file of a model from build_model()"
        )
    try:
        name, arguments = architecture["name"], architecture["arguments"]
        if set(architecture) != {"name", "arguments"} or any(arguments.get(k, 1) > layers for k in ("blocks", "depth")):
            raise ConfigError("it has unknown parts, or more layers than the file has tensors")
        with torch.random.fork_rng():  # its random weights are about to be replaced
            with torch.device("meta"):
                fit(artifact, build_model(name, **arguments))
            return build_model(name, **arguments)
    except (ConfigError, KeyError, TypeError, ValueError, RuntimeError, AttributeError, OverflowError) as problem:
        raise ArtifactError(
            f"the file names the architecture {architecture!r}, which cannot be built: {problem}; "
            "pass a model: load(path, model)"
        ) from problem


def fit(artifact: Artifact, model: nn.Module) -> tuple[dict[str, nn.Module], dict[str, nn.Module], dict[str, Tensor]]:
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
            raise ArtifactError(
                f"the float tensor {key!r} is {here} in the file and {there} in the model{_hint(tensor)}"
            )
        if isinstance(tensor, nn.Parameter) and not bool(torch.isfinite(stored[key]).all()):
            raise ArtifactError(f"the float tensor {key!r} holds infinity in the file")
    return own


def _form(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


def _hint(tensor: Tensor) -> str:
    half = tensor.dtype in (torch.bfloat16, torch.float16)
    return f"; pass a float32 model, and dtype={tensor.dtype} to load" if half else ""


def _norm(artifact: Artifact, name: str, norm: nn.Module) -> SwitchableBatchNorm:
    entry = artifact.norms[name]
    made = SwitchableBatchNorm(norm, bit_choices=artifact.bit_choices, follows=entry["follows"])
    if entry["fed_by"] is not None:
        made = TransitionalBatchNorm(made, fed_by=entry["fed_by"], transitions=entry.get("transitions", "full"))
    for part in norm.state_dict():
        for key, row in zip(made.holders(part), artifact.tensors[f"{name}/{part}"], strict=True):
            made.sets[key].state_dict()[part].copy_(row)
    return made


def _copy(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.clone()


def _set_bias(artifact: Artifact, name: str, layer: nn.Module) -> None:
    if (bias := artifact.part(name, "bias")) is not None:
        layer.bias = nn.Parameter(bias.clone())


def _packed_layers(artifact: Artifact, layers: dict[str, nn.Module]) -> dict[nn.Module, nn.Module]:
    narrows = bf.scheme_of(artifact.scheme).narrows
    stored: dict[str, Tensor] = {}
    new: dict[nn.Module, nn.Module] = {}
    for name, layer in layers.items():
        owner = artifact.owner(name)
        if owner not in stored:
            stored[owner] = artifact.codes(owner).clone() if narrows else artifact.tensors[f"{owner}/weight"].clone()
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
        owner = artifact.owner(name)
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
    scale = artifact.tensors[f"{owner}/weight_scale"][0]
    return bf.weight_of_codes(artifact.codes(owner), scale, bits=artifact.bit_choices[0], scheme=artifact.scheme)


def _act_quantizer(artifact: Artifact, name: str) -> ActivationQuantizer | None:
    scale, zero_point = artifact.part(name, "act_scale"), artifact.part(name, "act_zero_point")
    if scale is None:
        return None
    widths = artifact.bit_choices
    zeros = None if zero_point is None else {b: z.float() for b, z in zip(widths, zero_point.split(1), strict=True)}
    scales = dict(zip(widths, scale.split(1), strict=True))
    return ActivationQuantizer(scales, zeros, kind=artifact.layers[name]["activations"])
