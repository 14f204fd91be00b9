"""The dial: the one way to change which width a model runs at."""

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Generic, Protocol, TypeVar, cast

from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from bitdial.dial.plan import BitPlan, LayerBits, as_plan, resolve_bits, shortened
from bitdial.errors import PlanError

Steps = TypeVar("Steps")
Selection = dict[str, tuple[int, int]]  # what each layer's `select_bits`, or each follower's `select_set`, gets
STORED_PLANS = "_bitdial_plans"  # the attribute by which a loaded model knows its file's plans: {name: BitPlan}
SWITCHBOARD = "_bitdial_switchboard"  # that of a model whose parts are switched all at once: a Board
MOST_REMEMBERED = 64  # plans that a Board remembers


class DialledLayer(Protocol):
    """What a layer offers to be switched: its choices, its selection, and how to change it.

    One with a `fixed_bits` that is not None stays at that width unless a plan names it.
    """

    bit_choices: tuple[int, ...]
    weight_bits: int
    act_bits: int

    def select_bits(self, weight_bits: int, act_bits: int) -> None:
        """Select the widths; both are in `bit_choices`."""
        ...


class Follower(Protocol):
    """What a module offers that has a set per width: the layer it follows, and how to change the set.

    It goes by the layer's weight bits, as norms do; or by its activation bits, if it has a true `follows_activations`.
    A transitional norm goes by the weight bits of a second layer too, which it names by `fed_by`.
    """

    follows: str

    def select_set(self, bits: int, fed_bits: int) -> None:
        """Select the set of a width, or of a pair of them."""
        ...


class Board(Generic[Steps]):
    """The layers of a model that `set_bits` switches, and what follows them, by name, and how. Abstract.

    A model has one, by the name SWITCHBOARD, if its parts are switched all at once. It is made when the model is and
    remembers the plans that it has checked, with the steps that they take.
    """

    def __init__(self, model: nn.Module | None = None) -> None:
        self.layers: dict[str, DialledLayer] = {}
        self.followers: dict[str, Follower] = {}
        self._remembered: dict[BitPlan, Steps] = {}
        if model is not None:
            self.register(model)

    def register(self, model: nn.Module) -> None:
        """Take the layers and followers of `model` for those that `set_bits` switches."""
        modules = dict(unwrap(model).named_modules())
        self.layers = {name: cast(Any, m) for name, m in modules.items() if hasattr(type(m), "select_bits")}
        self.followers = {name: cast(Any, m) for name, m in modules.items() if hasattr(type(m), "select_set")}
        self._remembered.clear()

    def set_bits(self, bits: "LayerBits | BitPlan") -> None:
        """Switch everything; checks all of it before anything changes."""
        plan = as_plan(bits)
        steps = self._remembered.get(plan)
        if steps is None:
            steps = self._steps(self.choose(plan))
            if len(self._remembered) >= MOST_REMEMBERED:
                self._remembered.pop(next(iter(self._remembered)))  # the oldest
            self._remembered[plan] = steps
        self._apply(steps)

    def choose(self, plan: "BitPlan") -> Selection:
        """What `plan` selects, layers first; checks everything."""
        chosen = self.choose_layers(plan)
        return {**chosen, **{name: _widths(name, each, chosen) for name, each in self.followers.items()}}

    def choose_layers(self, plan: "BitPlan") -> Selection:
        """What `plan` selects for the layers; checks it."""
        choices = {name: layer.bit_choices for name, layer in self.layers.items()}
        return resolve_bits(choices, plan, fixed_widths(self.layers))

    def select(self, name: str, first: int, second: int) -> None:
        """Switch one layer or follower by itself."""
        if name in self.layers:
            self.layers[name].select_bits(first, second)
        else:
            self.followers[name].select_set(first, second)

    def fixed(self) -> list[Tensor]:
        """The tensors, beside those of modules, that no switch changes."""
        raise NotImplementedError

    def forget(self) -> None:
        """Take nothing for what it should be: the next switch writes all that switches write."""
        raise NotImplementedError

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_remembered": {}}  # a copy may be made while another thread switches

    def _steps(self, chosen: Selection) -> Steps:
        """What is to be done for `chosen`; it is done again later, so it holds nothing of the present state."""
        raise NotImplementedError

    def _apply(self, steps: Steps) -> None:
        raise NotImplementedError


class _OneByOne(Board[Selection]):
    """For a model without a switchboard, made for one switch."""

    def _steps(self, chosen: Selection) -> Selection:
        return chosen

    def _apply(self, steps: Selection) -> None:
        for name, pair in steps.items():
            self.select(name, *pair)


def unwrap(model: nn.Module) -> nn.Module:
    """The user's own module inside DistributedDataParallel, DataParallel, AveragedModel or torch.compile."""
    while (inner := wrapped(model)) is not None:
        model = inner
    return model


def wrapped(model: nn.Module) -> nn.Module | None:
    """The module that `model` wraps, None if it is no wrapper."""
    if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel | AveragedModel):
        return model.module
    inner = getattr(model, "_orig_mod", None)
    return inner if isinstance(inner, nn.Module) else None


def copy_unwrapped(model: nn.Module, memo: dict[int, Any] | None = None) -> nn.Module:
    """A copy of `model` without wrappers, around it or around modules inside: names are those of the plain model."""
    memo = {} if memo is None else memo
    for module in reversed(list(model.modules())):  # what is inside another first
        if (inner := unwrap(module)) is not module:
            memo[id(module)] = copy.deepcopy(inner, memo)
    return copy.deepcopy(unwrap(model), memo)


def dialled_layers(model: nn.Module) -> dict[str, DialledLayer]:
    """The layers of `model` that `set_bits` switches, by name; an error if there are none."""
    return dict(_board(model).layers)


def fixed_widths(layers: Mapping[str, Any]) -> dict[str, int]:
    """The widths of those of `layers` that have one of their own: {layer: fixed_bits}."""
    found = {name: getattr(layer, "fixed_bits", None) for name, layer in layers.items()}
    return {name: bits for name, bits in found.items() if bits is not None}


def _board(model: nn.Module) -> Board[Any]:
    """The switchboard of `model`, or one made for the moment; an error if it has no layers."""
    board: Board[Any] | None = getattr(unwrap(model), SWITCHBOARD, None)
    if board is None:
        board = _OneByOne(model)
    if not board.layers:
        raise PlanError("the model has no quantised layer; call prepare(model, config, ...) or load(path) first")
    return board


def is_live(model: nn.Module) -> bool:
    """Whether `model` is one from `load`, whose layers hold codes: they can be switched, but not trained or saved."""
    return any(hasattr(layer, "codes") for layer in _OneByOne(model).layers.values())


def resolve_plan(model: nn.Module, bits: "LayerBits | BitPlan | str") -> dict[str, tuple[int, int]]:
    """The weight and activation bits that `bits` gives each layer of `model`; checks everything."""
    return _board(model).choose_layers(_stored_plan(model, bits) if isinstance(bits, str) else as_plan(bits))


def _stored_plan(model: nn.Module, name: str) -> BitPlan:
    stored: Mapping[str, BitPlan] = getattr(unwrap(model), STORED_PLANS, {})
    if name in stored:
        return stored[name]
    found = f"the stored plans are {shortened(list(stored), most=20)}" if stored else "this model has no stored plans"
    raise PlanError(
        f"{name!r} is not a bit-width and not the name of a stored plan; {found} "
        "(save(..., plans={name: plan}) stores them, load(path) brings them)"
    )


def set_bits(model: nn.Module, bits: "LayerBits | BitPlan | str") -> None:
    """Switch `model` in place: one width, a pair (weight bits, activation bits), a BitPlan, or a stored plan's name.

    A loaded model knows the plans of its file by name, such as "3.0 bits". Everything is checked before anything
    changes. A layer with a width of its own (`fixed_bits`) stays there unless a plan names it. Batch norms follow the
    weight bits of the layer that feeds them, quantizers of attention products the activation bits of a layer of that
    attention.
    """
    board = _board(model)
    board.set_bits(_stored_plan(model, bits) if isinstance(bits, str) else bits)


def _widths(name: str, follower: Follower, chosen: Mapping[str, tuple[int, int]]) -> tuple[int, int]:
    """What `follower` is to be given; for a transitional norm, also the weight bits of the layer that feeds its own."""
    bits, act_bits = chosen[leader_of(name, follower.follows, chosen)]
    if getattr(follower, "follows_activations", False):
        return act_bits, act_bits
    fed_by = getattr(follower, "fed_by", None)
    return bits, bits if fed_by is None else chosen[leader_of(name, fed_by, chosen)][0]


def leader_of(follower: str, follows: str, layers: Mapping[str, object]) -> str:
    """The name in this tree of the layer that a module follows: the prepared model may lie inside another."""
    if follows in layers:
        return follows
    parts = follower.split(".")
    for depth in range(1, len(parts)):
        name = ".".join([*parts[:depth], follows])
        if name in layers:
            return name
    raise PlanError(
        f"{follower!r} follows layer {follows!r}, which is not in this module; call set_bits on the "
        "prepared model itself"
    )


def get_bits(model: nn.Module) -> BitPlan:
    """What each layer is set to now, as a plan that `set_bits` takes back."""
    return BitPlan({name: (layer.weight_bits, layer.act_bits) for name, layer in dialled_layers(model).items()})


@contextmanager
def at_bits(model: nn.Module, bits: "LayerBits | BitPlan | str") -> Iterator[nn.Module]:
    """Run a block with `model` set to `bits`, then put its former setting back."""
    before = get_bits(model)
    layers: list[Any] = list(dialled_layers(model).values())
    unset = {layer: layer.unset_passes for layer in layers if getattr(layer, "unset_passes", None) is not None}
    set_bits(model, bits)
    try:
        yield model
    finally:
        set_bits(model, before)
        for layer, passes in unset.items():  # for a while is not a choice
            layer.unset_passes = passes
