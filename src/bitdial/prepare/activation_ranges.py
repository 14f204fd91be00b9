"""Watch a model run on sample data: which layer runs when, and on what input."""

import itertools
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from bitdial.errors import QuantizationError
from bitdial.nn import kind_of
from bitdial.prepare.model_call import Batch, call, evaluating

MOST_SAMPLES = 1 << 16
MOST_TOKEN_VALUES = 1 << 18


@dataclass
class LayerInput:
    """What one layer received: up to MOST_SAMPLES values a call, evenly spaced, and the extremes of all.

    Of a layer that does not multiply its input, only when it ran. `arguments` is the most that a call gave it. Where
    they are asked for, whole `tokens` (rows of the last axis) stand in the place of samples: as many a call, and at
    most MOST_TOKEN_VALUES or a call's more.
    """

    samples: list[Tensor] = field(default_factory=list)
    tokens: list[Tensor] = field(default_factory=list)
    minimum: float = float("inf")
    maximum: float = -float("inf")
    last_call: int = -1
    arguments: int = 1


def observe_inputs(
    model: nn.Module, layers: Mapping[str, nn.Module], batches: list[Batch], *, tokens: Collection[str] = ()
) -> dict[str, LayerInput]:
    """Run `batches` and record each executed layer's input, in the order in which the layers first ran.

    Of the layers named in `tokens`, whole tokens.
    """
    seen: dict[str, LayerInput] = {}
    empty: set[str] = set()
    extremes: list[tuple[str, Tensor]] = []  # of the calls in a batch: to read them one by one, a GPU is waited for
    calls = itertools.count()
    sampled = {name: (kind := kind_of(layer)) is None or kind.multiplies for name, layer in layers.items()}

    def record(name: str, x: Tensor, arguments: int) -> None:
        if sampled[name] and x.numel() == 0:  # of a detector that found nothing in these images
            empty.add(name)
            return
        entry = seen.setdefault(name, LayerInput())
        entry.last_call, entry.arguments = next(calls), max(entry.arguments, arguments)
        if not sampled[name]:
            return
        flat = x.detach().reshape(-1)
        extremes.append((name, torch.stack(flat.aminmax())))
        if name in tokens:
            if sum(kept.numel() for kept in entry.tokens) < MOST_TOKEN_VALUES:
                rows = x.detach().reshape(-1, x.shape[-1])
                entry.tokens.append(rows[:: -(-rows.numel() // MOST_SAMPLES)].clone())
            return
        stride = -(-flat.numel() // MOST_SAMPLES) | 1  # odd, so that it meets every column of an image
        entry.samples.append(flat[::stride].clone())

    def read_extremes() -> None:
        device = extremes[0][1].device if extremes else None
        found = torch.stack([pair.to(device, torch.float64) for _, pair in extremes]).tolist() if extremes else []
        for (name, _), (low, high) in zip(extremes, found, strict=True):
            if not (low > -float("inf") and high < float("inf")):  # also false for NaN
                raise QuantizationError(
                    f"layer {name!r}: its calibration input holds NaN or infinity; check the "
                    "calibration batch and the weights of the layers before it"
                )
            entry = seen[name]
            entry.minimum, entry.maximum = min(entry.minimum, low), max(entry.maximum, high)
        extremes.clear()

    def hook_for(name: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            given = sum(value is not None for value in (*args, *kwargs.values()))
            record(name, args[0] if args else kwargs["input"], given)

        return hook

    handles = [m.register_forward_pre_hook(hook_for(n), with_kwargs=True) for n, m in layers.items()]
    try:
        with evaluating(model):
            for batch in batches:
                try:
                    call(model, batch)
                finally:  # where the model fails on NaN, that is what is to be said
                    read_extremes()
    finally:
        for handle in handles:
            handle.remove()
    if unseen := [name for name in layers if name in empty and name not in seen]:
        raise QuantizationError(
            f"layer {unseen[0]!r}: the calibration batch gives it an empty input. Does a detector find nothing in "
            "these images? Give others, or let it keep low scores meanwhile (score_thresh, score_threshold = 0)"
        )
    return seen
