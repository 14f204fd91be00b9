"""What one joint step did, by width."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from bitdial.prepare.model_output import known_class_axis
from bitdial.train.accumulate import Part
from bitdial.train.sharding import norms


@dataclass
class StepReport:
    """What one step did, by width: loss, samples right (and seen), rate of the scales, gradient peaks per layer."""

    lr: float = 0.0
    loss: dict[int, Tensor] = field(default_factory=dict)
    parts: dict[int, dict[str, Tensor]] = field(default_factory=dict)  # of the loss, of a model with its own losses
    correct: dict[int, Tensor] = field(default_factory=dict)
    seen: int = 0
    scale_rate: dict[int, float | Tensor] = field(default_factory=dict)
    weight_scale_peaks: dict[int, Tensor] = field(default_factory=dict)
    act_scale_peaks: dict[int, Tensor] = field(default_factory=dict)

    def add(self, bits: int, loss: Tensor, output: Any, part: Part) -> None:
        """Take a part of the batch into account; class labels are compared where the axis of the classes is known."""
        whole = part.share == 1.0
        self.loss[bits] = loss if whole else self.loss.get(bits, 0.0) + loss * part.share
        axis = known_class_axis(output, part.targets)
        if axis is not None and part.targets.dtype == torch.int64:
            guess = output.detach().argmax(dim=axis)
            right = (guess == part.targets).sum()
            self.correct[bits] = right if whole else self.correct.get(bits, 0) + right
            if bits == next(iter(self.loss)):  # each width sees the same samples
                self.seen += guess.numel()

    def add_parts(self, bits: int, parts: Mapping[str, Tensor], share: float) -> None:
        """Take the parts of a loss into account, of a `share` of the batch."""
        mine = self.parts.setdefault(bits, {})
        for name, value in parts.items():
            mine[name] = mine.get(name, 0.0) + value.detach() * share


def gradient_peaks(scales: list[Tensor | None], like: Tensor) -> Tensor:
    """The largest gradient of each scale by magnitude; 0 where there is none."""
    found = {i: s.grad.detach() for i, s in enumerate(scales) if s is not None and s.grad is not None}
    largest = dict(zip(found, norms(list(found.values()), float("inf")), strict=True)) if found else {}
    zero = like.new_zeros((), dtype=torch.float32) if len(found) < len(scales) else None
    return torch.stack([largest[i].float() if i in largest else zero for i in range(len(scales))])  # type: ignore[misc]
