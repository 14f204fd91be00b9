"""Bit plans: which bits each layer has."""

from collections.abc import Iterable, Iterator, Mapping
from numbers import Integral
from typing import Any, TypeVar, cast

from bitdial.errors import PlanError

LayerBits = int | tuple[int, int]
Setting = TypeVar("Setting")


class BitPlan(Mapping[str, tuple[int, int]]):
    """Bits for each layer by name: {layer: bits} or {layer: (weight bits, activation bits)}. Immutable.

    Layers that are not named take `default`, or their own width if they have one (`fixed_bits`); without a default, a
    plan must name every layer of the model it is used on.
    """

    def __init__(self, layers: Mapping[str, LayerBits] | None = None, *, default: LayerBits | None = None):
        if layers is not None and not (isinstance(layers, Mapping) and all(isinstance(n, str) for n in layers)):
            raise PlanError(f"{layers!r} does not map layer names to bits, such as {{'layer1.0.conv1': 4}}")
        self._layers = {name: _pair(bits, f"layer {name!r}") for name, bits in (layers or {}).items()}
        self._default = None if default is None else _pair(default, "default")
        if not self._layers and self._default is None:
            raise PlanError("an empty plan: name layers, such as BitPlan({'layer1.0.conv1': 4}, default=8)")

    @property
    def default(self) -> tuple[int, int] | None:
        """The bits of the layers that the plan does not name."""
        return self._default

    def __getitem__(self, layer: str) -> tuple[int, int]:
        if layer in self._layers:
            return self._layers[layer]
        if self.default is None:
            raise KeyError(layer)
        return self.default

    def __iter__(self) -> Iterator[str]:
        return iter(self._layers)

    def __len__(self) -> int:
        return len(self._layers)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, BitPlan):
            return NotImplemented
        return self._layers == other._layers and self.default == other.default

    def __hash__(self) -> int:
        return hash((frozenset(self._layers.items()), self.default))

    def __repr__(self) -> str:
        layers = {name: _short(bits) for name, bits in self._layers.items()}
        default = "" if self.default is None else f"default={_short(self.default)}"
        return f"BitPlan({', '.join(filter(None, [str(layers) if layers else '', default]))})"

    def to_dict(self) -> dict[str, Any]:
        """The plan as JSON values; `from_dict` gives an equal plan back."""
        return {
            "layers": {name: list(bits) for name, bits in self._layers.items()},
            "default": None if self.default is None else list(self.default),
        }

    @classmethod
    def from_dict(cls, values: object) -> "BitPlan":
        """Build from `to_dict`'s output; anything else is a PlanError."""
        if not isinstance(values, dict) or set(values) != {"layers", "default"}:
            raise PlanError("a stored plan needs exactly 'layers' and 'default'")
        layers, default = values["layers"], values["default"]
        if not isinstance(layers, dict):
            raise PlanError("a stored plan's 'layers' must map layer names to bits")
        return cls(
            {str(name): cast(LayerBits, tuple(b) if isinstance(b, list) else b) for name, b in layers.items()},
            default=tuple(default) if isinstance(default, list) else default,
        )


def _pair(bits: object, where: str) -> tuple[int, int]:
    pair = bits if isinstance(bits, tuple) else (bits, bits)
    if len(pair) != 2 or not all(
        isinstance(b, Integral) and not isinstance(b, bool) and 2 <= int(b) <= 8 for b in pair
    ):
        raise PlanError(
            f"{where}: {bits!r} is not a bit-width; give a whole number from 2 to 8, or a tuple "
            "(weight bits, activation bits)"
        )
    return int(pair[0]), int(pair[1])


def _short(bits: tuple[int, int]) -> LayerBits:
    return bits[0] if bits[0] == bits[1] else bits


def as_plan(bits: "LayerBits | BitPlan") -> BitPlan:
    """`bits` as a plan: one width, or a pair, is the default of all layers."""
    return bits if isinstance(bits, BitPlan) else BitPlan(default=_pair(bits, "bits"))


def resolve_bits(
    choices: Mapping[str, tuple[int, ...]], bits: "LayerBits | BitPlan", fixed: Mapping[str, int] | None = None
) -> dict[str, tuple[int, int]]:
    """The weight and activation bits that `bits` gives each layer of `choices` ({layer: bit_choices}); checks all.

    `fixed` are the layers with a width of their own, {layer: fixed_bits}: they have it unless the plan names them.
    """
    plan = as_plan(bits)
    if unknown := [name for name in plan if name not in choices]:
        raise PlanError(
            f"the plan names {shortened(unknown)}, which the model does not have (or keeps in float); "
            f"its quantised layers are {shortened(list(choices))}"
        )
    named = plan._layers  # asking the plan for each layer takes several times as long
    if plan.default is None and (missing := [name for name in choices if name not in named]):
        raise PlanError(f"the plan says nothing about {shortened(missing)}; name every layer or give a default")
    default = cast(tuple[int, int], plan.default)  # or no layer needs it
    own = {name: (width, width) for name, width in (fixed or {}).items() if name not in named}
    chosen = {name: own.get(name) or named.get(name, default) for name in choices}
    for name, pair in chosen.items():
        for value in (*pair, *default) if name in own else pair:
            if value not in choices[name]:
                raise PlanError(
                    f"layer {name!r}: bits={value} is not in bit_choices {choices[name]}; "
                    "choose one of these (QuantConfig sets them in training; load(bit_choices=...) may offer fewer)"
                )
    return chosen


def listed(settings: Iterable[Setting]) -> list[Setting]:
    """`settings` as a list; PlanError for one that is not in a list."""
    if isinstance(settings, str | BitPlan) or not isinstance(settings, Iterable):
        raise PlanError(f"{settings!r} is one setting where several are taken; give a list: [{settings!r}]")
    return list(settings)


def shortened(names: list[str], most: int = 5) -> str:
    """The first few of `names`, for a message."""
    shown = ", ".join(map(repr, names[:most]))
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"
