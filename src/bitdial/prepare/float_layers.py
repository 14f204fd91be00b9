"""The layers that stay in float: which, how much of the model they are, and why."""

from collections.abc import Mapping, Sequence

from torch import nn

from bitdial.nn import kind_of, nearest_kind
from bitdial.prepare.ends import Ends
from bitdial.prepare.norms import Norms
from bitdial.prepare.report import FloatLayer
from bitdial.prepare.treatment import Treatment
from bitdial.prepare.weights import Weights

SMALL = 0.01  # of the weights: what is less is not worth a warning
LARGE, MANY = 0.2, 100_000  # share and number of weights from which on also what is kept by default is worth one
MOST_NAMED = 10


def find_float_layers(
    weights: Weights, quantised: Mapping[str, nn.Module], treatments: Mapping[str, Treatment], norms: Norms, ends: Ends
) -> tuple[FloatLayer, ...]:
    """Every module of `weights` that is not `quantised`, in the order of the model."""
    found = []
    for name, module in weights.modules.items():
        if name in quantised:
            continue
        if name in treatments:
            reason = treatments[name].reason
        elif (holder := norms.holder(name)) is not None:
            reason = f"is a part of norm {holder!r}, which has a set per width"
        else:
            reason = unknown_reason(name, module, ends)
        found.append(FloatLayer(name, type(module).__name__, weights.sizes[name], reason))
    return tuple(found)


def unknown_reason(name: str, module: nn.Module, ends: Ends | None = None) -> str:
    """Why a module with weights cannot be quantised."""
    called, kind = type(module).__name__, nearest_kind(module)
    if kind_of(module) is None and kind is not None:
        return (
            f"is of type {called}, which changes how the {kind.name} that it is derived from computes; let it call a "
            f"layer of type {kind.name} instead"
        )
    if ends is not None and name not in ends.multiplying:
        return f"is of type {called}, and its weights multiplied nothing on the calibration batch"
    return (
        f"is of type {called}, which bitdial does not know; build it of layers of known kinds, or add a kind "
        "(docs/extending.md)"
    )


def named(layers: Sequence[FloatLayer], total: int) -> str:
    """Some of `layers`, the largest first, each with its share of the `total` of weights and the reason."""
    largest = sorted(layers, key=lambda layer: -layer.weights)[:MOST_NAMED]
    more = f"; and {len(layers) - MOST_NAMED} more" if len(layers) > MOST_NAMED else ""
    return "; ".join(_sentence(layer, total) for layer in largest) + more


def _sentence(layer: FloatLayer, total: int) -> str:
    share = f" ({layer.weights / total:.1%} of the weights)" if layer.weights else ""
    return f"{layer.name or 'the model itself'!r} {layer.reason}{share}"


def warning_of(
    layers: tuple[FloatLayer, ...], total: int, treatments: Mapping[str, Treatment], ends: Ends
) -> list[str]:
    """What to warn of, if anything: large layers that cannot be quantised, and those that were meant to be."""
    costly = [layer for layer in layers if _costs(layer, total, treatments.get(layer.name), ends)]
    share = sum(layer.weights for layer in costly) / max(total, 1)
    return [f"{share:.1%} of the weights stay in float: layer {named(costly, total)}"] if costly else []


def _costs(layer: FloatLayer, total: int, treatment: Treatment | None, ends: Ends) -> bool:
    if treatment is None:
        return layer.weights > SMALL * total and layer.name in ends.multiplying
    if treatment.kept_by == "rule":
        return False
    return treatment.kept_by == "circumstance" or layer.weights > max(LARGE * total, MANY)
