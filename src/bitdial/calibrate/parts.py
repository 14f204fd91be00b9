"""Parts of a model that cannot be traced as a whole: a detector's backbone with its pyramid, its heads.

A detector takes a list of images and keeps the boxes of the best scores, which torch.fx cannot follow. But most of its
layers lie in modules that it can: they take tensors, or lists of them. Each such module, the outermost first, is a
part, with blocks of its own. Layers outside of all are parts by themselves.

What a part reads is found by running the model up to it, batch by batch and call by call: a head that is called on
every level reads them all. Where what it reads was chosen by what layers gave, such as crops at the best boxes, the
choice is another at each width, and nothing could be compared. Such a part reads the float model's at all widths.
"""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx._symbolic_trace import PH
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map, tree_structure
from torch.utils.weak import WeakIdKeyDictionary

from bitdial.calibrate.blocks import Block, find_blocks
from bitdial.calibrate.steps import single_block
from bitdial.calibrate.values import ReachedError, Values, run
from bitdial.errors import ConfigError
from bitdial.nn import QuantLayer, SwitchableBatchNorm
from bitdial.prepare.choosing import split_arguments, written_by
from bitdial.prepare.model_call import Batch, call

PLAIN = (type(None), bool, int, float, str)  # what a part may take besides tensors


@dataclass(frozen=True, eq=False)
class Part:
    """A module of the model, or a layer. `reads` are the nodes of its arguments, tensor by tensor.

    `once`: it is called once in a pass. `chosen`: what it reads was chosen by what layers gave.
    """

    name: str
    blocks: tuple[Block, ...]
    reads: tuple[fx.Node, ...]
    once: bool
    chosen: bool


@dataclass(frozen=True)
class _Call:
    """One call of a module: its arguments in the order of its forward, and what it gave."""

    arguments: tuple[Any, ...]
    out: Any


CHOSEN = ""  # what a tensor carries that was taken from places which layers gave; no module has this name


class _Choices(TorchFunctionMode):
    """Follows what is computed from the outputs of modules, by their names, and what was taken from such places."""

    def __init__(self) -> None:
        super().__init__()
        self.names = WeakIdKeyDictionary()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        names, places = self.of((args, kwargs)), split_arguments(func, args, kwargs)[1]
        if names:
            self.mark((out, written_by(func, args, kwargs)), names | {CHOSEN} if self.of(places) else names)
        return out

    def of(self, values: object) -> frozenset[str]:
        """The names that the tensors in `values` carry."""
        found = [self.names.get(leaf, frozenset()) for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]
        return frozenset[str]().union(*found)

    def mark(self, values: object, names: frozenset[str]) -> None:
        """Let the tensors in `values` carry `names` too."""
        for leaf in tree_leaves(values):
            if isinstance(leaf, Tensor):
                self.names[leaf] = names | self.names.get(leaf, frozenset())


def find_parts(model: nn.Module, batch: Batch) -> list[Part]:
    """The parts of `model`, in the order in which they first run on `batch`; none if a module reads what it gave."""
    held = {n: m for n, m in model.named_modules() if n and any(_is_ours(inner) for inner in m.modules())}
    calls, read = _record(model, held, batch)
    if any(name in names for name, names in read.items()):
        return []
    found: dict[str, Part] = {}

    def visit(name: str, module: nn.Module) -> None:
        if name in calls:
            part = _part(model, name, calls[name], chosen=CHOSEN in read[name])
            if part is not None:
                found[name] = part
                return
        if not _is_ours(module):
            for key, child in module.named_children():
                inner = f"{name}.{key}" if name else key
                if inner in held:
                    visit(inner, child)

    visit("", model)
    return [found[name] for name in calls if name in found]


def _is_ours(module: nn.Module) -> bool:
    """Whether `module` is something to calibrate."""
    return isinstance(module, SwitchableBatchNorm) or (isinstance(module, QuantLayer) and module.kind.multiplies)


def _record(
    model: nn.Module, modules: Mapping[str, nn.Module], batch: Batch
) -> tuple[dict[str, list[_Call]], dict[str, frozenset[str]]]:
    """The calls of `modules` in a pass over `batch`, and the names that what each reads carries."""
    calls: dict[str, list[_Call]] = {}
    read: dict[str, frozenset[str]] = {}
    choices = _Choices()

    def before(name: str, args: Any, kwargs: Any) -> None:
        calls.setdefault(name, [])  # in the order in which they begin
        read[name] = read.get(name, frozenset()) | choices.of((args, kwargs))

    def after(name: str, module: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
        calls[name].append(_Call(_arguments(module, args, kwargs), out))
        choices.mark(out, frozenset((name,)))

    with ExitStack() as stack:
        for name, module in modules.items():
            first = module.register_forward_pre_hook(lambda m, a, k, name=name: before(name, a, k), with_kwargs=True)
            last = module.register_forward_hook(lambda m, a, k, o, name=name: after(name, m, a, k, o), with_kwargs=True)
            stack.callback(first.remove)
            stack.callback(last.remove)
        with torch.no_grad(), choices:
            call(model, batch)
    return calls, read


def _arguments(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """The arguments of a call in the order of the forward; of a layer or a norm, its input."""
    if _is_ours(module):
        return (args[0] if args else kwargs["input"],)
    bound = inspect.signature(module.forward).bind(*args, **kwargs)
    bound.apply_defaults()
    return tuple(bound.arguments.values())


def _part(model: nn.Module, name: str, calls: list[_Call], *, chosen: bool) -> Part | None:
    """The part that the module `name` is; None if it must be taken by what is in it."""
    module, once = model.get_submodule(name), len(calls) == 1
    if _is_ours(module):
        block = single_block(name, module)
        return Part(name, (block,), block.nodes[:1], once, chosen)
    if len({str(tree_structure(each.arguments)) for each in calls}) != 1:
        return None
    try:
        blocks = _traced(model, name, calls[0])
    except ConfigError:
        return None
    reads = tuple(node for block in blocks for node in block.nodes if node.op == "placeholder")
    return Part(name, tuple(blocks), reads, once, chosen)


def _traced(model: nn.Module, name: str, one: _Call) -> list[Block]:
    """The blocks of the module `name`; ConfigError if its graph is not what it computes."""
    parameters = inspect.signature(model.get_submodule(name).forward).parameters
    if any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters.values()):
        raise ConfigError("its forward takes any arguments")
    leaves = tree_leaves(one.arguments)
    if not all(isinstance(leaf, (Tensor, *PLAIN)) for leaf in leaves):
        raise ConfigError("it takes more than tensors")
    arguments = zip(parameters, one.arguments, strict=True)
    forms = {key: tree_map(lambda leaf: PH if isinstance(leaf, Tensor) else leaf, value) for key, value in arguments}
    blocks = find_blocks(model, forms, inside=name)
    places = [node for block in blocks for node in block.nodes if node.op == "placeholder"]
    if len(places) != len(leaves) or any(isinstance(leaf, Tensor) and not leaf.numel() for leaf in leaves):
        raise ConfigError("its graph has other inputs")
    start = dict(zip(places, (_clone(leaf) for leaf in leaves), strict=True))
    known, versions = dict(start), {n: v._version for n, v in start.items() if isinstance(v, Tensor)}
    with torch.no_grad():
        for block in blocks:
            run(model, block.nodes, known)
    made = [value for value in known.values() if isinstance(value, Tensor)]
    wanted = [leaf for leaf in tree_leaves(one.out) if isinstance(leaf, Tensor)]
    same = all(any(torch.equal(leaf, value) for value in made) for leaf in wanted)
    if not same or any(start[node]._version != version for node, version in versions.items()):
        raise ConfigError("its graph computes something else than it")
    return blocks


def _clone(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


class PartValues(Values):
    """What goes from block to block in a model that is calibrated part by part: an environment for each call."""

    def __init__(self, inputs: Sequence[Batch], parts: Sequence[Part]):
        super().__init__([])
        self.inputs, self.parts = inputs, parts
        self.begins = {part.blocks[0]: part for part in parts}
        self.numbers: list[int] = []  # the batch that each environment is of

    def copy(self) -> "Values":
        made = PartValues(self.inputs, self.parts)
        made.batches, made.numbers = [dict(batch) for batch in self.batches], list(self.numbers)
        return made

    def first(self, count: int) -> "Values":
        return Values([batch for batch, number in zip(self.batches, self.numbers, strict=True) if number < count])

    def enter(self, root: nn.Module, block: Block, plain: Values | None = None) -> None:
        part = self.begins.get(block)
        if part is None:
            return
        self._joined.clear()
        if part.chosen and isinstance(plain, PartValues):
            self.batches, self.numbers = [dict(batch) for batch in plain.batches], list(plain.numbers)
            return
        self.batches, self.numbers = [], []
        for number, batch in enumerate(self.inputs):
            for leaves in _calls_of(root, part, batch):
                if len(leaves) != len(part.reads):
                    raise ConfigError(
                        f"the model calls {part.name!r} with other arguments on another batch; give it batches of one "
                        "form"
                    )
                if all(leaf.numel() for leaf in leaves if isinstance(leaf, Tensor)):
                    self.batches.append(dict(zip(part.reads, leaves, strict=True)))
                    self.numbers.append(number)
        if not self.batches:
            raise ConfigError(
                f"nothing reaches {part.name!r} in these batches; give images in which the float model finds "
                "something, or let it keep low scores meanwhile (score_thresh, score_threshold = 0)"
            )


@torch.no_grad()
def _calls_of(root: nn.Module, part: Part, batch: Batch) -> Iterator[list[Any]]:
    """The arguments of each call of `part` when `root` runs on `batch`, tensor by tensor."""
    found: list[list[Any]] = []

    def record(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        found.append([_clone(leaf) for leaf in tree_leaves(_arguments(module, args, kwargs))])
        if part.once:
            raise ReachedError

    handle = root.get_submodule(part.name).register_forward_pre_hook(record, with_kwargs=True)
    try:
        call(root, batch)
    except ReachedError:
        pass
    finally:
        handle.remove()
    yield from found
