"""How good a model is, by a function of the user's own: one contract for evaluation, training and search."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from bitdial.errors import ConfigError
from bitdial.prepare.model_call import evaluating

Measure = Callable[[nn.Module, list[Any]], Any]  # (model, batches) -> a number, or a dict of numbers
Measured = float | dict[str, float]


def take_measure(model: nn.Module, batches: Iterable[Any], measure: Measure) -> Measured:
    """`measure(model, batches)` as plain numbers; `model` is in eval mode without gradients, then as it was."""
    if not callable(measure):
        raise ConfigError(f"measure={measure!r} must be a function measure(model, batches), such as bitdial.accuracy")
    with evaluating(model):
        found = measure(model, list(batches))
    if isinstance(found, Mapping):
        return {str(name): _number(value, f"as {name!r}") for name, value in found.items()}
    return _number(found, "instead of a number or a dict of numbers")


def _number(value: Any, place: str) -> float:
    """A number of Python's, numpy's or in a tensor."""
    try:
        if isinstance(value, str | bytes) or (isinstance(value, Tensor) and value.numel() != 1):
            raise TypeError(type(value).__name__)
        return float(value)
    except (TypeError, ValueError) as problem:
        raise ConfigError(f"the measure returned {value!r:.80} {place}") from problem
