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
    parts = FusedParts(model)
    if parts.names:
        log.info("layers run in fused calls inside %s", ", ".join(parts.names))
    return parts if parts.names else model


class FusedParts(nn.Module):
    """Calls `model` with fused nodes in `names`, its outermost modules where that can be.

    The modules around these are copies that share the tensors; before a call they take the attributes that the model's
    own have now, such as a threshold of scores.
    """

    def __init__(self, model: nn.Module):
        super().__init__()
        self.names: list[str] = []
        self._around: list[tuple[nn.Module, nn.Module]] = []  # a copy, and the module of the model
        self._made = (_with_fused_parts(model, "", self.names, self._around),)  # not a submodule: it shares those

    @property
    def made(self) -> nn.Module:
        """What is called."""
        return self._made[0]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The output of the model."""
        for made, module in self._around:
            vars(made).update({key: value for key, value in vars(module).items() if key != "_modules"})
        return self.made(*args, **kwargs)


def _with_fused_parts(
    module: nn.Module, name: str, names: list[str], around: list[tuple[nn.Module, nn.Module]]
) -> nn.Module:
    """`module`, or one like it with fused modules inside; `names` gets theirs, `around` the copies."""
    new: dict[str, nn.Module] = {}
    for key, child in module.named_children():
        inside = f"{name}.{key}" if name else key
        if is_leaf(child) or not any(isinstance(part, LiveLayer) for part in child.modules()):
            continue
        graph = fuse(child) if _takes_only_what_it_needs(child) else child
        if graph is not child:
            new[key] = _calling(child, graph)
            names.append(inside)
        elif (other := _with_fused_parts(child, inside, names, around)) is not child:
            new[key] = other
    if not new:
        return module
    made: nn.Module = copy.copy(module)
    vars(made)["_modules"] = {**module._modules, **new}
    around.append((made, module))
    return made


def _calling(module: nn.Module, graph: nn.Module) -> nn.Module:
    """One like `module`, with its attributes, that computes by `graph`."""
    made: nn.Module = copy.copy(module)
    vars(made)["forward"] = graph.__call__  # not an attribute of nn.Module, which would make the graph a submodule
    return made


def _takes_only_what_it_needs(module: nn.Module) -> bool:
    """Whether every argument of the forward must be given: a graph does not know whether others are."""
    parameters: Any = inspect.signature(module.forward).parameters.values()
    return all(p.kind == p.POSITIONAL_OR_KEYWORD and p.default is p.empty for p in parameters)
