"""Batch norms with a set for each pair of neighbouring widths, for mixed plans."""

import copy
from dataclasses import replace

from torch import nn

from bitdial.config import check_choice
from bitdial.dial.dial import is_live, leader_of
from bitdial.errors import ConfigError
from bitdial.nn import TRANSITIONS, UNKNOWN, QuantLayer, SwitchableBatchNorm, TransitionalBatchNorm
from bitdial.nn.swap import swap_modules
from bitdial.prepare.report import REPORT
from bitdial.prepare.sizes import expected_bytes


def add_transitions(model: nn.Module, transitions: str = "full") -> nn.Module:
    """A copy of the prepared `model` whose batch norms have a set for each pair of widths: see TransitionalBatchNorm.

    With `transitions="statistics"` the pairs of one own width share weight and bias, which takes fewer bytes. Every
    pair starts from the set of the own width, so outputs stay what they are. A norm whose layer no quantised layer
    feeds keeps one set per width.
    """
    check_choice("transitions", transitions, TRANSITIONS)
    if any(isinstance(module, TransitionalBatchNorm) for module in model.modules()):
        raise ConfigError("the model's batch norms have transitions already; add them to a model without")
    model = copy.deepcopy(model)
    layers = {n: m for n, m in model.named_modules() if isinstance(m, QuantLayer)}
    if not layers and is_live(model):
        raise ConfigError("the model is a live one; give one from prepare() or load_trainable(path)")
    norms = {n: m for n, m in model.named_modules() if type(m) is SwitchableBatchNorm}
    if not norms:
        raise ConfigError(
            "the model has no switchable batch norm to give transitions to; prepare it with switch_norms=True"
        )
    new: dict[nn.Module, nn.Module] = {}
    for name, norm in norms.items():
        layer = layers[leader_of(name, norm.follows, layers)]
        fed_by = layer.fed_by
        if fed_by == UNKNOWN:
            raise ConfigError(
                f"norm {name!r}: bitdial could not follow what feeds layer {norm.follows!r}, which it follows; a "
                "transitional norm needs the widths of both"
            )
        if fed_by is not None:
            made = TransitionalBatchNorm(norm, fed_by=fed_by, transitions=transitions)
            made.select_set(layer.weight_bits, layers[leader_of(name, fed_by, layers)].weight_bits)
            new[norm] = made
    swap_modules(model, new)
    if (report := getattr(model, REPORT, None)) is not None:
        setattr(model, REPORT, replace(report, **expected_bytes(model)))
    return model
