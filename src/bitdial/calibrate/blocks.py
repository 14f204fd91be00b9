"""A model as a row of blocks: what calibration works on, one after the other.

The model is traced (torch.fx), and its nodes are cut where a single value goes on. What lies between two cuts and holds
a quantised layer is a block: a residual block, an inverted residual, an attention with its addition. Layers in a plain
row belong together if the module that holds them has few layers. A value that many layers later is read again, as in a
U-Net, is handed from block to block and does not stand in the way of a cut.

A layer is in one block, with all of its calls. Where a row of layers runs on several values, as a head on the levels of
a pyramid, each layer runs on all of them before the next one does, and as many values may go on at a cut.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from torch import fx, nn

from bitdial.errors import ConfigError
from bitdial.graph.trace import ThreadTracer
from bitdial.nn import ActivationSite, QuantLayer, SwitchableBatchNorm
from bitdial.nn.decompose import DECOMPOSED

MOST_LAYERS = 4  # of a block that is a plain row of layers
LONG = 8  # a value that is read more layers later is handed on


@dataclass(frozen=True, eq=False)
class Block:
    """Neighbouring nodes of the graph. `reads` are values from before, `gives` those that later nodes read.

    `layers` and `norms` are the names of its quantised layers and switchable norms, in the order of the graph.
    """

    name: str
    nodes: tuple[fx.Node, ...]
    reads: tuple[fx.Node, ...]
    gives: tuple[fx.Node, ...]
    layers: tuple[str, ...]
    norms: tuple[str, ...]

    @property
    def made(self) -> tuple[fx.Node, ...]:
        """The values of `gives` that the block itself computes."""
        own = set(self.nodes)
        return tuple(node for node in self.gives if node in own)


class _BlockTracer(ThreadTracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        ours = isinstance(m, QuantLayer | SwitchableBatchNorm | ActivationSite | DECOMPOSED)
        return ours or super().is_leaf_module(m, module_qualified_name)


def find_blocks(model: nn.Module, fixed: Mapping[str, Any] | None = None, *, inside: str = "") -> list[Block]:
    """The blocks of a prepared `model`, in order, or of the module `inside` it; ConfigError if it cannot be traced.

    `fixed` are arguments of its forward that have the same value in every call, but for torch.fx's PH in them.
    """
    try:
        nodes = list(_BlockTracer().trace(model.get_submodule(inside), dict(fixed or {})).nodes)
    except Exception as problem:  # whatever the model's code does with a proxy
        raise ConfigError(f"the model cannot be traced: {str(problem).partition(chr(10))[0]}") from problem
    for node in nodes:
        if inside and node.op in ("call_module", "get_attr"):
            node.target = f"{inside}.{node.target}"
    nodes = _calls_together(model, [node for node in nodes if node.op != "output"])
    layers = {node: _names(model, node, QuantLayer) for node in nodes}
    pieces = _merge(_pieces(model, nodes, layers), model, layers)
    return [_block(model, piece, nodes, layers) for piece in pieces]


def _calls_together(model: nn.Module, nodes: list[fx.Node]) -> list[fx.Node]:
    """`nodes` in an order in which all calls of a layer or norm follow one another, as those of a head on levels.

    Then its inputs are all there when it first runs. Nodes stay in their order but for those that wait for others.
    """
    calls: dict[str, list[fx.Node]] = {}
    for node in nodes:
        if _names(model, node, QuantLayer) or _names(model, node, SwitchableBatchNorm):
            calls.setdefault(str(node.target), []).append(node)
    together = {node: several for several in calls.values() if len(several) > 1 for node in several}
    if not together:
        return nodes
    done: dict[fx.Node, None] = {}
    left = nodes
    while left:
        before = len(done)
        for node in left:
            group = together.get(node, [node])
            if node not in done and all(n in done for each in group for n in each.all_input_nodes):
                done.update(dict.fromkeys(group))
        if len(done) == before:  # it reads what it gave itself
            first = next(node for node in left if all(n in done for n in node.all_input_nodes))
            done[first] = None
        left = [node for node in left if node not in done]
    return list(done)


def _names(model: nn.Module, node: fx.Node, kind: type[nn.Module]) -> tuple[str, ...]:
    """The modules of a `kind` that `node` runs: it, or those inside it."""
    if node.op != "call_module":
        return ()
    target = str(node.target)
    found = model.get_submodule(target).named_modules()
    return tuple(f"{target}.{name}".removesuffix(".") for name, module in found if isinstance(module, kind))


def _pieces(model: nn.Module, nodes: list[fx.Node], layers: Mapping[fx.Node, tuple[str, ...]]) -> list[list[fx.Node]]:
    """`nodes`, cut before each layer in front of which one value goes on."""
    place = {node: i for i, node in enumerate(nodes)}
    passed = [0, *accumulate(len(layers[node]) for node in nodes)]  # layers before each node
    last = {n: max((place.get(user, len(nodes)) for user in n.users), default=-1) for n in nodes}
    short = [n for n in nodes if n.op != "get_attr" and passed[min(last[n], len(nodes))] - passed[place[n]] <= LONG]
    alive = Counter(at for n in short for at in range(place[n], last[n]))
    calls: dict[object, list[fx.Node]] = {}
    for node in nodes:
        if layers[node]:
            calls.setdefault(node.target, []).append(node)
    running = {at for own in calls.values() for at in range(place[own[0]], place[own[-1]])}  # a layer runs again
    values = {target: len(own) if run_side_by_side(own, nodes) else 1 for target, own in calls.items()}
    pieces: list[list[fx.Node]] = [[]]
    possible, averaged = 0, False  # how much of the last piece may go: up to the newest cut behind its last layer
    most = 1  # values that may go on: one for each call of the last layer, where they run side by side
    for i, node in enumerate(nodes):
        if layers[node] and possible and any(layers[n] for n in pieces[-1][:possible]):
            pieces[-1], rest = pieces[-1][:possible], pieces[-1][possible:]
            pieces.append(rest)
            possible = 0
        pieces[-1].append(node)
        most = values[node.target] if layers[node] else most
        averaged = not layers[node] and (averaged or _averages(model, node))
        if alive[i] <= most and i not in running and not averaged:
            possible = len(pieces[-1])
    if averaged and any(layers[n] for n in pieces[-1][:possible]):  # a float head, by itself
        pieces[-1], rest = pieces[-1][:possible], pieces[-1][possible:]
        pieces.append(rest)
    return pieces


def run_side_by_side(calls: Sequence[fx.Node], nodes: Iterable[fx.Node]) -> bool:
    """Whether none of `calls`, which are among the `nodes`, reads what another gave, as on the levels of a pyramid."""
    behind = set(calls)
    for node in nodes:
        if not behind.isdisjoint(node.all_input_nodes):
            if node in calls:
                return False
            behind.add(node)
    return True


def _averages(model: nn.Module, node: fx.Node) -> bool:
    """Whether `node` is a pool or a mean: blocks end before these, where there is more to compare."""
    target = type(model.get_submodule(str(node.target))).__name__ if node.op == "call_module" else node.target
    name = target if isinstance(target, str) else getattr(target, "__name__", "")
    return "pool" in name.lower() or name == "mean"


def _merge(
    pieces: list[list[fx.Node]], model: nn.Module, layers: Mapping[fx.Node, tuple[str, ...]]
) -> list[list[fx.Node]]:
    """Put single layers in a row together, if one module holds them and few others."""
    inside = Counter(
        ".".join(parts[:depth])
        for parts in {tuple(name.split(".")) for names in layers.values() for name in names}
        for depth in range(1, len(parts) + 1)
    )

    def home(name: str) -> str:
        parts = name.split(".")
        return next(p for d in range(1, len(parts) + 1) if inside[p := ".".join(parts[:d])] <= MOST_LAYERS)

    merged: list[list[fx.Node]] = []
    homes: list[str | None] = []
    for piece in pieces:
        names = {name for node in piece for name in layers[node]}
        own = home(names.pop()) if len(names) == 1 else None
        if own is not None and homes and homes[-1] == own:
            merged[-1] += piece
        else:
            merged.append(piece)
            homes.append(own)
    return merged


def _block(
    model: nn.Module, piece: list[fx.Node], nodes: list[fx.Node], layers: Mapping[fx.Node, tuple[str, ...]]
) -> Block:
    inside, place = set(piece), {node: i for i, node in enumerate(nodes)}
    end = place[piece[-1]]
    reads = {n: None for node in piece for n in node.all_input_nodes if n not in inside}
    known = nodes[: end + 1]
    gives = [n for n in known if n.op != "get_attr" and any(place.get(user, len(nodes)) > end for user in n.users)]
    names = tuple(dict.fromkeys(name for node in piece for name in layers[node]))
    norms = tuple(dict.fromkeys(name for node in piece for name in _names(model, node, SwitchableBatchNorm)))
    return Block(_common(names) or str(piece[-1].target), tuple(piece), tuple(reads), tuple(gives), names, norms)


def _common(names: tuple[str, ...]) -> str:
    """The module that holds all `names`, or the first and the last of them; empty if there are none."""
    if len(names) < 2:
        return "".join(names)
    parts = [name.split(".") for name in names]
    shared = []
    for each in zip(*parts, strict=False):
        if len(set(each)) > 1:
            break
        shared.append(each[0])
    return ".".join(shared) or f"{names[0]} to {names[-1]}"
