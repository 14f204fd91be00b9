"""Whether other modules can take the place of a model's layers.

`prepare` and `load` put modules of their own where layers and norms are. A model may pass these by: it keeps its layers
in a list beside, asks for their class, has hooks on them, or computes with their weights itself. Then it would go on in
float, or leave layers out. So the float model runs once with stand-ins, which compute what its layers do, are of no
class that it knows, and have no values in their weights.
"""

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from bitdial.errors import ConfigError
from bitdial.nn import kind_of
from bitdial.nn.hidden_weight import HiddenWeight
from bitdial.nn.swap import swap_modules
from bitdial.prepare.model_call import Batch, call, evaluating


class _StandIn(nn.Module):
    """Computes what `module` does, without its hooks; notes its calls, and who asked for its weight last."""

    def __init__(self, module: nn.Module, name: str, calls: Counter[str], asked: list[str]):
        super().__init__()
        self._module, self._name, self._calls, self._asked = (module,), name, calls, asked  # a tuple: not a submodule

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the module computes."""
        self._calls[self._name] += 1
        return self._module[0].forward(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        """The attributes of the module; of the weight of a layer, its shape, dtype and device alone."""
        if name == "_module":
            raise AttributeError(name)
        found = getattr(self._module[0], name)
        if name == "weight" and kind_of(self._module[0]) is not None:
            self._asked[:] = [self._name]
            return HiddenWeight(self._name, tuple(found.shape), found)
        return found


def check_replaceable(model: nn.Module, modules: Mapping[str, nn.Module], batch: Batch) -> None:
    """Refuse a float `model` that does not run as before with others in the place of `modules`; it is left as it is."""
    with evaluating(model):  # around the swap: what is swapped out must be in eval mode too
        _check(model, modules, batch)


def _check(model: nn.Module, modules: Mapping[str, nn.Module], batch: Batch) -> None:
    before, expected = _watched(model, modules, batch)
    calls: Counter[str] = Counter()
    asked: list[str] = []
    stand_ins = {module: _StandIn(module, name, calls, asked) for name, module in modules.items()}
    swap_modules(model, dict(stand_ins))
    try:
        found = _run(model, batch)
    except Exception as problem:  # it ran before, so this is of the stand-ins
        if not asked:
            raise
        raise ConfigError(_weight_read(asked[0])) from problem
    finally:
        swap_modules(model, {stand_in: module for module, stand_in in stand_ins.items()})
    if calls == before and _same(expected, found):
        return
    again, repeated = _watched(model, modules, batch)
    if again == before and (calls != before or _same(expected, repeated)):  # else it does not even repeat itself
        raise ConfigError(_what_differs(modules, before, calls))


def _watched(model: nn.Module, modules: Mapping[str, nn.Module], batch: Batch) -> tuple[Counter[str], list[Tensor]]:
    """How often the model calls each of `modules`, and its output."""
    calls: Counter[str] = Counter()
    handles = [m.register_forward_pre_hook(lambda *_, n=n: calls.update((n,))) for n, m in modules.items()]
    try:
        return calls, _run(model, batch)
    finally:
        for handle in handles:
            handle.remove()


def _weight_read(name: str) -> str:
    return (
        f"layer {name!r}: the model computes with its weight outside of the layer, where it would not be quantised. "
        "Call the layer itself, give the other place a weight of its own, or keep this layer in float: "
        f"Rule(pattern={name!r}, quantize=False)"
    )


def _what_differs(modules: Mapping[str, nn.Module], before: Counter[str], calls: Counter[str]) -> str:
    for name in modules:
        if calls[name] != before[name]:
            return (
                f"layer {name!r}: the model reaches it otherwise than by its place, so a quantised layer there would "
                "not run. Call layers as attributes or from an nn.ModuleList or nn.ModuleDict, not from a list of your "
                "own, and do not ask for their class in forward (isinstance(layer, nn.Linear)); or keep this one in "
                f"float: Rule(pattern={name!r}, quantize=False), switch_norms=False for a norm"
            )
    for name, module in modules.items():
        if module._forward_hooks or module._forward_pre_hooks:
            return (
                f"layer {name!r}: a forward hook on it changes what the model computes, and quantised layers have no "
                "hooks; do it in the model's forward, or remove the hook"
            )
    return (
        "with other modules in the place of its layers and norms the model gives other outputs: its forward asks for "
        "their class (isinstance(layer, nn.BatchNorm2d)) or the like; call them without asking"
    )


def _run(model: nn.Module, batch: Batch) -> list[Tensor]:
    """The tensors of the model's output, from the same random numbers each time."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return [leaf.clone() for leaf in tree_leaves(call(model, batch)) if isinstance(leaf, Tensor)]


def _same(left: list[Tensor], right: list[Tensor]) -> bool:
    """Whether outputs are equal, on a GPU nearly so: sums there may have another order at each call."""
    if [a.shape for a in left] != [b.shape for b in right]:
        return False
    return all(torch.allclose(a, b, rtol=0.0, atol=_slack(a), equal_nan=True) for a, b in zip(left, right, strict=True))


def _slack(output: Tensor) -> float:
    return 1e-3 * float(output.abs().max()) if output.is_cuda and output.numel() else 0.0
