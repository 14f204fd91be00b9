"""Where a factor for each channel can be put into a model without changing what it computes.

A *channel space* is all values between some producers and some readers that nothing mixes over channels: the norm of a
layer, the ReLU behind it, the layer that reads it; or a residual stream, with all norms that add to it and all layers
that read it. If the producers make channel c k_c times as large and the readers' weights for it are divided by k_c,
nothing changes: additions, ReLUs, pools and padding do not mind. A ReLU6 does where a channel reaches its bound.
"""

import math
from dataclasses import dataclass, field
from typing import Any

from torch import fx, nn

from bitdial.calibrate.blocks import Block
from bitdial.graph.patterns import ADDITIONS, IN_PLACE_ADDITIONS, RELU_BOUNDS
from bitdial.nn import QuantLayer, SwitchableBatchNorm
from bitdial.nn.norms import batch_norm_type

_PASSES: tuple[type[nn.Module], ...] = (
    nn.Identity, nn.Dropout, nn.Dropout2d, nn.ZeroPad2d, nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d, nn.LeakyReLU,
)  # fmt: skip
_PASS_FUNCTIONS = ("flatten", "max_pool2d", "avg_pool2d", "adaptive_avg_pool2d", "dropout", "leaky_relu")


@dataclass(eq=False)
class Space:
    """The norms and layers that make its values, the layers that read them, and the least bound of a ReLU in it."""

    producers: list[str] = field(default_factory=list)
    readers: list[str] = field(default_factory=list)
    bound: float = math.inf
    adds: bool = False
    closed: bool = False  # something else has to do with its values

    def take(self, other: "Space") -> None:
        """Become one with `other`."""
        self.producers += other.producers
        self.readers += other.readers
        self.bound, self.adds = min(self.bound, other.bound), self.adds or other.adds
        self.closed = self.closed or other.closed


def find_spaces(model: nn.Module, blocks: list[Block]) -> list[Space]:
    """The channel spaces of `model` with producers and readers of as many channels each."""
    found = _Spaces(model)
    nodes = [node for block in blocks for node in block.nodes]
    for node in nodes:
        found.visit(node)
    for node in nodes:
        if any(user.op == "output" for user in node.users):
            found.of(node).closed = True
    calls = [str(node.target) for node in nodes if node.op == "call_module"]
    once = {name for name in calls if calls.count(name) == 1}
    spaces = list(dict.fromkeys(map(found.of, nodes)))
    return [space for space in spaces if _is_usable(model, space, once)]


class _Spaces:
    """The space of each node, found by going through them in order."""

    def __init__(self, model: nn.Module):
        self.model = model
        self._space: dict[fx.Node, Space] = {}

    def of(self, node: fx.Node) -> Space:
        return self._space[node]

    def visit(self, node: fx.Node) -> None:
        module = self.model.get_submodule(str(node.target)) if node.op == "call_module" else None
        inputs = [self._space[n] for n in node.all_input_nodes]
        if isinstance(module, QuantLayer) and module.kind.multiplies and len(inputs) == 1:
            inputs[0].readers.append(str(node.target))
            self._space[node] = Space(producers=[str(node.target)])
        elif isinstance(module, SwitchableBatchNorm) and len(inputs) == 1:
            self._norm(node, module, inputs[0])
        elif inputs and (bound := self._passes(node, module)) is not None:
            self._join(node, inputs, bound)
        else:
            for space in inputs:
                space.closed = True
            self._space[node] = Space(closed=True)

    def _norm(self, node: fx.Node, norm: SwitchableBatchNorm, before: Space) -> None:
        """A norm makes a space of its own; what it reads stays as it is."""
        before.closed = True
        usable = batch_norm_type(norm.active) is not None and norm.active.weight is not None
        self._space[node] = Space(producers=[str(node.target)], closed=not usable)

    def _join(self, node: fx.Node, inputs: list[Space], bound: float) -> None:
        first, *others = dict.fromkeys(inputs)
        for other in others:
            first.take(other)
            for key, value in self._space.items():
                if value is other:
                    self._space[key] = first
        first.bound = min(first.bound, bound)
        first.adds = first.adds or len(node.all_input_nodes) > 1
        self._space[node] = first

    def _passes(self, node: fx.Node, module: nn.Module | None) -> float | None:
        """The bound on what passes `node`, infinity if there is none; None if it is more than passing."""
        target: Any = node.target if module is None else type(module)
        if target in RELU_BOUNDS:
            return RELU_BOUNDS[target]
        tensors = [argument for argument in node.args if isinstance(argument, fx.Node)]
        if target in ADDITIONS or target in IN_PLACE_ADDITIONS:
            return math.inf if len(tensors) == 2 and not node.kwargs else None
        name = target if isinstance(target, str) else getattr(target, "__name__", "")
        passes = issubclass(target, _PASSES) if module is not None else name in _PASS_FUNCTIONS
        return math.inf if passes and len(tensors) == 1 else None


def _is_usable(model: nn.Module, space: Space, once: set[str]) -> bool:
    names = {*space.producers, *space.readers}
    if space.closed or not space.producers or not space.readers or not names <= once:
        return False
    if space.adds and not math.isinf(space.bound):  # what a ReLU6 bounds is then not what is read
        return False
    sizes = {outputs_of(model.get_submodule(name)) for name in space.producers}
    return len(sizes | {inputs_of(model.get_submodule(name)) for name in space.readers}) == 1


def outputs_of(module: Any) -> int:
    """How many channels a layer or norm gives."""
    return int(module.weight_rows().shape[0]) if isinstance(module, QuantLayer) else int(module.num_features)


def inputs_of(layer: Any) -> int:
    """How many channels a layer reads."""
    return int(layer.weight_rows().shape[1]) * int(getattr(layer, "groups", 1))
