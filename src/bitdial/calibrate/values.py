"""The values that go from block to block, for all samples, at one setting; and how a block is run on them."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from bitdial.calibrate.blocks import Block
from bitdial.errors import ConfigError
from bitdial.prepare.model_call import Batch, call

Environment = dict[fx.Node, Any]  # the values of one batch, by the node that made them
AtNorm = Callable[[str, list[Tensor]], None]


class ReachedError(BaseException):
    """Raised by a hook: ends the pass of a batch. No model catches it."""


def run(root: nn.Module, nodes: Iterable[fx.Node], known: Environment) -> Environment:
    """Run `nodes` on the modules of `root`; `known`, with what they compute."""

    def value(node: fx.Node) -> Any:
        if node not in known and node.op == "get_attr":
            known[node] = _attribute(root, str(node.target))
        return known[node]

    for node in nodes:
        if node.op in ("placeholder", "get_attr"):
            continue
        args, kwargs = fx.map_arg(node.args, value), fx.map_arg(node.kwargs, value)
        if node.op == "call_module":
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
        self._joined: dict[fx.Node, Tensor] = {}

    def copy(self) -> "Values":
        """The same values, to go on with apart from these."""
        return Values(self.batches)

    def first(self, count: int) -> "Values":
        """The values of the first `count` batches, where a block begins."""
        return Values(self.batches[:count])

    def enter(self, root: nn.Module, block: Block) -> None:
        """Have the values that `block` reads; they are here already."""

    @torch.no_grad()
    def advance(self, root: nn.Module, block: Block, at_norm: AtNorm) -> None:
        """Replace what `block` reads by what it gives, in place.

        Before one of the block's norms runs, all batches have come to it: `at_norm` is called with its name and its
        inputs, and may change it. A ReachedError in a batch ends it for all of them.
        """
        self._joined.clear()
        norms, done = set(block.norms), 0
        for place, node in enumerate(block.nodes):
            if node.op == "call_module" and node.target in norms:
                if not self._run(root, block, done, place):
                    return
                at_norm(str(node.target), [batch[_first(node)] for batch in self.batches])
                done = place
        self._run(root, block, done, len(block.nodes))

    def _run(self, root: nn.Module, block: Block, start: int, end: int) -> bool:
        """Run some of the nodes of `block` batch by batch, and keep what later ones read; False if stopped on the way."""
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

    def distance(self, other: "Values", block: Block) -> float:
        """|x - y|^2 / |y|^2 of what `block` gave here, x, and in `other`, y."""
        node, apart, size = block.made[-1], 0.0, 0.0
        for own, wanted in zip(self.batches, other.batches, strict=True):
            x, y = own[node].double(), wanted[node].double()
            apart, size = apart + float((x - y).square().sum()), size + float(y.square().sum())
        return apart / max(size, 1e-30)

    def is_mixable(self, nodes: Iterable[fx.Node]) -> bool:
        """Whether the values of `nodes` are tensors whose first dimension counts samples, alike in all batches."""
        counts = set()
        for node in nodes:
            values = [batch[node] for batch in self.batches]
            if not all(isinstance(value, Tensor) and value.dim() for value in values):
                return False
            if len({(value.shape[1:], value.dtype) for value in values}) > 1:
                return False
            counts.add(tuple(map(len, values)))
        return len(counts) == 1

    def take(self, nodes: Iterable[fx.Node], chosen: Tensor | int) -> Environment:
        """The values of `nodes`: of samples, by their indices over all batches, as one batch; or of one batch."""
        if isinstance(chosen, int):
            return {node: _clone(self.batches[chosen][node]) for node in nodes}
        return {node: self._joined_values(node)[chosen] for node in nodes}

    def _joined_values(self, node: fx.Node) -> Tensor:
        if node not in self._joined:
            joined = torch.cat([batch[node] for batch in self.batches])
            sizes = [len(batch[node]) for batch in self.batches]
            for batch, part in zip(self.batches, joined.split(sizes), strict=True):
                batch[node] = part  # the same memory
            self._joined[node] = joined
        return self._joined[node]


def _clone(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


class UntracedValues(Values):
    """For a model that is not traced: what a module reads is found by running the model up to it, every time anew."""

    def __init__(self, inputs: Sequence[Batch]):
        super().__init__([{} for _ in inputs])
        self.inputs = inputs

    def copy(self) -> "Values":
        made = UntracedValues(self.inputs)
        made.batches = [dict(batch) for batch in self.batches]
        return made

    def enter(self, root: nn.Module, block: Block) -> None:
        self._joined.clear()
        (node,), module = block.reads, root.get_submodule(block.name)
        for batch, inputs in zip(self.batches, self.inputs, strict=True):
            batch.clear()
            batch[node] = _input_of(root, module, inputs, block.name)


def _input_of(root: nn.Module, module: nn.Module, inputs: Batch, name: str) -> Tensor:
    """What `module` gets when `root` runs on `inputs`, the first time it is called."""
    found: list[Tensor] = []

    def stop(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        found.append(args[0] if args else kwargs["input"])
        raise ReachedError

    handle = module.register_forward_pre_hook(stop, with_kwargs=True)
    try:
        with torch.no_grad():
            call(root, inputs)
    except ReachedError:
        return found[0]
    finally:
        handle.remove()
    raise ConfigError(f"the model did not call {name!r} on one of the batches; give it batches on which it does")


def _first(node: fx.Node) -> fx.Node:
    found = node.args[0] if node.args else node.kwargs["input"]
    assert isinstance(found, fx.Node)
    return found
