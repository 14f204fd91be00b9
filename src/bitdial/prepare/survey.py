"""What `prepare` finds out about a model before it changes anything: its weights, its norms, its ends."""

from dataclasses import dataclass
from typing import Any

from torch import nn

from bitdial.errors import ConfigError
from bitdial.functional import DYNAMIC
from bitdial.nn import KINDS, kind_of
from bitdial.prepare.activation_ranges import LayerInput, observe_inputs
from bitdial.prepare.config import QuantConfig
from bitdial.prepare.dataflow import Flow, find_flow
from bitdial.prepare.ends import Ends, find_ends
from bitdial.prepare.float_layers import MOST_NAMED, find_float_layers, named, unknown_reason, warning_of
from bitdial.prepare.model_call import Batch
from bitdial.prepare.norms import Norms, find_norms, warnings_of_kept
from bitdial.prepare.replaceable import check_replaceable
from bitdial.prepare.report import FloatLayer
from bitdial.prepare.treatment import Treatment, activations_of, decide, share_fixed_bits, without_float_owners
from bitdial.prepare.weights import Weights, find_weights


@dataclass
class Survey:
    """A model's layers and norms, and what is to become of them. `chosen` are the layers to quantise."""

    weights: Weights
    norms: Norms
    inputs: dict[str, LayerInput]
    ends: Ends
    treatments: dict[str, Treatment]
    chosen: dict[str, nn.Module]
    float_layers: tuple[FloatLayer, ...]
    flow: Flow
    warnings: list[str]

    @property
    def fixed_bits(self) -> dict[str, int]:
        """The quantised layers with a width of their own, and those widths."""
        widths = {name: self.treatments[name].fixed_bits for name in self.chosen}
        return {name: bits for name, bits in widths.items() if bits is not None}

    def facts(self) -> dict[str, Any]:
        """What a report says of it, all but bytes."""
        sizes, counts = self.weights.sizes, self.ends.by_layer
        return {
            "weights": self.weights.total,
            "quantised_weights": sum(sizes[name] for name in self.chosen),
            "multiply_adds": self.ends.multiply_adds,
            "quantised_multiply_adds": sum(counts[name] for name in self.chosen),
            "quantised_layers": tuple(self.chosen),
            "fixed_bits": self.fixed_bits,
            "dynamic_layers": tuple(n for n in self.chosen if self.treatments[n].activations == DYNAMIC),
            "float_layers": self.float_layers,
            "switched_norms": tuple(self.norms.switch),
            "kept_norms": self.norms.kept,
            "first_layers": self.ends.stems,
            "last_layers": self.ends.heads,
            "ends_by_order": self.ends.by_order,
        }


def survey(model: nn.Module, config: QuantConfig, batches: list[Batch]) -> Survey:
    """Look at `model`, running it on `batches`; ConfigError if nothing is left to quantise."""
    norms, weights = find_norms(model, switch_norms=config.switch_norms), find_weights(model)
    candidates = {n: m for n, m in model.named_modules() if kind_of(m) is not None and norms.holder(n) is None}
    if not candidates:
        others = "".join(f"; {n!r} {unknown_reason(n, m)}" for n, m in list(weights.modules.items())[:MOST_NAMED])
        raise ConfigError(f"the model has no layer to quantise (looked for {', '.join(KINDS)}){others}")
    if "" in candidates:
        raise ConfigError("the model is a single layer; wrap it, for example in nn.Sequential, so that it has a name")
    dynamic = {name for name, layer in candidates.items() if activations_of(name, layer, config) == DYNAMIC}
    inputs = observe_inputs(model, candidates, batches, tokens=dynamic)
    ends = find_ends(model, weights, candidates, batches[0])
    treatments = decide(candidates, inputs, ends, config)
    chosen = without_float_owners(model, candidates, treatments)
    share_fixed_bits(chosen, treatments)
    float_layers = find_float_layers(weights, chosen, treatments, norms, ends)
    if not chosen:
        raise ConfigError(f"no layer is left to quantise: {named(float_layers, weights.total)}")
    flow = find_flow(model, chosen, norms.switch, batches[0])
    check_replaceable(model, chosen | {name: norms.switch[name] for name in flow.leaders}, batches[0])
    norms.keep_unconnected(flow.leaders)
    warnings = [
        *warning_of(float_layers, weights.total, treatments, ends),
        *(_warning_of_order(ends) if config.keep_first_last is not False else []),
        *_warning_of_fixed([treatments[name].fixed_bits for name in chosen], config),
        *warnings_of_kept(norms),
    ]
    return Survey(weights, norms, inputs, ends, treatments, chosen, float_layers, flow, warnings)


def _warning_of_order(ends: Ends) -> list[str]:
    if not ends.by_order:
        return []
    return [
        f"the model's tensors leave torch's functions, so its {' and '.join(ends.by_order)} layer is that by the order "
        f"of execution: first {', '.join(ends.stems)}, last {', '.join(ends.heads)}. Rules say it otherwise: "
        "Rule(pattern=..., quantize=...)"
    ]


def _warning_of_fixed(fixed: list[int | None], config: QuantConfig) -> list[str]:
    if None in fixed or len(config.bit_choices) == 1:
        return []
    return [
        f"all {len(fixed)} quantised layers have a width of their own, so set_bits(model, bits) changes nothing and "
        "all widths are alike; leave some layers to the dial, or name them in a BitPlan"
    ]
