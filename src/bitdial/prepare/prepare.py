"""prepare(model, config, calibration): a float model in, a model that trains at several widths out."""

import copy
import logging
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from bitdial import functional as bf
from bitdial.errors import ConfigError
from bitdial.nn import (
    KINDS,
    QUANTIZED,
    UNKNOWN,
    ActivationQuantizer,
    LayerKind,
    QuantLayer,
    SwitchableBatchNorm,
    WeightQuantizer,
    kind_of,
)
from bitdial.nn.single_width import watch_width
from bitdial.nn.swap import swap_modules, turn_off_fast_paths
from bitdial.prepare.activation_ranges import LayerInput, observe_inputs
from bitdial.prepare.config import QuantConfig
from bitdial.prepare.dataflow import find_flow
from bitdial.prepare.initial_scales import activation_start, weight_scales
from bitdial.prepare.model_call import Batch
from bitdial.prepare.treatment import Treatment, check_weight, check_weights, decide, without_float_owners

log = logging.getLogger(__name__)
NORMS: tuple[type[nn.Module], ...] = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def prepare(model: nn.Module, config: QuantConfig, calibration: Batch | Sequence[Batch]) -> nn.Module:
    """A copy of `model` whose layers quantise; `model` itself is left as it is.

    `calibration` is a batch of inputs (a tensor, a tuple of positional or a dict of keyword arguments) or a list of
    batches. It sets the order of execution (which decides the first and last layer), the kind and starting scales of
    the activations and which layer each batch norm follows. The result is set to the highest width.
    """
    if not isinstance(config, QuantConfig):
        raise ConfigError(
            f"prepare's second argument must be a QuantConfig, got {type(config).__name__}; QuantConfig() has the "
            "defaults, QuantConfig.from_dict takes a dict"
        )
    batches = list(calibration) if isinstance(calibration, list) else [cast(Batch, calibration)]
    if not batches:
        raise ConfigError("calibration is empty; pass at least one batch of inputs")
    if any(hasattr(module, "select_bits") for module in model.modules()):
        raise ConfigError("the model is prepared already; prepare a float model")
    check_weights(model)
    model = copy.deepcopy(model)
    turn_off_fast_paths(model)
    candidates = {n: m for n, m in model.named_modules() if kind_of(m) is not None}
    if not candidates:
        raise ConfigError(f"the model has no layer to quantise (looked for {', '.join(KINDS)})")
    if "" in candidates:
        raise ConfigError("the model is a single layer; wrap it, for example in nn.Sequential, so that it has a name")
    inputs = observe_inputs(model, candidates, batches)
    treatments = decide(candidates, inputs, config)
    chosen = without_float_owners(model, candidates, treatments)
    if not chosen:
        raise ConfigError(
            "no layer is left to quantise: the first and the last executed layer stay in float "
            "(keep_first_last) and rules may exclude more"
        )
    norms = {n: m for n, m in model.named_modules() if type(m) in NORMS} if config.switch_norms else {}
    flow = find_flow(model, chosen, norms, batches[0])

    new: dict[nn.Module, nn.Module] = {}
    for name, layer in _quantized_layers(chosen, inputs, treatments, config).items():
        layer.fed_by = flow.feeders.get(name, UNKNOWN)
        new[chosen[name]] = layer
    for name, leader in flow.leaders.items():
        new[norms[name]] = SwitchableBatchNorm(norms[name], bit_choices=config.bit_choices, follows=leader)
    swap_modules(model, new)
    watch_width(model)
    return model


def _quantized_layers(
    chosen: dict[str, nn.Module],
    inputs: dict[str, LayerInput],
    treatments: dict[str, Treatment],
    config: QuantConfig,
) -> dict[str, QuantLayer]:
    """The layers that take the place of `chosen`."""
    made: dict[str, QuantLayer] = {}
    first_of: dict[nn.Parameter, str] = {}  # tied weights share their scale, and so their codes
    for name, layer in chosen.items():
        kind, treatment = cast(LayerKind, kind_of(layer)), treatments[name]
        check_weight(name, layer)
        if reason := kind.unsupported_reason(layer):
            raise ConfigError(f"layer {name!r}: {reason}")
        if inputs[name].arguments > 1:
            raise ConfigError(
                f"layer {name!r}: the model calls it with more than its input, which a quantised {kind.name} does not "
                f"take; call it with its input alone, or keep it in float: Rule(pattern={name!r}, quantize=False)"
            )
        rows = kind.to_rows(layer, cast(Tensor, layer.weight).detach())
        scale_shape = treatment.granularity.scale_shape(tuple(rows.shape), name)
        if bf.has_groups(scale_shape) and config.group_scales == "float" and treatment.activations != "float":
            raise ConfigError(
                f"layer {name!r}: its activations are quantised, and sums of codes need whole numbers between the "
                "scales of its groups: use group_scales='integer', or activations='float' for this layer"
            )
        owner = first_of.setdefault(cast(nn.Parameter, layer.weight), name)
        if owner == name:
            quantizer = _weight_quantizer(name, rows, scale_shape, config)
        else:
            quantizer = made[owner].weight_quantizer
            _check_tied(name, kind, rows, scale_shape, owner, made[owner])
        act_quantizer = _act_quantizer(name, inputs[name], treatment, config)
        made[name] = QUANTIZED[kind].from_float(layer, quantizer, act_quantizer)
    return made


def _check_tied(
    name: str, kind: LayerKind, rows: Tensor, scale_shape: tuple[int, ...], owner: str, other: QuantLayer
) -> None:
    """Refuse a layer whose weight is that of `other`, unless both have the same rows and the same scales."""
    if other.kind.to_rows is not kind.to_rows or other.weight_rows().shape != rows.shape:
        raise ConfigError(
            f"layer {name!r}: it uses the weight of {owner!r}, whose output channels lie along another dimension, so "
            "they cannot share codes; untie them, or keep one in float by a rule"
        )
    if other.weight_quantizer.scale_shape != scale_shape:
        raise ConfigError(
            f"layer {name!r}: it is tied to another layer, {owner!r}, but rules give them different per_channel or "
            "group_size"
        )


def _weight_quantizer(name: str, rows: Tensor, scale_shape: tuple[int, ...], config: QuantConfig) -> WeightQuantizer:
    with torch.no_grad():
        scales = weight_scales(rows, scale_shape, name=name, config=config)
    return WeightQuantizer(
        scales,
        bit_choices=config.bit_choices,
        scheme=config.scheme,
        ties=config.ties,
        scale_shape=scale_shape,
        group_scales=config.group_scales,
        scale_gradient=config.scale_gradient,
    )


def _act_quantizer(
    name: str, seen: LayerInput, treatment: Treatment, config: QuantConfig
) -> ActivationQuantizer | None:
    kind = treatment.activations
    if kind == "float":
        return None
    if kind == "auto":
        kind = "unsigned" if seen.minimum >= 0 else "signed"
    elif kind == "unsigned" and seen.minimum < 0:
        log.warning(
            "layer %r: activations are set to unsigned but calibration saw %g; negative values will read as 0",
            name,
            seen.minimum,
        )
    samples = torch.cat(seen.samples)
    if config.start == "max":  # of all that was seen, not of a sample
        samples = samples.new_tensor([seen.minimum, seen.maximum])
    samples = samples if samples.dtype == torch.float64 else samples.float()
    scales, zero_points = activation_start(
        samples, name=name, bit_choices=config.bit_choices, kind=kind, start=config.start
    )
    return ActivationQuantizer(scales, zero_points, kind=kind)
