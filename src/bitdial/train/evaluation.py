"""What a training run measures after each epoch, tried once before the first so that a mistake costs nothing."""

import math
import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from bitdial.dial.dial import at_bits
from bitdial.errors import ConfigError
from bitdial.prepare.measure import Measure, Measured, take_measure
from bitdial.prepare.model_output import Output
from bitdial.train.evaluate import accuracy, evaluate


class Evaluation:
    """Takes `measure(model, batches)` at each of `bit_choices`; the default measure is of the selected `output`."""

    def __init__(
        self,
        model: nn.Module,
        batches: Iterable[Any],
        measure: Measure = accuracy,
        *,
        bit_choices: tuple[int, ...],
        output: Output = None,
    ):
        if iter(batches) is batches:
            raise ConfigError("evaluate_on can be gone through only once, and every epoch needs it; give a list")
        self.model, self.batches, self.bit_choices = model, batches, bit_choices
        self.name = "top1" if measure is accuracy else "measured"
        self.measure = partial(accuracy, output=output) if measure is accuracy else measure

    def rehearse(self) -> None:
        """Measure the first batch at the highest width, for what may go wrong; random states stay as they are."""
        with _same_random_states():
            first = next(iter(self.batches), None)
            if first is None:
                raise ConfigError("there is nothing to evaluate on: evaluate_on is empty")
            try:
                with at_bits(self.model, self.bit_choices[0]):
                    take_measure(self.model, [first], self.measure)
            except Exception as problem:
                problem.add_note("So ended the trial of `measure` on the first batch of `evaluate_on`, before training")
                raise

    def row(self) -> dict[str, dict[str, Any]]:
        """What a row of the history says of it: {"top1": {"8": 0.97, ...}}."""
        found = evaluate(self.model, self.batches, self.bit_choices, measure=self.measure)
        return {self.name: {str(bits): _as_json(value) for bits, value in found.items()}}


def _as_json(value: Measured) -> Any:
    """JSON has no infinity and no NaN."""
    if isinstance(value, dict):
        return {name: _as_json(one) for name, one in value.items()}
    return value if math.isfinite(value) else None


@contextmanager
def _same_random_states() -> Iterator[None]:
    """Give Python's, numpy's and torch's generators back as they were."""
    states = random.getstate(), np.random.get_state()
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
