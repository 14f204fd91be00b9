"""Modules that are no layer of a known kind, but are made of such: they are taken apart, in float, before all else.

`prepare` calls `decompose`. The file keeps the names, and loading calls `decompose_again`. The module that takes the
place of another computes the same, up to the rounding of float sums, and takes the same inputs.
"""

import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from bitdial.errors import ConfigError
from bitdial.nn import attention, frozen_norm, recurrent
from bitdial.nn.attention import Attention, linear
from bitdial.nn.batchnorm import SwitchableBatchNorm
from bitdial.nn.layer_kinds import FORWARD
from bitdial.nn.parts import Parts
from bitdial.nn.recurrent import Recurrent
from bitdial.nn.swap import swap_modules, turn_off_fast_paths

log = logging.getLogger(__name__)

MADE_FROM = "decomposed_from"  # the attribute by which a module says which decomposition made it
PART_OF = "part_of"  # that by which a layer inside it says so


@dataclass(frozen=True, kw_only=True)
class Decomposition:
    """How modules of one class are taken apart.

    name         the class's name: in manifests, rules and messages
    layers       what it becomes, for the docs: layers of known kinds
    recognises   (class) to whether it is that class; asked for a module's class and for those that it derives from
    methods      what a subclass may not change, beside `forward`: methods that say how the module computes
    state        a pattern of the names that its tensors have; a module with others is left as it is
    take_apart   (module, parts) to the module that takes its place
    """

    name: str
    layers: str
    recognises: Callable[[type], bool]
    methods: tuple[str, ...] = ()
    state: str
    take_apart: Callable[[Any, Parts], nn.Module]


MULTIHEAD_ATTENTION = Decomposition(
    name="MultiheadAttention",
    layers="`q_proj`, `k_proj`, `v_proj` and `out_proj`, each a `Linear`",
    recognises=lambda cls: cls is nn.MultiheadAttention,
    state=attention.STATE,
    take_apart=Attention,
)
CONV1D = Decomposition(
    name="Conv1D",
    layers="one `Linear`, of the transposed weight",
    recognises=lambda cls: f"{cls.__module__}.{cls.__qualname__}" == "transformers.pytorch_utils.Conv1D",
    state="weight|bias",
    take_apart=lambda module, parts: linear(parts.transposed(module.weight), module.bias),
)
FROZEN_BATCH_NORM2D = Decomposition(
    name="FrozenBatchNorm2d",
    layers="a `BatchNorm2d` that stays in eval mode",
    recognises=lambda cls: f"{cls.__module__}.{cls.__qualname__}" in frozen_norm.NAMES,
    state=frozen_norm.STATE,
    take_apart=frozen_norm.frozen_norm,
)


def _recurrent(network: type[nn.Module]) -> Decomposition:
    return Decomposition(
        name=network.__name__,
        layers="its matrices, `weight_ih_l0` and so on, each a `RecurrentWeight`",
        recognises=lambda cls: cls is network,
        methods=recurrent.METHODS,
        state=recurrent.STATE,
        take_apart=Recurrent,
    )


DECOMPOSITIONS: dict[str, Decomposition] = {
    each.name: each
    for each in (MULTIHEAD_ATTENTION, CONV1D, FROZEN_BATCH_NORM2D, *(_recurrent(network) for network in (nn.LSTM, nn.GRU, nn.RNN)))
}
DECOMPOSED = Attention | Recurrent  # what takes the place of a module and holds layers; no graph is traced through it


def decomposition_of(module: nn.Module) -> Decomposition | None:
    """How to take `module` apart: its class is in the table, or derived from one there without computing otherwise."""
    if "forward" in vars(module):  # patched by somebody
        return None
    changed: set[str] = set()
    for cls in type(module).__mro__:
        for each in DECOMPOSITIONS.values():
            if each.recognises(cls):
                return None if changed.intersection((*FORWARD, *each.methods)) else each
        changed |= vars(cls).keys()
    return None


def decompose(model: nn.Module) -> dict[str, str]:
    """Take apart in place what can be; {name of the module: name of the decomposition}. Says what is left, and why."""
    found = {n: (m, d) for n, m in model.named_modules() if (d := decomposition_of(m)) is not None}
    if "" in found:
        kind = found[""][1].name
        raise ConfigError(f"the model is a single {kind}; wrap it, for example in nn.Sequential, so that it has a name")
    for name, reason in _reasons(model, found).items():
        log.warning("%s %r is left whole, in float: %s", found.pop(name)[1].name, name, reason)
    _replace(model, found, Parts())
    return {name: how.name for name, (_, how) in found.items()}


def decompose_again(model: nn.Module, names: Mapping[str, str], *, values: bool = False) -> None:
    """Take apart in place the modules called `names`, as {name: decomposition} says; ConfigError if they are others.

    Those that are apart already stay as they are.
    """
    found: dict[str, tuple[nn.Module, Decomposition]] = {}
    modules = dict(model.named_modules(remove_duplicate=False))
    for name, how in names.items():
        module = modules.get(name)
        if module is not None and _made_from(module) == how:
            continue
        if module is None or decomposition_of(module) != DECOMPOSITIONS[how]:
            there = "nothing" if module is None else f"a {type(module).__name__}"
            raise ConfigError(f"{name!r} is a {how} in the file, and the model has {there} there")
        found[name] = module, DECOMPOSITIONS[how]
    _replace(model, found, Parts(values=values))


def decomposed_modules(model: nn.Module) -> dict[str, str]:
    """{name: decomposition} of the modules of `model` that were taken apart."""
    sets = {each for norm in model.modules() if isinstance(norm, SwitchableBatchNorm) for each in norm.sets.values()}
    found = {n: _made_from(m) for n, m in model.named_modules() if m not in sets}
    return {name: how for name, how in found.items() if how is not None}


def _made_from(module: nn.Module) -> str | None:
    """Which decomposition made `module`; of a norm with sets, that of these."""
    if isinstance(module, SwitchableBatchNorm):
        module = module.active
    how: str | None = vars(module).get(MADE_FROM)
    return how


def _replace(model: nn.Module, found: Mapping[str, tuple[nn.Module, Decomposition]], parts: Parts) -> None:
    new: dict[nn.Module, nn.Module] = {}
    for module, how in found.values():
        made = how.take_apart(module, parts)
        for part in (made, *made.modules()):
            part.training = module.training
            setattr(part, PART_OF, how.name)
        _take_over(made, module)
        setattr(made, MADE_FROM, how.name)
        new[module] = made
    turn_off_fast_paths(model)
    swap_modules(model, new)


def _take_over(made: nn.Module, module: nn.Module) -> None:
    """Give `made` the hooks of `module` and the attributes that somebody has put on it."""
    for key, value in vars(module).items():
        if key.startswith(("_forward_", "_backward_")):
            vars(made)[key] = value.copy() if isinstance(value, dict) else value
        elif not key.startswith("_") and not hasattr(made, key):
            setattr(made, key, value)


def _reasons(model: nn.Module, found: Mapping[str, tuple[nn.Module, Decomposition]]) -> dict[str, str]:
    """Why some of the modules `found` must stay as they are."""
    reasons: dict[str, str] = {}
    for name, (module, how) in found.items():
        if other := [key for key in module.state_dict() if not re.fullmatch(how.state, key)]:
            reasons[name] = f"it has a tensor {other[0]!r}, which a {how.name} does not have"
    owners: dict[nn.Parameter, list[str]] = {}
    for name, module in model.named_modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                owners.setdefault(parameter, []).append(name)
    while True:  # what stays whole may share a parameter with others, which must then stay whole too
        more: dict[str, str] = {}
        for name, (module, how) in found.items():
            shared = {owner for p in module._parameters.values() if p is not None for owner in owners[p]} - {name}
            whole = [o for o in sorted(shared) if o in reasons or o not in found or found[o][1] is not how]
            if name not in reasons and whole:
                more[name] = f"{whole[0]!r} uses its weights too"
        if not more:
            return reasons
        reasons |= more
