"""Models that compute their own loss: they take the targets beside the inputs, and return a dict of losses."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from bitdial.errors import ConfigError, TrainingError
from bitdial.prepare.model_call import Batch


@dataclass(frozen=True)
class OwnLosses:
    """The loss of a model that computes its own, as detectors do: `train(..., loss=OwnLosses())`.

    In training mode such a model is called with inputs and targets, and returns a dict of losses, each one number. The
    loss is their sum; `weights` multiply some of them, such as {"loss_masks": 2.0}, and 0 leaves one out.
    """

    weights: Mapping[str, float] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        for name, value in self.weights.items():
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
                raise ConfigError(f"OwnLosses: the weight of {name!r} is {value!r}; give a number of at least 0")

    def parts(self, returned: Any) -> dict[str, Tensor]:
        """What the model `returned` in training mode, by name, as it counts."""
        if not isinstance(returned, Mapping) or not returned:
            raise TrainingError(
                f"OwnLosses: in training mode the model returns a {type(returned).__name__} instead of a dict of "
                "losses; pass a loss(output, targets) of your own"
            )
        if missing := [name for name in self.weights if name not in returned]:
            raise TrainingError(f"OwnLosses: there is no loss {missing[0]!r}; the model returns {', '.join(returned)}")
        for name, value in returned.items():
            if not isinstance(value, Tensor) or value.numel() != 1:
                what = f"of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
                raise TrainingError(f"OwnLosses: {name!r} is {what}; each loss must be one number")
        counted = {name: value for name, value in returned.items() if self.weights.get(name, 1.0) > 0}
        if not counted:
            raise TrainingError(f"OwnLosses: weights={dict(self.weights)} leave out every loss; let one count")
        return {name: value.reshape(()) * self.weights.get(name, 1.0) for name, value in counted.items()}

    def __call__(self, returned: Any, targets: Any) -> Tensor:
        """The sum of the parts; the model has seen the targets."""
        first, *others = self.parts(returned).values()
        return sum(others, start=first)


def with_targets(inputs: Batch, targets: Any, loss: Any) -> Batch:
    """What the model is called with: `inputs`, and for one with its own losses the `targets` behind them."""
    if not isinstance(loss, OwnLosses):
        return inputs
    if isinstance(inputs, dict):
        return {**inputs, "targets": targets}
    return (*inputs, targets) if isinstance(inputs, tuple) else (inputs, targets)
