"""prepare(model, config, calibration): a float model in, a model that trains at several widths out."""

import copy
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, cast

import torch
from torch import nn

from bitdial.errors import ConfigError, QuantizationError
from bitdial.nn import (
    UNKNOWN,
    ActivationQuantizer,
    QuantConv2d,
    QuantLayer,
    QuantLinear,
    SwitchableBatchNorm,
    WeightQuantizer,
)
from bitdial.nn.swap import swap_modules, turn_off_fast_paths
from bitdial.prepare.activation_ranges import LayerInput, observe_inputs
from bitdial.prepare.config import QuantConfig, Rule
from bitdial.prepare.dataflow import find_flow
from bitdial.prepare.initial_scales import activation_start, weight_scales
from bitdial.prepare.model_call import Batch

log = logging.getLogger(__name__)
SWAPS: dict[type[nn.Module], Any] = {nn.Conv2d: QuantConv2d, nn.Linear: QuantLinear}
NORMS: tuple[type[nn.Module], ...] = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


@dataclass(frozen=True)
class _Treatment:
    """What the config and its rules decide for one layer."""

    quantize: bool
    asked_for: bool  # by a rule, rather than by default
    activations: str
    per_channel: bool


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
    _check_weights(model)
    model = copy.deepcopy(model)
    turn_off_fast_paths(model)
    candidates = {n: m for n, m in model.named_modules() if type(m) in SWAPS}
    if not candidates:
        raise ConfigError(f"the model has no layer to quantise (looked for {', '.join(t.__name__ for t in SWAPS)})")
    if "" in candidates:
        raise ConfigError("the model is a single layer; wrap it, for example in nn.Sequential, so that it has a name")
    inputs = observe_inputs(model, candidates, batches)
    treatments = _decide(candidates, inputs, config)
    chosen = _without_float_owners(model, candidates, treatments)
    if not chosen:
        raise ConfigError(
            "no layer is left to quantise: the first and the last executed layer stay in float "
            "(keep_first_last) and rules may exclude more"
        )
    norms = {n: m for n, m in model.named_modules() if type(m) in NORMS} if config.switch_norms else {}
    flow = find_flow(model, chosen, norms, batches[0])

    new: dict[nn.Module, nn.Module] = {}
    weight_quantizers: dict[nn.Parameter, WeightQuantizer] = {}
    for name, layer in chosen.items():
        treatment = treatments[name]
        weight = cast(nn.Parameter, layer.weight)
        if weight not in weight_quantizers:  # tied weights share their scale, and so their codes
            weight_quantizers[weight] = _weight_quantizer(name, weight, treatment, config)
        elif (weight_quantizers[weight].channels > 1) != (treatment.per_channel and weight.shape[0] > 1):
            raise ConfigError(f"layer {name!r}: it is tied to another layer, but rules give them different per_channel")
        act_quantizer = _act_quantizer(name, inputs[name], treatment, config)
        quantised: QuantLayer = SWAPS[type(layer)].from_float(layer, weight_quantizers[weight], act_quantizer)
        quantised.fed_by = flow.feeders.get(name, UNKNOWN)
        new[layer] = quantised
    for name, leader in flow.leaders.items():
        new[norms[name]] = SwitchableBatchNorm(norms[name], bit_choices=config.bit_choices, follows=leader)
    swap_modules(model, new)
    return model


def _check_weights(model: nn.Module) -> None:
    """Refuse layers whose weight cannot be quantised, and say which stay in float because of their type."""
    kinds = tuple(SWAPS)
    for name, module in model.named_modules():
        if not isinstance(module, kinds):
            continue
        if nn.utils.parametrize.is_parametrized(module, "weight") or "weight" not in module._parameters:
            raise ConfigError(
                f"layer {name!r}: its weight is computed from others (weight norm or the like); remove that first, for "
                "example with torch.nn.utils.parametrize.remove_parametrizations(layer, 'weight')"
            )
        weight = cast(nn.Parameter, module.weight)
        if not bool(torch.isfinite(weight).all()):
            raise QuantizationError(f"layer {name!r}: the weight holds NaN or infinity")
        if weight.dtype not in (torch.float32, torch.float64):
            raise ConfigError(f"layer {name!r}: its weight is {weight.dtype}; scales need float32: use model.float()")
        if type(module) not in SWAPS:
            log.warning(
                "layer %r is a %s, a type that bitdial does not know; it stays in float", name, type(module).__name__
            )


def _decide(
    candidates: dict[str, nn.Module], inputs: dict[str, LayerInput], config: QuantConfig
) -> dict[str, _Treatment]:
    order = list(inputs)
    kept = {order[0], max(order, key=lambda n: inputs[n].last_call)} if config.keep_first_last and order else set()
    treatments = {
        name: _Treatment(name not in kept, False, config.activations, config.per_channel) for name in candidates
    }
    for rule in config.rules:
        matched = [name for name, layer in candidates.items() if _matches(rule, name, layer)]
        if not matched:
            raise ConfigError(f"{rule} matches no layer; the model's layers are {', '.join(map(repr, candidates))}")
        for name in matched:
            treatments[name] = _apply_rule(treatments[name], rule)
    for name, treatment in treatments.items():
        if name not in inputs and treatment.quantize:
            if treatment.asked_for:
                raise ConfigError(
                    f"layer {name!r}: a rule asks to quantise it, but the calibration batch does not "
                    "run it; pass a batch that does"
                )
            log.warning("layer %r did not run on the calibration batch; it stays in float", name)
            treatments[name] = replace(treatment, quantize=False)
    return treatments


def _matches(rule: Rule, name: str, layer: nn.Module) -> bool:
    by_name = rule.pattern is None or fnmatchcase(name, rule.pattern)
    return by_name and (rule.type is None or rule.type == type(layer).__name__)


def _apply_rule(treatment: _Treatment, rule: Rule) -> _Treatment:
    if rule.quantize is not None:
        treatment = replace(treatment, quantize=rule.quantize, asked_for=rule.quantize)
    if rule.activations is not None:
        treatment = replace(treatment, activations=rule.activations)
    if rule.per_channel is not None:
        treatment = replace(treatment, per_channel=rule.per_channel)
    return treatment


def _without_float_owners(
    model: nn.Module, candidates: dict[str, nn.Module], treatments: dict[str, _Treatment]
) -> dict[str, nn.Module]:
    """The layers to quantise, less those whose weight is also used in float by another module (tied embeddings)."""
    chosen = {name: candidates[name] for name in candidates if treatments[name].quantize}
    owners: dict[nn.Parameter, list[str]] = {}
    for owner, module in model.named_modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                owners.setdefault(parameter, []).append(owner)
    for name in list(chosen):
        weight = cast(nn.Parameter, chosen[name].weight)
        others = [o for o in owners[weight] if o not in candidates or not treatments[o].quantize]
        if others and treatments[name].asked_for:
            raise ConfigError(
                f"layer {name!r}: a rule asks to quantise it, but {others[0]!r} uses the same weight in "
                "float; untie them or drop the rule"
            )
        if others:
            log.warning("layer %r stays in float: %r uses the same weight in float", name, others[0])
            del chosen[name]
    return chosen


def _weight_quantizer(name: str, weight: nn.Parameter, treatment: _Treatment, config: QuantConfig) -> WeightQuantizer:
    channels = weight.shape[0] if treatment.per_channel else 1
    with torch.no_grad():
        scales = weight_scales(
            weight,
            name=name,
            bit_choices=config.bit_choices,
            scheme=config.scheme,
            ties=config.ties,
            start=config.start,
            channels=channels,
        )
    return WeightQuantizer(
        scales,
        bit_choices=config.bit_choices,
        scheme=config.scheme,
        ties=config.ties,
        channels=channels,
        scale_gradient=config.scale_gradient,
    )


def _act_quantizer(
    name: str, seen: LayerInput, treatment: _Treatment, config: QuantConfig
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
    samples = torch.cat(seen.samples).float() if seen.samples[0].dtype != torch.float64 else torch.cat(seen.samples)
    scales, zero_points = activation_start(
        samples, name=name, bit_choices=config.bit_choices, kind=kind, start=config.start
    )
    return ActivationQuantizer(scales, zero_points, kind=kind)
