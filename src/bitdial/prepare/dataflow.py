"""Follow tensors through a model: which layer feeds which norm, and which layer feeds which layer."""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from bitdial.prepare.choosing import split_arguments, written_by
from bitdial.prepare.model_call import Batch, call, evaluating


class _Provenance(TorchFunctionMode):
    """Carries, with each tensor, the names it was computed from, through every torch function."""

    def __init__(self) -> None:
        super().__init__()
        self.names = WeakIdKeyDictionary()

    def of(self, values: object) -> frozenset[str]:
        """All names carried by the tensors in `values`."""
        found: frozenset[str] = frozenset()
        for leaf in tree_leaves(values):
            if isinstance(leaf, Tensor):
                found |= self.names.get(leaf, frozenset())
        return found

    def mark(self, values: object, names: frozenset[str]) -> None:
        """Let the tensors in `values` carry `names` and nothing else."""
        for leaf in tree_leaves(values):
            if isinstance(leaf, Tensor):
                self.names[leaf] = names

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        values, places = split_arguments(func, args, kwargs)
        if names := self.of(values) or self.of(places):
            self.mark(out, names)
            for tensor in written_by(func, args, kwargs):
                self.mark(tensor, names | self.of(tensor))
        return out


INPUT = "<input>"  # what the tensors of a batch carry; no module has this name


@dataclass(frozen=True)
class Flow:
    """Which layer each norm follows, and which layer feeds each layer: None if only float modules do.

    A norm follows the layer which feeds it; where several do (after an addition or a concatenation), the one that ran
    last; where none does (after a float stem), the first layer that it feeds. Norms connected to no layer are left out.
    A layer is fed, through norms, additions, concatenations and whatever is not a layer, by the layer that ran last of
    those that reach it. Layers that neither a layer nor the batch reaches are left out.
    """

    leaders: dict[str, str]
    feeders: dict[str, str | None]


def find_flow(model: nn.Module, layers: Mapping[str, nn.Module], norms: Mapping[str, nn.Module], batch: Batch) -> Flow:
    """Run `batch` and follow where tensors go."""
    provenance = _Provenance()
    leaders: dict[str, str] = {}
    feeders: dict[str, str | None] = {}
    started: dict[str, int] = {}
    calls = itertools.count()

    def last_of(sources: frozenset[str]) -> str | None:
        return max((s for s in sources if s in layers), key=lambda s: started[s], default=None)

    def enter_layer(name: str, args: Any) -> None:
        sources = provenance.of(args)
        for source in sources:
            if source in norms:
                leaders.setdefault(source, name)
        feeder = last_of(sources)
        if feeder is not None or INPUT in sources:
            feeders.setdefault(name, feeder)
        started[name] = next(calls)

    def leave_norm(name: str, args: Any, out: Any) -> None:
        sources = provenance.of(args)
        feeder = last_of(sources)
        if feeder is not None:
            leaders.setdefault(name, feeder)
        elif name not in leaders:
            provenance.mark(out, sources | {name})

    handles = []
    for name, layer in layers.items():
        handles.append(
            layer.register_forward_pre_hook(lambda m, a, k, name=name: enter_layer(name, (a, k)), with_kwargs=True)
        )
        handles.append(
            layer.register_forward_hook(lambda m, a, out, name=name: provenance.mark(out, frozenset((name,))))
        )
    for name, norm in norms.items():
        handles.append(
            norm.register_forward_hook(lambda m, a, k, out, name=name: leave_norm(name, (a, k), out), with_kwargs=True)
        )
    try:
        with evaluating(model), provenance:
            provenance.mark(batch, frozenset((INPUT,)))
            call(model, batch)
    finally:
        for handle in handles:
            handle.remove()
    return Flow(leaders, feeders)
