"""The float model inside a prepared one: what calibration compares with."""

import copy
from typing import Any

from torch import nn

from bitdial.dial.dial import unwrap
from bitdial.nn import ActivationSite, QuantLayer, SwitchableBatchNorm


def float_copy(model: nn.Module) -> nn.Module:
    """A copy of the prepared `model` in which nothing is quantised: master weights, norms of the highest width.

    Modules keep their names. The copy is in eval mode and has parameters of its own, without gradients.
    """
    model = unwrap(model)
    memo: dict[int, Any] = {}
    for module in model.modules():
        if isinstance(module, QuantLayer):
            memo[id(module)] = _float_layer(module, memo)
        elif isinstance(module, SwitchableBatchNorm):
            memo[id(module)] = copy.deepcopy(module.sets[module.set_names()[0]], memo)
        elif isinstance(module, ActivationSite):
            memo[id(module)] = nn.Identity()
    made: nn.Module = copy.deepcopy(model, memo)
    return made.eval().requires_grad_(False)


def _float_layer(layer: QuantLayer, memo: dict[int, Any]) -> nn.Module:
    made: Any = layer.kind.module(**layer.kind.arguments(layer), device="meta")
    made.weight = copy.deepcopy(layer.weight, memo)
    if layer.kind.has_bias:
        made.bias = copy.deepcopy(layer.bias, memo)
    return made
