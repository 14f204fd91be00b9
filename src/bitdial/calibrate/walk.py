"""How a calibration goes through a model: by the blocks of its graph.

A model that cannot be traced goes by its rows of like modules, such as decoder layers; one without, by those of its
modules that can be traced, such as a detector's backbone and heads, or layer by layer.
"""

import inspect
import logging
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves, tree_structure

from bitdial.calibrate.blocks import Block, find_blocks
from bitdial.calibrate.parts import Part, PartValues, find_parts
from bitdial.calibrate.steps import Call, Row, Steps, find_rows, skipping, step_blocks
from bitdial.calibrate.values import Environment, SteppedValues, Values, run
from bitdial.errors import ConfigError
from bitdial.nn import QuantLayer, SwitchableBatchNorm
from bitdial.prepare.model_call import Batch, call, sample_count

log = logging.getLogger(__name__)


class Walk:
    """The blocks of `model` in the order in which they run, and where values begin."""

    def __init__(self, model: nn.Module, inputs: list[Batch]):
        self._model, self.inputs, self.warnings = model, inputs, list[str]()
        self.samples = sum(_count(batch) for batch in inputs)
        self.blocks: list[Block] = []
        self.traced = False
        self.parts: list[Part] = []
        try:
            self.blocks, self._starts = _traced(model, inputs)
            self.traced = True
        except ConfigError as problem:
            rows, calls = find_rows(model, inputs[0])
            parts = [] if rows else find_parts(model, inputs[0])
            if any(len(block.layers) > 1 for part in parts for block in part.blocks):
                self.parts, self.blocks = parts, [block for part in parts for block in part.blocks]
                log.info("%s; it is calibrated part by part: %s", problem, ", ".join(part.name for part in parts))
                return
            steps, reason = _stepped(model, inputs, rows, calls)
            self.blocks, self._skips = steps.blocks, steps.skips
            if reason:
                text = f"{problem}, and {reason}; it is calibrated layer by layer, which takes longer and finds less"
                self.warnings.append(text)

    @property
    def has_graphs(self) -> bool:
        """Whether the nodes of blocks are those of a graph, which shows what reads what."""
        return self.traced or bool(self.parts)

    def batches_of(self, samples: int) -> int:
        """How many of the first batches have `samples` samples together, or all of them."""
        counts = list(accumulate(_count(batch) for batch in self.inputs))
        return next((number for number, total in enumerate(counts, start=1) if total >= samples), len(counts))

    def start_with(self, inputs: list[Batch]) -> Values:
        """The values of other `inputs` before the first block; of a model that was traced."""
        return Values([_environment(self._model, self.blocks, batch) for batch in inputs])

    def start(self) -> Values:
        """The values before the first block."""
        if self.parts:
            return PartValues(self.inputs, self.parts)
        return Values(self._starts) if self.traced else SteppedValues(self.inputs, self._skips)


def _count(batch: Batch) -> int:
    return sample_count(batch) or 1


def _traced(model: nn.Module, inputs: list[Batch]) -> tuple[list[Block], list[Environment]]:
    """The blocks, and the arguments of each batch by their nodes; ConfigError if the graph is not the model."""
    given = [_arguments(model, batch) for batch in inputs]
    signature = inspect.signature(model.forward).parameters
    if any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in signature.values()):
        raise ConfigError("the model cannot be traced: its forward takes any arguments")
    fixed = {name: p.default for name, p in signature.items() if not any(name in each for each in given)}
    blocks = find_blocks(model, fixed)
    if len(_placeholders(blocks)) != len(signature):
        raise ConfigError("the model cannot be traced: its graph has other inputs")
    starts = [_environment(model, blocks, batch) for batch in inputs]
    _check_graph(model, blocks, starts[0], inputs[0])
    return blocks, starts


def _placeholders(blocks: list[Block]) -> list[fx.Node]:
    return [node for block in blocks for node in block.nodes if node.op == "placeholder"]


def _environment(model: nn.Module, blocks: list[Block], batch: Batch) -> Environment:
    """The arguments of `model` on `batch` by their nodes."""
    signature = inspect.signature(model.forward).parameters
    values = {name: p.default for name, p in signature.items()} | dict(_arguments(model, batch))
    return dict(zip(_placeholders(blocks), (values[name] for name in signature), strict=True))


def _arguments(model: nn.Module, batch: Batch) -> Mapping[str, Any]:
    args = batch if isinstance(batch, tuple) else () if isinstance(batch, dict) else (batch,)
    kwargs = batch if isinstance(batch, dict) else {}
    try:
        return inspect.signature(model.forward).bind(*args, **kwargs).arguments
    except TypeError as problem:
        raise ConfigError(f"the model does not take these inputs ({problem})") from problem


@torch.no_grad()
def _check_graph(model: nn.Module, blocks: list[Block], start: Environment, batch: Batch) -> None:
    """ConfigError unless the blocks compute what the model does: `forward` may decide otherwise from call to call."""
    before = {node: value._version for node, value in start.items() if isinstance(value, Tensor)}
    known = dict(start)
    for block in blocks:
        run(model, block.nodes, known)
    wanted = [leaf for leaf in tree_leaves(call(model, batch)) if isinstance(leaf, Tensor)]
    if any(start[node]._version != version for node, version in before.items()):
        raise ConfigError("the model cannot be calibrated by blocks, since it changes its inputs in place")
    made = [value for value in known.values() if isinstance(value, Tensor)]
    if not all(any(torch.equal(leaf, value) for value in made) for leaf in wanted):
        raise ConfigError("the model cannot be traced: its graph computes something else than the model")


def _stepped(
    model: nn.Module, inputs: list[Batch], rows: Sequence[Row], calls: Mapping[str, Call]
) -> tuple[Steps, str]:
    """Blocks by the `rows` of like modules in `model`; or by layers, and why."""
    if len({str(tree_structure(batch)) for batch in inputs}) > 1:
        reason = "its batches have different forms"
    elif not rows:
        reason = "it has no list of modules of one class that run once each, one after the other"
    else:
        steps = step_blocks(_in_order(model, inputs[0], [name for row in rows for name in row]), rows, calls)
        if _is_the_model(model, steps, inputs[0]):
            return steps, ""
        reason = f"the modules of {rows[0][0].rpartition('.')[0]!r}, run by themselves, compute something else"
    return step_blocks(_in_order(model, inputs[0], []), [], {}), reason


@torch.no_grad()
def _is_the_model(model: nn.Module, steps: Steps, batch: Batch) -> bool:
    """Whether the blocks, one after the other, compute what the model does, and the same if they run again."""
    values = SteppedValues([batch], steps.skips)
    for block in steps.blocks:
        values.enter(model, block)
        again = values.copy()
        for each in (values, again):
            each.advance(model, block, lambda name, x: None)
        if values.distance(again, block):
            return False
    with skipping(model, steps.every, values.batches[0]):
        found = tree_leaves(call(model, batch))
    wanted = tree_leaves(call(model, batch))
    return len(found) == len(wanted) and all(
        torch.equal(one, two) for one, two in zip(found, wanted, strict=True) if isinstance(two, Tensor)
    )


def _in_order(model: nn.Module, batch: Batch, also: list[str]) -> dict[str, nn.Module]:
    """The quantised layers, the switchable norms and the modules `also`, in the order in which they first run."""
    found: dict[str, nn.Module] = {}

    def hook(name: str) -> Any:
        return lambda module, args: None if name in found else found.update({name: module})

    handles = [
        module.register_forward_pre_hook(hook(name))
        for name, module in model.named_modules()
        if isinstance(module, QuantLayer | SwitchableBatchNorm) or name in also
    ]
    try:
        with torch.no_grad():
            call(model, batch)
    finally:
        for handle in handles:
            handle.remove()
    return {n: m for n, m in found.items() if not (isinstance(m, QuantLayer) and not m.kind.multiplies)}
