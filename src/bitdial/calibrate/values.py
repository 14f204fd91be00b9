"""The values that go from block to block, for all samples, at one setting; and how a block is run on them."""

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_flatten

from bitdial.calibrate.blocks import Block
from bitdial.calibrate.positions import position_weights
from bitdial.calibrate.steps import Skip, skipping
from bitdial.errors import ConfigError
from bitdial.nn import QuantLayer, SwitchableBatchNorm
from bitdial.prepare.model_call import Batch, call

Environment = dict[fx.Node, Any]  # the values of one batch, by the node that made them
AtNorm = Callable[[str, list[Tensor]], None]


class ReachedError(BaseException):
    """Raised by a hook: ends the pass of a batch. No model catches it."""


def run(
    root: nn.Module,
    nodes: Iterable[fx.Node],
    known: Environment,
    instead: Mapping[fx.Node, Callable[..., Any]] = MappingProxyType({}),
) -> Environment:
    """Run `nodes` on the modules of `root`; `known`, with what they compute. `instead`: what some of them call."""

    def value(node: fx.Node) -> Any:
        if node not in known and node.op == "get_attr":
            known[node] = _attribute(root, str(node.target))
        return known[node]

    for node in nodes:
        if node.op in ("placeholder", "get_attr"):
            continue
        args, kwargs = fx.map_arg(node.args, value), fx.map_arg(node.kwargs, value)
        if node in instead:
            known[node] = instead[node](*args, **kwargs)
        elif node.op == "call_module":
            known[node] = root.get_submodule(str(node.target))(*args, **kwargs)
        elif node.op == "call_method":
            known[node] = getattr(args[0], str(node.target))(*args[1:], **kwargs)
        else:
            known[node] = node.target(*args, **kwargs)  # type: ignore[operator]
    return known


def _attribute(root: Any, path: str) -> Any:
    for part in path.split("."):
        root = getattr(root, part)
    return root


class Values:
    """What goes on between two blocks: for each batch, the value of each node that is still needed."""

    def __init__(self, batches: Sequence[Environment]):
        self.batches = [dict(batch) for batch in batches]
        self.weights: dict[fx.Node, list[Tensor]] = {}  # of the pixels of what the last block gave
        self._joined: dict[fx.Node, Tensor] = {}

    def copy(self) -> "Values":
        """The same values, to go on with apart from these."""
        return Values(self.batches)

    def first(self, count: int) -> "Values":
        """The values of the first `count` batches, where a block begins."""
        return Values(self.batches[:count])

    def enter(self, root: nn.Module, block: Block, plain: "Values | None" = None) -> None:
        """Have the values that `block` reads, of which the float model has `plain`; they are here already."""

    @torch.no_grad()
    def advance(self, root: nn.Module, block: Block, at_norm: AtNorm) -> None:
        """Replace what `block` reads by what it gives, in place.

        Before one of the block's norms runs, all batches have come to it: `at_norm` is called with its name and its
        inputs, those of all calls if it is called several times in a row, and may change it. A ReachedError in a batch
        ends it for all of them.
        """
        self._joined.clear()
        self.weights = {}
        with _weights_once(root, block):
            self._advance(root, block, at_norm)

    def _advance(self, root: nn.Module, block: Block, at_norm: AtNorm) -> None:
        norms, done = set(block.norms), 0
        for place, node in enumerate(block.nodes):
            if node.op == "call_module" and node.target in norms:
                if place and _is_call(str(node.target), block.nodes[place - 1]):
                    continue
                if not self._run(root, block, done, place):
                    return
                several = itertools.takewhile(functools.partial(_is_call, str(node.target)), block.nodes[place:])
                reads = [_first(each) for each in several]
                at_norm(str(node.target), [batch[read] for batch in self.batches for read in reads])
                done = place
        self._run(root, block, done, len(block.nodes))

    def _run(self, root: nn.Module, block: Block, start: int, end: int) -> bool:
        """Run some of the nodes of `block` batch by batch, and keep what later ones read. False: it was stopped."""
        later, given, whole = set(block.nodes[end:]), set(block.gives), True
        for batch in self.batches:
            try:
                run(root, block.nodes[start:end], batch)
            except ReachedError:
                whole = False
                continue
            for node in [n for n in batch if n not in given and later.isdisjoint(n.users)]:
                del batch[node]
        return whole

    def weigh(self, block: Block, image_dims: int) -> None:
        """Weigh the pixels of what `block` gave, for distances from it, where it is images with `image_dims` axes."""
        self.weights = {}
        for node in self.results(block) if image_dims > 1 else ():
            given = [batch[node] for batch in self.batches]
            if all(x.dim() == image_dims + 2 for x in given):
                self.weights[node] = position_weights(given, 1)

    def results(self, block: Block) -> list[fx.Node]:
        """The nodes whose values `block` has made, and which are tensors of floats: several for a feature pyramid."""
        known = self.batches[0]
        return [n for n in block.made if isinstance(value := known.get(n), Tensor) and value.is_floating_point()]

    def distance(self, other: "Values", block: Block) -> float:
        """|x - y|^2 / |y|^2 of what `block` gave here, x, and in `other`, y; with the weights of `other`, if any."""
        sums = []
        for node in other.results(block):
            for place, (own, wanted) in enumerate(zip(self.batches, other.batches, strict=True)):
                x, y = own[node].double(), wanted[node].double()
                both = [(x - y).square_(), y.square()]
                if node in other.weights:
                    both = [squares.mul_(other.weights[node][place]) for squares in both]
                sums.append(torch.stack([squares.sum() for squares in both]))
        found = torch.stack(sums).tolist() if sums else []  # a GPU is waited for once
        apart, size = (sum(each[place] for each in found) for place in range(2))
        return float(apart / max(size, 1e-30))

    def is_mixable(self, nodes: Sequence[fx.Node]) -> bool:
        """Whether samples of several batches can be put together: the first node's first dimension counts them.

        Of the other nodes it does so, too, or their values are the same for all samples.
        """
        first = [batch[nodes[0]] for batch in self.batches]
        return self._counts_samples(nodes[0], first) and all(
            self._counts_samples(node, first) or self._is_shared(node) for node in nodes[1:]
        )

    def _counts_samples(self, node: fx.Node, like: Sequence[Any]) -> bool:
        values = [batch[node] for batch in self.batches]
        if not all(isinstance(value, Tensor) and value.dim() for value in values):
            return False
        alike = len({(value.shape[1:], value.dtype) for value in values}) == 1
        return alike and [*map(len, values)] == [*map(len, like)]

    def _is_shared(self, node: fx.Node) -> bool:
        """Whether `node` has one value in all batches, of tensors that suit any number of samples."""
        first, *others = (tree_flatten(batch[node]) for batch in self.batches)
        tensors = [leaf for leaf in first[0] if isinstance(leaf, Tensor)]
        return all(len(tensor) == 1 for tensor in tensors if tensor.dim()) and all(
            spec == first[1] and all(map(_equal, leaves, first[0])) for leaves, spec in others
        )

    def take(self, nodes: Sequence[fx.Node], chosen: Tensor | int) -> Environment:
        """The values of `nodes`: of samples, by their indices over all batches, as one batch; or of one batch."""
        if isinstance(chosen, int):
            return {node: _clone(self.batches[chosen][node]) for node in nodes}
        first = [batch[nodes[0]] for batch in self.batches]
        mixed = {node: self._counts_samples(node, first) for node in nodes}
        return {n: self._joined_values(n)[chosen] if mixed[n] else self.batches[0][n] for n in nodes}

    def _joined_values(self, node: fx.Node) -> Tensor:
        if node not in self._joined:
            joined = torch.cat([batch[node] for batch in self.batches])
            sizes = [len(batch[node]) for batch in self.batches]
            for batch, part in zip(self.batches, joined.split(sizes), strict=True):
                batch[node] = part  # the same memory
            self._joined[node] = joined
        return self._joined[node]


@contextmanager
def _weights_once(root: nn.Module, block: Block) -> Iterator[None]:
    """Let the layers of `block` quantise their weights once, not for each batch anew; nothing may change them."""
    modules = [root.get_submodule(name) for name in block.layers]
    layers: list[Any] = [module for module in modules if isinstance(module, QuantLayer)]
    try:
        for layer in layers:
            layer.quantized_weight = functools.cache(layer.quantized_weight)
        yield
    finally:
        for layer in layers:
            vars(layer).pop("quantized_weight", None)


def _equal(first: Any, second: Any) -> bool:
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        return torch.equal(first, second)
    return first is second or (not isinstance(first, Tensor) and bool(first == second))


def _clone(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


class SteppedValues(Values):
    """For a model that is not traced: what a module reads is found by running the model up to it.

    `skips` are the modules that need not run again on the way to each block; by default there are none.
    """

    def __init__(self, inputs: Sequence[Batch], skips: Mapping[Block, Sequence[Skip]] | None = None):
        super().__init__([{} for _ in inputs])
        self.inputs, self.skips = inputs, skips or {}

    def copy(self) -> "Values":
        made = SteppedValues(self.inputs, self.skips)
        made.batches = [dict(batch) for batch in self.batches]
        return made

    def enter(self, root: nn.Module, block: Block, plain: Values | None = None) -> None:
        self._joined.clear()
        module = root.get_submodule(block.name)
        for batch, inputs in zip(self.batches, self.inputs, strict=True):
            with skipping(root, self.skips.get(block, ()), batch):
                found = _arguments_of(root, module, inputs, block.name)
            if len(found) != len(block.reads):
                raise ConfigError(
                    f"the model calls {block.name!r} with other arguments on another batch; give it batches of one form"
                )
            kept = {node: batch[node] for node in block.gives if node in batch}
            batch.clear()
            batch.update(kept)
            batch.update(zip(block.reads, found, strict=True))


def _arguments_of(root: nn.Module, module: nn.Module, inputs: Batch, name: str) -> list[Any]:
    """What `module` gets when `root` runs on `inputs`, the first time it is called; of a layer or norm, its input."""
    found: list[Any] = []
    single = isinstance(module, QuantLayer | SwitchableBatchNorm) or not list(module.children())

    def stop(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        every = (*args, *kwargs.values())
        found.extend(every[:1] if single and args else (kwargs["input"],) if single else every)
        raise ReachedError

    handle = module.register_forward_pre_hook(stop, with_kwargs=True)
    try:
        with torch.no_grad():
            call(root, inputs)
    except ReachedError:
        return found
    finally:
        handle.remove()
    raise ConfigError(f"the model did not call {name!r} on one of the batches; give it batches on which it does")


def _is_call(module: str, node: fx.Node) -> bool:
    return node.op == "call_module" and node.target == module


def _first(node: fx.Node) -> fx.Node:
    found = node.args[0] if node.args else node.kwargs["input"]
    assert isinstance(found, fx.Node)
    return found
