"""What the config and its rules decide for each layer."""

import logging
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import cast

import torch
from torch import nn

from bitdial.errors import ConfigError, QuantizationError
from bitdial.functional import Granularity
from bitdial.nn import LayerKind, kind_of, nearest_kind
from bitdial.nn.decompose import PART_OF
from bitdial.prepare.activation_ranges import LayerInput
from bitdial.prepare.config import QuantConfig, Rule

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Treatment:
    """What the config and its rules decide for one layer."""

    quantize: bool
    asked_for: bool  # by a rule, rather than by default
    activations: str
    granularity: Granularity


def decide(
    candidates: dict[str, nn.Module], inputs: dict[str, LayerInput], config: QuantConfig
) -> dict[str, Treatment]:
    """The treatment of each of `candidates`, given what calibration saw of them."""
    gathers = {name for name, layer in candidates.items() if cast(LayerKind, kind_of(layer)).gathers}
    order = [name for name in inputs if name not in gathers]
    ends = [order[0], max(order, key=lambda n: inputs[n].last_call)] if config.keep_first_last and order else []
    kept = {name for name in ends if cast(LayerKind, kind_of(candidates[name])).multiplies}
    granularity = Granularity(config.per_channel, config.group_size)
    treatments = {
        name: Treatment(name not in kept | gathers, False, config.activations, granularity) for name in candidates
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
        if not cast(LayerKind, kind_of(candidates[name])).multiplies:
            treatments[name] = replace(treatments[name], activations="float")
    return treatments


def _matches(rule: Rule, name: str, layer: nn.Module) -> bool:
    by_name = rule.pattern is None or fnmatchcase(name, rule.pattern)
    kind, whole = cast(LayerKind, kind_of(layer)).name, vars(layer).get(PART_OF)
    return by_name and (rule.type is None or rule.type in (type(layer).__name__, kind, whole))


def _apply_rule(treatment: Treatment, rule: Rule) -> Treatment:
    if rule.quantize is not None:
        treatment = replace(treatment, quantize=rule.quantize, asked_for=rule.quantize)
    if rule.activations is not None:
        treatment = replace(treatment, activations=rule.activations)
    if rule.per_channel is not None:
        treatment = replace(treatment, granularity=Granularity(rule.per_channel))
    if rule.group_size is not None:
        treatment = replace(treatment, granularity=Granularity(group_size=rule.group_size or None))
    return treatment


def without_float_owners(
    model: nn.Module, candidates: dict[str, nn.Module], treatments: dict[str, Treatment]
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


def check_weights(model: nn.Module) -> None:
    """Refuse layers whose weight cannot be quantised, and say which stay in float because of their type.

    Kinds that are quantised only where a rule asks for it are looked at when one does.
    """
    for name, module in model.named_modules():
        kind = nearest_kind(module)
        if kind is None or kind.gathers:
            continue
        check_weight(name, module)
        if kind_of(module) is None:
            log.warning(
                "layer %r is a %s, a type that bitdial does not know; it stays in float", name, type(module).__name__
            )


def check_weight(name: str, module: nn.Module) -> None:
    """Refuse a layer whose weight cannot be quantised."""
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
