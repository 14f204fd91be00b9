"""From an artifact to a model: `load` to run it, `load_trainable` to train it further.

A file is read into memory once. A live model from a path takes its tensors as parts of that memory: nobody else has it.
From an `Artifact`, which the caller keeps, it takes copies.
"""

import logging
import os
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from bitdial import functional as bf
from bitdial.artifact import FLOAT, Artifact, check_same_graph, fit, read_artifact
from bitdial.artifact.widened import remember_widened
from bitdial.config import check_bit_choices
from bitdial.dial.dial import STORED_PLANS, set_bits
from bitdial.errors import ArtifactError, ConfigError
from bitdial.live.casts import refuse_casts
from bitdial.live.codes import CodeFacts, Codes, CodeScales, StoredCodes
from bitdial.live.engines.float import run_on_float
from bitdial.live.engines.integer import IntegerModel
from bitdial.live.engines.packed import PackedEngine, PoolBoard, join, joinable, packed_words
from bitdial.live.grow import remember_parts
from bitdial.live.kernel_choice import check_offer, choose_kernels, unsupported_reason
from bitdial.live.layers import LiveLayer
from bitdial.live.shared_inputs import shared_inputs
from bitdial.live.skeleton import built, copy_of
from bitdial.live.trainable import put_sites, trainable_layers
from bitdial.nn import SwitchableBatchNorm, TransitionalBatchNorm
from bitdial.nn.layer_kinds import KINDS
from bitdial.nn.own_dtypes import remembered
from bitdial.nn.single_width import watch_width
from bitdial.nn.swap import swap_modules
from bitdial.prepare.report import REPORT

log = logging.getLogger(__name__)


class _Options(NamedTuple):
    """The arguments of `load`."""

    device: str | torch.device
    dtype: torch.dtype | None
    kernels: str | None
    bit_choices: Sequence[int] | None
    master: str


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

    `model` is a float model of the architecture that was saved (it is not changed; its weights and its dtype do not
    matter). It can be left out for the models that bitdial ships.

    dtype        what a weight-only model runs in: torch.bfloat16 or torch.float16; None is the file's float32
    kernels      'float': weights are dequantised and torch's kernels run, as in training. 'integer': integer kernels,
                 with the outputs of `code_exact`. 'packed': weight-only Linear layers read b bits a weight, others run
                 as with 'float'. None chooses on a GPU: integer if the activations of all layers are quantised and no
                 layer has groups of inputs, packed for a weight-only model in 16 bits; else float. On the CPU: packed
                 for a weight-only model in 16 bits, else float.
    bit_choices  for packed kernels, or a progressive file: which of the file's widths to offer. Packed kernels have
                 memory for the widest of them, and of a progressive file no part beyond it is read
    master       for packed kernels of a scheme that rounds anew at each width (double_rounding): 'host' keeps the
                 stored codes in host memory, so that the GPU holds only the words in use
    """
    if isinstance(path, Artifact):
        artifact, own = path, False
    else:
        widest = None if bit_choices is None else check_bit_choices(bit_choices)[0]
        artifact, own = read_artifact(path, bits=widest, cut=True), True
        if bit_choices is None and artifact.widest is not None:
            log.warning("%s", _cut(path, artifact))
    options = _Options(device, dtype, kernels, bit_choices, master)
    return _load(built(artifact) if model is None else copy_of(model), artifact, options, own=own)


def _cut(path: str | os.PathLike[str], artifact: Artifact) -> str:
    """What to say of a progressive file that ends early."""
    here, all_bytes = artifact.available, artifact.parts[-1].end
    missing = ", ".join(str(bits) for bits in artifact.bit_choices if bits not in here)
    return (
        f"{path} ends at byte {artifact.file_bytes} of {all_bytes}: the model runs at {', '.join(map(str, here))} "
        f"bits, without {missing}; grow(live, path) adds what comes later"
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
    return _load(model, artifact, _Options(device, dtype, kernels, bit_choices, master), own=False)


def _load(model: nn.Module, artifact: Artifact, options: _Options, *, own: bool) -> nn.Module:
    """Make `model` the live model; if the artifact is our `own`, its tensors may become the model's, and are gone."""
    device, dtype, kernels, bit_choices, master = options
    device = usable_device(device)
    kernels = choose_kernels(artifact, device, dtype, kernels)
    offered = check_offer(artifact, kernels, bit_choices, master)
    words: dict[str, nn.Module] = {}
    board: PoolBoard | None = None
    joined: list[tuple[str, ...]] = []
    if kernels == "packed":
        names = [name for name in artifact.layers if unsupported_reason(artifact, name) is None]
        joined = joinable(artifact, shared_inputs(model, names), offered)
        words, board = packed_words(
            artifact, names, bit_choices=offered, device=device, master=master, joined=joined
        )  # fmt: skip
    # Parts of the file keep all of it in memory, and begin anywhere: products of floats depend on where they begin.
    laid_out_anew = own and kernels == "integer"

    def make_layers(artifact: Artifact, layers: dict[str, nn.Module]) -> dict[nn.Module, nn.Module]:
        return _live_layers(artifact, layers, words, offered, copy_codes=not laid_out_anew)

    live = _assemble(artifact, model, make_layers, bits=offered[0]).eval().requires_grad_(False)
    if artifact.parts:
        remember_parts(live, artifact)
    if own:
        artifact.tensors.clear()
    if dtype is not None:
        _convert(live, dtype)
    live = live.to(device)
    refuse_casts(live)
    if board is not None:
        board.attach(live)
    for name in words:
        layer = live.get_submodule(name)
        assert isinstance(layer, LiveLayer)
        layer.run_on(PackedEngine(layer))
    for group in joined:
        join([live.get_submodule(name) for name in group])  # type: ignore[misc]
    if kernels == "integer":
        return IntegerModel(live, copy=False)
    run_on_float(live)
    return live


def usable_device(device: str | torch.device) -> torch.device:
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


def _convert(live: nn.Module, dtype: torch.dtype) -> None:
    """Convert in place what a weight-only model computes with: parameters, and what weights are dequantised to.

    Scales stay in float32, and so do other buffers: tables such as rotary frequencies lose their meaning in 16 bits.
    Buffers that were of that type in the float model are of it again. Norms with statistics stay as a whole, since
    PyTorch takes their parameters in the type of these.
    """
    norms = [module for module in live.modules() if isinstance(module, nn.modules.batchnorm._NormBase)]
    kept = {id(parameter) for norm in norms for parameter in norm.parameters()}
    for name, parameter in live.named_parameters():
        if parameter.is_floating_point() and id(parameter) not in kept:
            parameter.data = parameter.data.to(dtype)
            if not bool(parameter.isfinite().all()):
                raise ConfigError(f"the parameter {name!r} has values beyond {dtype}; choose torch.bfloat16")
    for layer in live.modules():
        for name, own in remembered(layer).items():
            if own == dtype and layer._buffers.get(name) is not None and layer not in norms:
                setattr(layer, name, getattr(layer, name).to(dtype))
        if isinstance(layer, LiveLayer):
            layer.like = layer.like.to(dtype)


@torch.inference_mode(False)
def load_trainable(path: str | os.PathLike[str] | Artifact, model: nn.Module | None = None) -> nn.Module:
    """A prepared model to train on from, as `prepare` gives: the master weights are the values of the stored codes."""
    artifact = path if isinstance(path, Artifact) else read_artifact(path)
    if artifact.available != artifact.bit_choices:
        raise ArtifactError(
            f"only the parts of up to {artifact.available[0]} bits were read; training goes on from the codes of "
            f"{artifact.bit_choices[0]} bits, so give the whole file"
        )
    skeleton = built(artifact) if model is None else copy_of(model)
    trainable = _assemble(artifact, skeleton, trainable_layers, bits=artifact.bit_choices[0])
    watch_width(trainable)
    return trainable


def _assemble(
    artifact: Artifact,
    model: nn.Module,
    make_layers: Callable[[Artifact, dict[str, nn.Module]], dict[nn.Module, nn.Module]],
    *,
    bits: int,
) -> nn.Module:
    """Put the file's content into `model`, in place; what the file does not have is in float32, as in training."""
    if others := sorted({str(p.dtype) for p in model.parameters() if p.is_floating_point()} - {"torch.float32"}):
        log.info("the given model is in %s, the loaded one in float32; dtype= is for 16 bits", " and ".join(others))
    model.float()
    layers, norms, floats = fit(artifact, model)
    check_same_graph(artifact, model)
    for key, tensor in floats.items():
        _fill(tensor, artifact.wide(f"{FLOAT}{key}"))
    for name, layer in layers.items():
        if artifact.part(name, "bias") is not None:
            layer.bias = nn.Parameter(artifact.wide(f"{name}/bias").clone())
    remember_widened(artifact, model)
    new = make_layers(artifact, layers)
    for name, norm in norms.items():
        new[norm] = _norm(artifact, name, norm)
    swap_modules(model, new)
    put_sites(artifact, model)
    setattr(model, STORED_PLANS, artifact.available_plans())
    setattr(model, REPORT, artifact.report)
    set_bits(model, bits)
    return model


def _fill(tensor: Tensor, stored: Tensor) -> None:
    """Give `tensor` the `stored` content, in place."""
    if tensor.is_contiguous():
        tensor.data = stored.clone()
    else:  # laid out in another way, which stays
        tensor.data = torch.empty_like(tensor, dtype=stored.dtype).copy_(stored)


def _norm(artifact: Artifact, name: str, norm: nn.Module) -> SwitchableBatchNorm:
    entry = artifact.norms[name]
    made = SwitchableBatchNorm(norm, bit_choices=artifact.bit_choices, follows=entry["follows"])
    if entry["fed_by"] is not None:
        made = TransitionalBatchNorm(made, fed_by=entry["fed_by"], transitions=entry.get("transitions", "full"))
    for part, own in norm.state_dict().items():
        stored, expected = artifact.tensors[f"{name}/{part}"], (len(made.holders(part)), *own.shape)
        if tuple(stored.shape) != expected or stored.is_floating_point() != own.is_floating_point():
            raise ArtifactError(
                f"norm {name!r}: its {part} is {tuple(stored.shape)} in the file, and {expected} in the model"
            )
        for key, row in zip(made.holders(part), stored, strict=True):
            _fill(made.sets[key].state_dict(keep_vars=True)[part], row)
    return made


def _live_layers(
    artifact: Artifact,
    layers: dict[str, nn.Module],
    words: dict[str, nn.Module],
    offered: tuple[int, ...],
    *,
    copy_codes: bool,
) -> dict[nn.Module, nn.Module]:
    """For each of the float `layers` its successor, without an engine: on `words` or on stored codes."""
    stored: dict[str, Tensor] = {}  # layers on one weight share it
    new: dict[nn.Module, nn.Module] = {}
    for name, layer in layers.items():
        entry, owner = artifact.layers[name], artifact.owner(name)
        facts = CodeFacts(artifact.scheme, artifact.manifest["ties"], artifact.bit_choices, entry["activations"])
        if name not in words and owner not in stored:
            codes_of_owner = _stored(artifact, owner)
            stored[owner] = codes_of_owner.clone() if copy_codes else codes_of_owner
        source = words.get(name) or StoredCodes(stored[owner], artifact.bit_choices[0])
        codes = Codes(facts, source, _scales(artifact, name, by_row=name in words))
        widths = artifact.bit_choices
        if name in words or artifact.parts:
            widths = artifact.widths_of(name, offered)
        live = LiveLayer(KINDS[entry["type"]], layer, codes, name=name, bit_choices=widths)
        live.fixed_bits = entry.get("fixed_bits")
        new[layer] = live
    return new


def _stored(artifact: Artifact, owner: str) -> Tensor:
    if bf.scheme_of(artifact.scheme).narrows:
        return artifact.codes(owner)
    return artifact.tensors[f"{owner}/weight"]


def _scales(artifact: Artifact, name: str, *, by_row: bool) -> CodeScales:
    """The scales of a layer; with `by_row`, one for each row even if these are all the same."""
    owner = artifact.owner(name)
    weight = artifact.tensors[f"{owner}/weight_scale"]
    if by_row and weight.dim() == 2:
        weight = weight.expand(1, artifact.layers[name]["shape"][0])
    parts = artifact.part(owner, "group_scale"), artifact.act_scale(name), artifact.part(name, "act_zero_point")
    return CodeScales(weight.clone(), *(None if part is None else part.clone() for part in parts))
