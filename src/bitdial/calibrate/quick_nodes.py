"""What a block calls in place of some of its nodes while it learns: on a GPU, kernels where PyTorch's are slow.

A norm by kept statistics takes the ReLU behind it along. Where kernels do not run, a node computes what it always did.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from bitdial.calibrate.blocks import Block
from bitdial.graph.patterns import RELU_BOUNDS, only_user
from bitdial.kernels import depthwise
from bitdial.kernels.kept_norm import can_normalize, normalize
from bitdial.nn import QuantConv2d, SwitchableBatchNorm
from bitdial.nn.norms import batch_norm_type

Call = Callable[..., Any]


def quick_nodes(model: nn.Module, block: Block) -> dict[fx.Node, Call]:
    """What is called in place of nodes of `block`, by the node."""
    found: dict[fx.Node, Call] = {}
    inside = set(block.nodes)
    for node in block.nodes:
        module = _module(model, node)
        if isinstance(module, SwitchableBatchNorm) and batch_norm_type(module.active) is not None:
            relu = only_user(node)
            bound = _relu_max(model, relu) if relu in inside and node not in block.gives else None
            found[node] = partial(_norm, module, bound)
            if relu is not None and bound is not None:
                found[relu] = _as_it_is
        elif isinstance(module, QuantConv2d) and depthwise.fits(module):
            found[node] = partial(_depthwise, module)
    return found


def _module(model: nn.Module, node: fx.Node | None) -> nn.Module | None:
    """The module that `node` calls; None if it calls none, or one that somebody watches."""
    if node is None or node.op != "call_module":
        return None
    module = model.get_submodule(str(node.target))
    return None if module._forward_hooks or module._forward_pre_hooks else module


def _relu_max(model: nn.Module, node: fx.Node | None) -> float | None:
    """The upper bound of the ReLU that `node` is, None if it is none."""
    if node is None:
        return None
    return RELU_BOUNDS.get(type(_module(model, node)) if node.op == "call_module" else node.target)


def _norm(norm: SwitchableBatchNorm, relu_max: float | None, input: Tensor) -> Tensor:
    """The set of `norm` in use, and the ReLU behind it unless its bound is None."""
    if can_normalize(norm.active, input):
        return normalize(input, norm.active, relu_max)
    found: Tensor = norm(input)
    if relu_max is None:
        return found
    return torch.relu(found) if relu_max == math.inf else F.relu6(found)


def _depthwise(layer: QuantConv2d, input: Tensor) -> Tensor:
    """What `layer` computes."""
    x, weight = layer.quantized_input(input), layer.quantized_weight()
    if depthwise.can_convolve(x, weight, layer):
        return depthwise.convolve(x, weight, layer)
    return layer.kind.product(layer, x, weight, layer.bias)


def _as_it_is(input: Tensor, *settings: Any, **more: Any) -> Tensor:
    """`input`: what a ReLU gives whose norm has done its work; it is called with all that the ReLU was."""
    return input
