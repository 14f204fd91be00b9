"""The search as a table: for each layer (or group that shares bits) and each width, what it loses and what it costs."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import nn

from bitdial.config import check_choice
from bitdial.dial.plan import BitPlan, LayerBits, resolve_bits
from bitdial.errors import PlanError, QuantizationError
from bitdial.planning.cost import Costs, prepared_layers
from bitdial.sensitivity.result import Sensitivity, sensitivity_of

OBJECTIVES: tuple[str, ...] = ("error", "bits")
Pair = tuple[int, int]  # weight bits, activation bits
LayerLosses = dict[str, dict[int, float]]  # {layer: {weight bits: loss}}
Pins = Mapping[str, LayerBits | None]  # {layer: its bits; None: free, though it has a width of its own}


@dataclass(frozen=True, kw_only=True)
class Unit:
    """Layers that share their bits; `loss`, `plain` and each of `costs` have one entry per choice.

    `plain` is what the loss would be were all layers equally sensitive: it decides between plans of equal loss.
    """

    layers: tuple[str, ...]
    choices: tuple[Pair, ...]
    loss: tuple[float, ...]
    plain: tuple[float, ...]
    costs: Mapping[str, tuple[Fraction, ...]]


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Choose one choice of each unit; `constant` is what a quantity costs whatever is chosen."""

    units: tuple[Unit, ...]
    constant: Mapping[str, Fraction]

    def loss(self, chosen: Iterable[int]) -> float:
        """The loss of one choice (by index) of each unit."""
        return math.fsum(unit.loss[c] for unit, c in zip(self.units, chosen, strict=True))

    def cost(self, quantity: str, chosen: Iterable[int]) -> Fraction:
        """The exact cost of one choice (by index) of each unit."""
        parts = (unit.costs[quantity][c] for unit, c in zip(self.units, chosen, strict=True))
        return sum(parts, self.constant.get(quantity, Fraction(0)))

    def least(self, quantity: str) -> Fraction:
        """The least that can be reached of a quantity, if nothing else is bounded."""
        return self.cost(quantity, [u.costs[quantity].index(min(u.costs[quantity])) for u in self.units])

    def most(self, quantity: str) -> Fraction:
        """The most that a plan can cost."""
        return self.cost(quantity, [u.costs[quantity].index(max(u.costs[quantity])) for u in self.units])

    def plan(self, chosen: Iterable[int]) -> BitPlan:
        """The plan of one choice (by index) of each unit."""
        return BitPlan({n: u.choices[c] for u, c in zip(self.units, chosen, strict=True) for n in u.layers})

    def pinned(self, unit: Unit, choice: int) -> "Problem":
        """The same with one unit held at one of its choices."""
        held = Unit(
            layers=unit.layers,
            choices=(unit.choices[choice],),
            loss=(unit.loss[choice],),
            plain=(unit.plain[choice],),
            costs={name: (values[choice],) for name, values in unit.costs.items()},
        )
        return Problem(units=tuple(held if u is unit else u for u in self.units), constant=self.constant)


def build_problem(
    costs: Costs,
    losses: LayerLosses,
    sensitivity: Sensitivity | Mapping[str, float],
    *,
    groups: Iterable[Iterable[str]] = (),
    pinned: Pins | None = None,
    activation_bits: int | None = None,
) -> Problem:
    """The table for `search`, from what each layer loses at each width and how much that matters (`sensitivity`).

    Where `pinned` says nothing of layers that share their bits, those with a width of their own have it.
    """
    weight = loss_weights(sensitivity, list(costs.layers))
    pins = pinned or {}
    held = {name: _held(costs, name, bits) for name, bits in pins.items()}
    if activation_bits is not None:
        resolve_bits(costs.bit_choices, activation_bits)  # checks it
    place = {name: i for i, name in enumerate(costs.layers)}
    units = []
    for layers in _sharing(costs, groups):
        said = any(name in pins for name in layers)
        own = {(bits, bits) for name in layers if not said and (bits := costs.fixed_bits.get(name)) is not None}
        asked = {pair for name in layers if (pair := held.get(name)) is not None} or own
        if len(asked) > 1:
            raise PlanError(
                f"layers {', '.join(map(repr, layers))} share their bits but are pinned to {sorted(asked)}"
                + (", each a width of its own; pin one of them" if asked is own else "")
            )
        widths = [b for b in costs.bit_choices[layers[0]] if all(b in costs.bit_choices[n] for n in layers)]
        choices = tuple(asked) or tuple((b, activation_bits or b) for b in widths)
        # Earlier layers count a little more, so that layers alike in all else do not tie; the square root keeps sums of
        # different layers from being equal.
        plain = {name: 2 - math.sqrt(1 + place[name]) / math.sqrt(1 + len(place)) / 64 for name in layers}
        contributions = [costs.exact(dict.fromkeys(layers, pair)) for pair in choices]
        units.append(
            Unit(
                layers=layers,
                choices=choices,
                loss=tuple(math.fsum(weight[n] * losses[n][pair[0]] for n in layers) for pair in choices),
                plain=tuple(math.fsum(plain[n] * losses[n][pair[0]] for n in layers) for pair in choices),
                costs={q: tuple(part[q] for part in contributions) for q in costs.quantities},
            )
        )
    return Problem(units=tuple(units), constant={"bytes": Fraction(costs.float_bytes)})


def loss_weights(sensitivity: Sensitivity | Mapping[str, float], layers: list[str]) -> dict[str, float]:
    """The sensitivities as weights of the loss: every layer has one, and what is negative counts as 0.

    A Hessian trace is the sum of a layer's curvatures. An estimate below 0 says that the layer is flat as far as the
    samples can tell; taken at its word it would reward error.
    """
    return {name: max(value, 0.0) for name, value in sensitivity_of(sensitivity, layers).items()}


def layer_losses(model: nn.Module, objective: str) -> LayerLosses:
    """What each layer of the prepared `model` loses at each width, before it is weighted by its sensitivity.

    'error': ||W - Q_b(W)||^2, with the layer's own quantizer; a width that errs more than a lower one counts with the
    lower one's error, so that fewer bits are never a gain. 'bits': the bits that are missing to the highest width.
    """
    check_choice("objective", objective, OBJECTIVES)
    layers = prepared_layers(model)
    if objective == "bits":
        return {n: {b: float(layer.bit_choices[0] - b) for b in layer.bit_choices} for n, layer in layers.items()}
    return {name: monotone(errors) for name, errors in quantization_errors(model).items()}


def quantization_errors(model: nn.Module) -> LayerLosses:
    """||W - Q_b(W)||^2 of each layer of the prepared `model` at each width, summed in float64.

    For schemes that quantise tanh(W), tanh(W) takes the place of W.
    """
    found: LayerLosses = {}
    with torch.no_grad():
        for name, layer in prepared_layers(model).items():
            weight, quantizer = layer.weight_rows().detach(), layer.weight_quantizer
            source = quantizer.rule.source(weight.double())
            found[name] = {
                b: float((source - quantizer(weight, b).double()).square().sum()) for b in quantizer.bit_choices
            }
            if not all(map(math.isfinite, found[name].values())):
                raise QuantizationError(f"layer {name!r}: its weight or its scale holds NaN or infinity")
    return found


def monotone(by_bits: Mapping[int, float]) -> dict[int, float]:
    """The least value at a width or any lower one."""
    return {b: min(v for lower, v in by_bits.items() if lower <= b) for b in by_bits}


def _held(costs: Costs, name: str, bits: LayerBits | None) -> Pair | None:
    """What `name` is held at; None: it is free."""
    if name not in costs.layers:
        raise PlanError(f"pinned names {name!r}, which is not a quantised layer of the model")
    return None if bits is None else resolve_bits({name: costs.bit_choices[name]}, bits)[name]


def _sharing(costs: Costs, groups: Iterable[Iterable[str]]) -> list[tuple[str, ...]]:
    """The layers in sets that share their bits, in order; layers on one weight always do, overlapping groups merge."""
    leader = {name: layer.tied_to or name for name, layer in costs.layers.items()}
    for group in groups:
        names = [group] if isinstance(group, str) else list(group)
        for name in names:
            if name not in leader:
                raise PlanError(f"a group names {name!r}, which is not a quantised layer of the model")
        merged = {leader[name] for name in names}
        leader = {name: leader[names[0]] if own in merged else own for name, own in leader.items()}
    sets: dict[str, list[str]] = {}
    for name, own in leader.items():
        sets.setdefault(own, []).append(name)
    return [tuple(names) for names in sets.values()]
