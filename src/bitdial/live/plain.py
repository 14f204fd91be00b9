"""A live model without its engines: the codes of its layers, and its other modules as PyTorch has them.

That is what exact evaluation and exports start from, whatever a model runs on. A module that an engine has put in the
place of another gives it back by a method `plain`.
"""

import copy
from typing import Any

from torch import nn

from bitdial.dial.dial import SWITCHBOARD, unwrap
from bitdial.live.codes import StoredCodes
from bitdial.live.layers import LiveLayer


def plain_copy(model: nn.Module, instead: dict[nn.Module, nn.Module] | None = None) -> nn.Module:
    """A copy of the live `model` whose layers have codes and no engine; `instead` gives modules other successors."""
    model = unwrap(model)
    memo: dict[int, Any] = {id(old): new for old, new in (instead or {}).items()}
    for module in model.modules():
        if isinstance(module, LiveLayer) and id(module) not in memo:
            memo[id(module.engine)] = None
            if not isinstance(module.codes.source, StoredCodes):
                memo[id(module.codes.source)] = _unpacked(module)
        elif SWITCHBOARD in vars(module):
            memo[id(vars(module)[SWITCHBOARD])] = None
    for module in reversed(list(model.modules())):  # what is inside another first
        if hasattr(type(module), "plain") and id(module) not in memo:
            memo[id(module)] = copy.deepcopy(module.plain(), memo)  # type: ignore[operator]
    made: nn.Module = copy.deepcopy(model, memo)
    for module in made.modules():
        vars(module).pop(SWITCHBOARD, None)
    return made


def _unpacked(layer: LiveLayer) -> StoredCodes:
    codes, width = layer.codes.source.read(layer.bit_choices[0])  # type: ignore[operator]
    return StoredCodes(codes.to(layer.codes.scale.device), width)


def take_over(module: nn.Module, other: nn.Module) -> None:
    """Give `module`, which is new, the parameters, settings and hooks of `other`, whose place it takes."""
    vars(module).update({key: value.copy() if isinstance(value, dict) else value for key, value in vars(other).items()})
