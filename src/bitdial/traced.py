"""Traced models (torch.fx): what their nodes are, and new calls in them. For those who fuse layers."""

import math
import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

ADDITIONS = (operator.add, torch.add, "add")
IN_PLACE_ADDITIONS = (operator.iadd, "add_")
CAPS: dict[Any, float] = {
    nn.ReLU: math.inf,
    nn.ReLU6: 6.0,
    F.relu: math.inf,
    F.relu6: 6.0,
    torch.relu: math.inf,
    torch.relu_: math.inf,
    "relu": math.inf,
    "relu_": math.inf,
}


def module_of(graph: fx.GraphModule, node: fx.Node) -> nn.Module:
    """The module that `node` calls."""
    return graph.get_submodule(str(node.target))


def only_user(node: fx.Node) -> fx.Node | None:
    """The node that reads `node`, None if there are several or none."""
    return next(iter(node.users)) if len(node.users) == 1 else None


def added(node: fx.Node, user: fx.Node) -> fx.Node | None:
    """What `user` adds to `node`, None if it is no plain addition of two nodes."""
    in_place = user.target in IN_PLACE_ADDITIONS and user.args[0] is node
    if not (in_place or user.target in ADDITIONS) or user.kwargs or len(user.args) != 2:
        return None
    others = [argument for argument in user.args if argument is not node]
    return others[0] if len(others) == 1 and isinstance(others[0], fx.Node) else None


def relu_cap(graph: fx.GraphModule, node: fx.Node) -> float | None:
    """The upper bound of the ReLU that `node` is, None if it is none."""
    return CAPS.get(type(module_of(graph, node)) if node.op == "call_module" else node.target)


def insert_call(graph: fx.GraphModule, kind: str, module: nn.Module, args: tuple[Any, ...]) -> fx.Node:
    """A node that calls the new `module`, named by its `kind`, where the graph inserts."""
    name = f"{kind}_{sum(1 for n in graph._modules if n.startswith(f'{kind}_'))}"
    graph.add_module(name, module)
    return graph.graph.call_module(name, args)
