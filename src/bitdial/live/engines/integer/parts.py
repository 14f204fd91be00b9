"""Fused calls in a model that cannot be traced as a whole: in those of its modules that can, such as a backbone."""

import copy
import inspect
import logging
from typing import Any

from torch import nn

from bitdial.live.engines.integer.graph import fuse, is_leaf
from bitdial.live.layers import LiveLayer

log = logging.getLogger(__name__)


def fuse_model(model: nn.Module) -> nn.Module:
    """`model` with fused nodes, as a whole or in the parts where that can be; tensors are those of `model`."""
    fused = fuse(model)
    if fused is not model:
        return fused
    names: list[str] = []
    made = _with_fused_parts(model, "", names)
    if names:
        log.info("layers run in fused calls inside %s", ", ".join(names))
    return made if names else model


def _with_fused_parts(module: nn.Module, name: str, names: list[str]) -> nn.Module:
    """`module`, or one like it in which the outermost modules that can be fused are; `names` gets theirs."""
    new: dict[str, nn.Module] = {}
    for key, child in module.named_children():
        inside = f"{name}.{key}" if name else key
        if is_leaf(child) or not any(isinstance(part, LiveLayer) for part in child.modules()):
            continue
        graph = fuse(child) if _takes_only_what_it_needs(child) else child
        if graph is not child:
            new[key] = _calling(child, graph)
            names.append(inside)
        elif (made := _with_fused_parts(child, inside, names)) is not child:
            new[key] = made
    if not new:
        return module
    made = copy.copy(module)
    vars(made)["_modules"] = {**module._modules, **new}
    return made


def _calling(module: nn.Module, graph: nn.Module) -> nn.Module:
    """One like `module`, with its attributes, that computes by `graph`."""
    made = copy.copy(module)
    vars(made)["forward"] = graph.__call__  # not an attribute of nn.Module, which would make the graph a submodule
    return made


def _takes_only_what_it_needs(module: nn.Module) -> bool:
    """Whether every argument of the forward must be given: a graph does not know whether others are."""
    parameters: Any = inspect.signature(module.forward).parameters.values()
    return all(p.kind == p.POSITIONAL_OR_KEYWORD and p.default is p.empty for p in parameters)
