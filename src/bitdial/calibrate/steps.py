"""Blocks of a model that cannot be traced: the modules that it runs one after the other, such as decoder layers.

transformers' models take any keyword arguments, and torch.fx cannot follow those. But most of their weights lie in a
list of modules of one class, each of which takes a hidden state and gives the next. Such a module is a block. Layers
outside of these lists are blocks of their own.

What a block reads, masks and position embeddings included, is found by running the model up to it, in which modules
that are done are skipped: the last of a list gives what it gave before, and those in front of it need not run.
"""

import itertools
import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves

from bitdial.calibrate.blocks import Block
from bitdial.nn import QuantLayer, SwitchableBatchNorm
from bitdial.prepare.model_call import Batch, call

Row = tuple[str, ...]  # the names of modules that run one after the other
MOST_KEPT = 1 << 18


@dataclass
class Call:
    """How a module was called: when it began and ended, with what, and what it gave."""

    start: int
    end: int
    args: int
    kwargs: tuple[str, ...]
    shape: torch.Size | None  # that of the hidden state, if it takes and gives one
    rest: tuple[Any, ...] | None  # what it gave behind the hidden state; None: the state alone


@dataclass(frozen=True, eq=False)
class Skip:
    """A module that need not run again: it gives the value of `node`, or, where that is not kept, what it takes."""

    name: str
    node: fx.Node
    rest: tuple[Any, ...] | None

    def give(self, hidden: Tensor) -> Any:
        """The output of the module if its hidden state is `hidden`."""
        return hidden if self.rest is None else (hidden, *self.rest)


def find_rows(model: nn.Module, batch: Batch) -> tuple[list[Row], dict[str, Call]]:
    """The lists of `model` whose modules are blocks, the outermost first, and how these were called on `batch`."""
    rows = list(_candidates(model))
    calls = _record(model, [name for row in rows for name in row], batch)
    found: list[Row] = []
    for row in rows:
        inside = any(row[0].startswith(f"{name}.") for outer in found for name in outer)
        if not inside and _is_chain(row, calls):
            found.append(row)
    return found, {name: calls[name][0] for row in found for name in row}


def _candidates(model: nn.Module) -> Iterator[Row]:
    """Lists of modules of one class, each with quantised layers in it."""
    for name, module in model.named_modules():
        if not isinstance(module, nn.ModuleList | nn.Sequential) or len({type(child) for child in module}) != 1:
            continue
        held = [list(child.modules())[1:] for child in module]
        normed = any(isinstance(part, SwitchableBatchNorm) for parts in held for part in parts)
        if not normed and all(any(isinstance(part, QuantLayer) for part in parts) for parts in held):
            yield tuple(f"{name}.{key}".removeprefix(".") for key, _ in module.named_children())


def _record(model: nn.Module, names: Sequence[str], batch: Batch) -> dict[str, list[Call]]:
    """How the modules `names` are called when `model` runs on `batch`."""
    clock = itertools.count()
    calls: dict[str, list[Call]] = {name: [] for name in names}

    def before(name: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            calls[name].append(Call(next(clock), -1, len(args), tuple(kwargs), None, None))

        return hook

    def after(name: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
            record = calls[name][-1]
            first, rest = (out[0], out[1:]) if type(out) is tuple and out else (out, None)
            record.end, record.rest = next(clock), rest
            if args and _is_like(first, args[0]) and not any(isinstance(leaf, Tensor) for leaf in tree_leaves(rest)):
                record.shape = first.shape

        return hook

    with ExitStack() as stack:
        for name in names:
            module = model.get_submodule(name)
            stack.callback(module.register_forward_pre_hook(before(name), with_kwargs=True).remove)
            stack.callback(module.register_forward_hook(after(name), with_kwargs=True).remove)
        with torch.no_grad():
            call(model, batch)
    return calls


def _is_like(first: Any, second: Any) -> bool:
    """Whether both are tensors of floats, alike in shape and dtype."""
    both = isinstance(first, Tensor) and isinstance(second, Tensor) and first.is_floating_point()
    return both and first.shape == second.shape and first.dtype == second.dtype


def _is_chain(row: Row, calls: Mapping[str, list[Call]]) -> bool:
    """Whether the modules of `row` run once each, one after the other, each on a hidden state."""
    if any(len(calls[name]) != 1 or calls[name][0].shape is None for name in row):
        return False
    found = [calls[name][0] for name in row]
    return all(one.end < two.start for one, two in itertools.pairwise(found))


@dataclass(frozen=True)
class Steps:
    """Blocks in the order in which they run; what can be skipped on the way to each, and if all are done."""

    blocks: list[Block]
    skips: dict[Block, tuple[Skip, ...]]
    every: tuple[Skip, ...]


def step_blocks(order: Mapping[str, nn.Module], rows: Sequence[Row], calls: Mapping[str, Call]) -> Steps:
    """A block for each module of `rows`, and for each layer or norm outside of them.

    `order` has the layers, norms and modules of `rows` in the order in which they run.
    """
    graph, blocks = fx.Graph(), list[Block]()
    row_of = {name: row for row in rows for name in row}
    inside = {name: next((n for n in row_of if name.startswith(f"{n}.")), None) for name in order}
    skips: dict[Block, tuple[Skip, ...]] = {}
    done, newest = list[Skip](), dict[Row, fx.Node]()  # `newest`: what the last module of each row gave
    for name, module in order.items():
        if inside[name] is not None:
            continue
        row = row_of.get(name)
        kept = tuple(node for other, node in newest.items() if other is not row)
        if row is None:
            block = _single(graph, name, module, kept, is_head=bool(rows) and name == [*order][-1])
        else:
            layers = tuple(inner for inner in order if inside[inner] == name)
            block = _whole(graph, name, calls[name], layers, kept)
        blocks.append(block)
        skips[block] = tuple(done)
        if row is not None:
            newest[row] = block.made[-1]
            done.append(Skip(name, newest[row], calls[name].rest))
    return Steps(blocks, skips, tuple(done))


def _single(graph: fx.Graph, name: str, module: nn.Module, kept: tuple[fx.Node, ...], *, is_head: bool) -> Block:
    """A layer or norm by itself. Of what a head gives, a part is kept: there may be a hundred thousand words."""
    reads = graph.placeholder("input")
    nodes, own = [graph.call_module(name, (reads,))], (name,)
    if is_head:
        nodes.append(graph.call_function(thinned, (nodes[0],)))
    kinds = (own, ()) if isinstance(module, QuantLayer) else ((), own)
    return Block(name, tuple(nodes), (reads,), (*kept, nodes[-1]), *kinds)


def single_block(name: str, module: nn.Module) -> Block:
    """The block of the layer or norm `module` by itself."""
    return _single(fx.Graph(), name, module, (), is_head=False)


def thinned(x: Tensor) -> Tensor:
    """`x`; of (samples, places, channels), places in even steps such that a sample has at most MOST_KEPT numbers."""
    if x.dim() != 3 or x[0].numel() <= MOST_KEPT:
        return x
    return x[:, :: math.ceil(x[0].numel() / max(MOST_KEPT, x.shape[2]))].clone()


def _whole(graph: fx.Graph, name: str, form: Call, layers: tuple[str, ...], kept: tuple[fx.Node, ...]) -> Block:
    """A module with all that is in it."""
    reads = [graph.placeholder("argument") for _ in range(form.args + len(form.kwargs))]
    kwargs: dict[str, Any] = dict(zip(form.kwargs, reads[form.args :], strict=True))
    nodes = [graph.call_module(name, tuple(reads[: form.args]), kwargs)]
    if form.rest is not None:
        nodes.append(graph.call_function(operator.getitem, (nodes[0], 0)))
    return Block(name, tuple(nodes), tuple(reads), (*kept, nodes[-1]), layers, ())


@contextmanager
def skipping(root: nn.Module, skips: Sequence[Skip], known: Mapping[fx.Node, Any]) -> Iterator[None]:
    """Let the modules of `skips` give what `known` has of them instead of running."""

    def stand_in(skip: Skip) -> Any:
        return lambda hidden, *args, **kwargs: skip.give(known.get(skip.node, hidden))

    modules: list[Any] = [root.get_submodule(skip.name) for skip in skips]
    own = [module.__dict__.get("forward") for module in modules]
    try:
        for module, skip in zip(modules, skips, strict=True):
            module.forward = stand_in(skip)
        yield
    finally:
        for module, forward in zip(modules, own, strict=True):
            del module.forward
            if forward is not None:
                module.forward = forward


@contextmanager
def caches_off(model: nn.Module) -> Iterator[None]:
    """Let transformers' models keep no keys and values: a block that runs twice would find those of its first run."""
    configs = {id(config): config for config in (getattr(module, "config", None) for module in model.modules())}
    changed: list[Any] = [config for config in configs.values() if getattr(config, "use_cache", None) is True]
    try:
        for config in changed:
            config.use_cache = False
        yield
    finally:
        for config in changed:
            config.use_cache = True
