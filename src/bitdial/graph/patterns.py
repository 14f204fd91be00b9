"""Traced models (torch.fx): what their nodes are, and new calls in them. For those who fuse layers."""

import math
import operator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import fx, nn

ADDITIONS = (operator.add, torch.add, "add")
IN_PLACE_ADDITIONS = (operator.iadd, "add_")
RELU_BOUNDS: dict[Any, float] = {
    nn.ReLU: math.inf,
    nn.ReLU6: 6.0,
    F.relu: math.inf,
    F.relu6: 6.0,
    torch.relu: math.inf,
    torch.relu_: math.inf,
    "relu": math.inf,
    "relu_": math.inf,
}
MAX_POOLS = (F.max_pool2d, torch.max_pool2d)
POOL_ARGUMENTS = ("kernel_size", "stride", "padding", "dilation", "ceil_mode", "return_indices")


class MaxPool(NamedTuple):
    """The windows of a max pool: rows and columns each."""

    kernel: list[int]
    stride: list[int]
    padding: list[int]
    dilation: list[int]


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


def relu_max(graph: fx.GraphModule, node: fx.Node) -> float | None:
    """The upper bound of the ReLU that `node` is, None if it is none."""
    return RELU_BOUNDS.get(type(module_of(graph, node)) if node.op == "call_module" else node.target)


def take_epilogue(graph: fx.GraphModule, chain: list[fx.Node]) -> tuple[fx.Node | None, float | None]:
    """Append the addition and the ReLU behind the end of `chain` to it; what is added, and the ReLU's bound."""
    residual = bound = None
    user = only_user(chain[-1])
    if user is not None and (residual := added(chain[-1], user)) is not None:
        chain.append(user)
        user = only_user(user)
    if user is not None and (bound := relu_max(graph, user)) is not None:
        chain.append(user)
    return residual, bound


def max_pool(graph: fx.GraphModule, node: fx.Node) -> MaxPool | None:
    """The max pool that `node` is; None if it is none, or one of which more is asked than the largest of known windows.

    Each window must hold a pixel: one of spread taps over the edge of a small image may not.
    """
    if not node.args:  # its input has a name
        return None
    if node.op == "call_module" and type(pool := module_of(graph, node)) is nn.MaxPool2d:
        given = {name: getattr(pool, name) for name in POOL_ARGUMENTS}
    elif node.op == "call_function" and node.target in MAX_POOLS:
        given = dict(zip(POOL_ARGUMENTS, node.args[1:], strict=False)) | node.kwargs
    else:
        return None
    kernel, stride = given.get("kernel_size"), given.get("stride")
    pairs = [_pair(p) for p in (kernel, stride or kernel, given.get("padding", 0), given.get("dilation", 1))]
    if given.get("ceil_mode") or given.get("return_indices") or not all(pairs):
        return None
    found = MaxPool(*pairs)
    each = zip(*found, strict=True)
    holds = all(min(k, s, d) > 0 and 0 <= 2 * p <= k and (p == 0 or d == 1) for k, s, p, d in each)
    return found if holds else None


def _pair(value: Any) -> list[int]:
    """`value` for rows and for columns, nothing if it is not known before the model runs."""
    values = list(value) if isinstance(value, tuple | list) else [value]
    known = len(values) in (1, 2) and all(isinstance(v, int) for v in values)
    return (values * 2)[:2] if known else []


def insert_call(graph: fx.GraphModule, kind: str, module: nn.Module, args: tuple[Any, ...]) -> fx.Node:
    """A node that calls the new `module`, named by its `kind`, where the graph inserts."""
    name = f"{kind}_{sum(1 for n in graph._modules if n.startswith(f'{kind}_'))}"
    graph.add_module(name, module)
    return graph.graph.call_module(name, args)
