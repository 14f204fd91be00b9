"""What the config and its rules decide for each layer."""

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
from bitdial.prepare.ends import Ends


@dataclass(frozen=True)
class Treatment:
    """What the config and its rules decide for one layer.

    `reason` says why it stays in float, going on from its name, and `kept_by` what decided that: "rule", "default" or
    "circumstance"; both are empty if it is quantised. `fixed_bits` is the width that it stays at, if it has one of its
    own, and `fixed_by` what decided that: "rule", "default", or "tied" (by the width of a layer on the same weight).
    """

    quantize: bool
    asked_for: bool  # by a rule, rather than by default
    activations: str
    granularity: Granularity
    reason: str = ""
    kept_by: str = ""
    fixed_bits: int | None = None
    fixed_by: str = ""

    def kept(self, reason: str, by: str) -> "Treatment":
        """The same for a layer that stays in float."""
        kept = replace(self, quantize=False, asked_for=False, reason=reason, kept_by=by)
        return kept.fixed(None, "")

    def fixed(self, bits: int | None, by: str) -> "Treatment":
        """The same for a layer that stays at `bits`; None: that goes by the dial."""
        return replace(self, fixed_bits=bits, fixed_by=by)


def decide(
    candidates: dict[str, nn.Module], inputs: dict[str, LayerInput], ends: Ends, config: QuantConfig
) -> dict[str, Treatment]:
    """The treatment of each of `candidates`, given what calibration saw of them."""
    kinds = {name: cast(LayerKind, kind_of(layer)) for name, layer in candidates.items()}
    default = Treatment(True, False, config.activations, Granularity(config.per_channel, config.group_size))
    treatments = dict.fromkeys(candidates, default)
    for name, kind in kinds.items():
        if kind.multiplies and name in ends.heads:
            treatments[name] = _end(default, config, "is a last layer, which makes the output (keep_first_last)")
        if kind.multiplies and name in ends.stems:
            treatments[name] = _end(default, config, "is a first layer, which the inputs reach (keep_first_last)")
        if kind.gathers:
            reason = f"is of kind {kind.name}, which only a rule quantises: Rule(type={kind.name!r}, quantize=True)"
            treatments[name] = default.kept(reason, "default")
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
            treatments[name] = treatment.kept("did not run on the calibration batch", "circumstance")
        if not kinds[name].multiplies:
            treatments[name] = replace(treatments[name], activations="float")
    return treatments


def activations_of(name: str, layer: nn.Module, config: QuantConfig) -> str:
    """The activations that the config and its rules ask for in a layer of a kind."""
    asked = [rule.activations for rule in config.rules if rule.activations is not None and _matches(rule, name, layer)]
    return asked[-1] if asked else config.activations


def _end(default: Treatment, config: QuantConfig, reason: str) -> Treatment:
    """The treatment of a first or last layer: in float for the `reason`, at a width of its own, or as all others."""
    kept = config.keep_first_last
    if isinstance(kept, bool):
        return default.kept(reason, "default") if kept else default
    return default.fixed(kept, "default")


def _matches(rule: Rule, name: str, layer: nn.Module) -> bool:
    by_name = rule.pattern is None or fnmatchcase(name, rule.pattern)
    kind, whole = cast(LayerKind, kind_of(layer)).name, vars(layer).get(PART_OF)
    return by_name and (rule.type is None or rule.type in (type(layer).__name__, kind, whole))


def _apply_rule(treatment: Treatment, rule: Rule) -> Treatment:
    if rule.quantize is False:
        treatment = treatment.kept(f"is kept by {rule}", "rule")
    elif rule.quantize or rule.bits is not None:
        treatment = replace(treatment, quantize=True, asked_for=True, reason="", kept_by="")
        if treatment.fixed_by == "default":  # of keep_first_last, which such a rule overrules
            treatment = treatment.fixed(None, "")
    if rule.bits is not None:
        treatment = treatment.fixed(rule.bits, "rule")
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
    """The layers to quantise, less those whose weight is also used in float by another module (tied embeddings).

    Changes the `treatments` of these, in place.
    """
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
                f"layer {name!r}: a rule asks to quantise it, but {others[0]!r} uses the same weight in float; "
                f"quantise that too, by Rule(pattern={others[0]!r}, quantize=True), untie them or drop the rule"
            )
        if others:
            treatments[name] = treatments[name].kept(
                f"has the weight of {others[0]!r}, which uses it in float; untie them", "circumstance"
            )
            del chosen[name]
    return chosen


def share_fixed_bits(chosen: dict[str, nn.Module], treatments: dict[str, Treatment]) -> None:
    """Give the layers that share a weight the width of the one that has one of its own, in place."""
    by_weight: dict[object, list[str]] = {}
    for name, layer in chosen.items():
        by_weight.setdefault(layer.weight, []).append(name)
    for names in by_weight.values():
        widths = {bits: name for name in names if (bits := treatments[name].fixed_bits) is not None}
        if len(widths) > 1:
            told = ", ".join(f"{name!r} at {bits} bits" for bits, name in widths.items())
            raise ConfigError(
                f"layers on one weight stay at one width, but {told}: give them the same by Rule(pattern=..., bits=...)"
            )
        for name in names if widths else ():
            if treatments[name].fixed_bits is None:
                treatments[name] = treatments[name].fixed(next(iter(widths)), "tied")


def check_weights(model: nn.Module) -> None:
    """Refuse layers whose weight cannot be quantised.

    Kinds that are quantised only where a rule asks for it are looked at when one does.
    """
    for name, module in model.named_modules():
        kind = nearest_kind(module)
        if kind is None or kind.gathers:
            continue
        check_weight(name, module)


def check_weight(name: str, module: nn.Module) -> None:
    """Refuse a layer whose weight cannot be quantised."""
    if nn.utils.parametrize.is_parametrized(module, "weight") or "weight" not in module._parameters:
        raise ConfigError(
            f"layer {name!r}: its weight is computed from others (weight norm or the like); remove that first, for "
            "example with torch.nn.utils.parametrize.remove_parametrizations(layer, 'weight'), or after pruning with "
            "torch.nn.utils.prune.remove(layer, 'weight')"
        )
    weight = cast(nn.Parameter, module.weight)
    if not bool(torch.isfinite(weight).all()):
        raise QuantizationError(f"layer {name!r}: the weight holds NaN or infinity")
    if not weight.is_floating_point():
        raise ConfigError(f"layer {name!r}: its weight is {weight.dtype}; only floating-point weights can be quantised")
