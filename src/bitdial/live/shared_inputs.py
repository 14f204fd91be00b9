"""Which Linear layers of a model read the very same tensor, one after the other: q, k and v of a decoder, gate and up.

One pass of a small input says so. A model of transformers brings such an input (`dummy_inputs`); in the pass its Linear
layers give zeros, so no weight is read. Other models are followed without an input, where they can be
(`bitdial.graph.operations`). Where neither works nothing is known, and no layers are named.
"""

import functools
import logging
import re
import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor, nn

from bitdial.graph.operations import operations

log = logging.getLogger(__name__)

_CALL = re.compile(r"'(?P<name>[^']+)'\((?P<source>%\d+|in\d+)\)")  # a line of `operations`: a layer and what it reads


class _Call(NamedTuple):
    """A layer that was called, and what tells its input from others; None: nothing does."""

    name: str
    source: object


def shared_inputs(model: nn.Module, names: Collection[str]) -> list[tuple[str, ...]]:
    """Those of the Linear layers called `names` that read one tensor right after each other, in the order of calls.

    Each of them is called once. `model` may have any weights; it is in eval mode afterwards.
    """
    model.eval()
    calls = _calls_in_a_pass(model, names) or _calls_by_following(model, names)
    counts = [call.name for call in calls]
    runs = [[call.name for call in run] for _, run in groupby(calls, key=lambda call: call.source)]
    return [tuple(run) for run in runs if len(run) > 1 and all(counts.count(name) == 1 for name in run)]


def _calls_by_following(model: nn.Module, names: Collection[str]) -> list[_Call]:
    found = [_CALL.fullmatch(line) for line in operations(model, names) or ()]
    return [_Call(match["name"], match["source"]) for match in found if match and match["name"] in names]


def _calls_in_a_pass(model: nn.Module, names: Collection[str]) -> list[_Call]:
    if not hasattr(model, "dummy_inputs"):
        return []
    calls: list[_Call] = []
    seen: list[Tensor] = []  # alive, so that no other tensor has the id of one of them

    def called(name: str, layer: nn.Linear, x: Tensor) -> Tensor:
        seen.append(x)
        calls.append(_Call(name, (id(x), x._version)))
        return x.new_zeros((*x.shape[:-1], layer.out_features))

    with _forwards(model, called), warnings.catch_warnings(), torch.random.fork_rng(devices=[]), torch.no_grad():
        warnings.simplefilter("ignore")
        try:
            model(**model.dummy_inputs)  # type: ignore[arg-type]
        except Exception as problem:  # whatever the model's code does
            log.debug("the model does not take its dummy_inputs, so no layers are joined: %s", problem)
            return []
    return [call for call in calls if call.name in names]


@contextmanager
def _forwards(model: nn.Module, called: Callable[[str, nn.Linear, Tensor], Tensor]) -> Iterator[None]:
    """Let `called(name, layer, x)` be the forward of all Linear layers of `model` for a while."""
    layers = {name: m for name, m in model.named_modules() if type(m) is nn.Linear}
    for name, layer in layers.items():
        layer.__dict__["forward"] = functools.partial(called, name, layer)
    try:
        yield
    finally:
        for layer in layers.values():
            del layer.__dict__["forward"]
