"""Knowledge distillation: where the soft targets come from, and how they enter the loss.

loss = (1 - w) * hard + w * T^2 * KL(target || student)       both at temperature T

Nothing here looks at values on the device, so that a step can be recorded as a CUDA graph.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn

from bitdial.errors import ConfigError, TrainingError
from bitdial.prepare.model_call import Batch, call
from bitdial.prepare.model_output import Output, known_class_axis, selected
from bitdial.train.config import TAUGHT, TrainConfig
from bitdial.train.distributed import merge_rows
from bitdial.train.soft_loss import soft_loss, soft_losses

LARGEST_TABLES = 1 << 30  # bytes of past predictions that are kept on the device of the logits


def class_axis_to_distill(output: Any, targets: Any) -> int:
    """The axis of `output` along which the classes lie; TrainingError if `targets` do not tell."""
    if not isinstance(output, Tensor) or output.dim() <= 2:
        return -1
    axis = known_class_axis(output, targets)
    if axis is None:
        raise TrainingError(
            f"distillation cannot tell which axis of the output, of shape {tuple(output.shape)}, has the classes; let "
            "`output` be a function that makes it (samples, classes)"
        )
    return axis


class Distiller:
    """Mixes soft targets into the loss of each width; without distillation it returns the hard loss.

    Call `begin` once a batch, `loss` once a width with the highest first, `end_epoch` after each epoch.
    """

    def __init__(
        self,
        config: TrainConfig,
        *,
        teacher: nn.Module | None = None,
        samples: int | None = None,
        output: Output = None,
    ):
        self.kind, self.weight, self.temperature = config.distill, config.distill_weight, config.temperature
        self.epochs = config.epochs
        self.epoch = 0
        if (self.kind in TAUGHT) != (teacher is not None):
            raise ConfigError("distill='teacher' or 'cascade' and a teacher model go together; pass both or neither")
        if self.kind == "progressive" and samples is None:
            raise ConfigError(
                "distill='progressive' needs the number of training samples (samples=...) and batches "
                "that carry the samples' indices"
            )
        self.teacher = teacher.eval().requires_grad_(False) if teacher is not None else None
        self.samples, self.output = samples or 0, output
        self._targets: list[Tensor | None] = [None]  # by part of the batch
        # Logits (samples, classes) in float32: of the epoch before, and of this one. NaN: not seen.
        self.previous: Tensor | None = None
        self.current: Tensor | None = None
        self._strength = torch.zeros(())
        self._grow()

    @property
    def recordable(self) -> bool:
        """Whether the next step can be part of a CUDA graph: past predictions have their place on the device."""
        return self.kind != "progressive" or (self.current is not None and self.current.is_cuda)

    def needs_hard(self, *, highest: bool) -> bool:
        """Whether the hard loss has a part in that of the highest width, or of the others."""
        taught = self.kind in TAUGHT or (self.kind == "in_place" and not highest)
        return not taught or self.weight < 1

    def placed(self, index: Tensor | None, device: torch.device) -> Tensor | None:
        """`index`, checked, on `device`; None if this kind needs none."""
        if self.kind != "progressive":
            return None
        if index is None:
            raise TrainingError(
                "distill='progressive' needs batches (inputs, targets, index) with the samples' indices"
            )
        if index.dim() != 1 or index.is_floating_point() or not len(index):
            raise TrainingError(
                f"a batch's index must be whole numbers (batch,), got {index.dtype} {tuple(index.shape)}"
            )
        if int(index.max()) >= self.samples or int(index.min()) < 0:
            raise TrainingError(f"a sample index lies outside 0..{self.samples - 1}")
        return index.to(device, torch.int64)

    def begin(self, *parts: Batch) -> None:
        """Prepare the targets of a new batch, given as a whole or in parts."""
        self._targets = []  # those of the batch before go first: of a language model they are large
        self._targets = [None if self.teacher is None else self._taught(inputs) for inputs in parts]

    def _taught(self, inputs: Batch) -> Tensor:
        """The teacher's logits."""
        assert self.teacher is not None
        with torch.no_grad():
            targets = call(self.teacher, inputs)
        if not isinstance(targets, Tensor) or callable(self.output):  # a teacher may return its logits as they are
            targets = selected(targets, self.output)
        if not isinstance(targets, Tensor):
            raise TrainingError(
                f"distillation needs a teacher that returns one tensor of logits, got {type(targets).__name__}; "
                "say which part: output='logits'"
            )
        return targets

    def loss(
        self, hard: Tensor | None, logits: Tensor, *, highest: bool, index: Tensor | None, axis: int = -1, part: int = 0
    ) -> Tensor:
        """The loss of one width on one part of the batch, whose classes lie along `axis`.

        `hard` is None where it is not needed. `index` (batch,) names the samples for progressive self-distillation.
        """
        if self.kind == "none":
            assert hard is not None
            return hard
        if not isinstance(logits, Tensor):
            raise TrainingError(
                "distillation needs a model that returns one tensor of logits; say which part: output='logits'"
            )
        if self.kind == "progressive":
            return self._progressive(hard, logits, highest, index)
        targets = self._targets[part]
        if self.kind in ("in_place", "cascade") and highest:
            self._targets[part] = logits.detach()  # for the other widths
        if targets is None:
            assert hard is not None
            return hard
        if targets.shape != logits.shape:
            raise TrainingError(
                f"the teacher's outputs have shape {tuple(targets.shape)}, the model's {tuple(logits.shape)}; "
                "both need the same classes"
            )
        soft = soft_loss(logits.movedim(axis, -1), targets.movedim(axis, -1), self.temperature)
        return soft * self.weight if hard is None else (1 - self.weight) * hard + self.weight * soft

    def _progressive(self, hard: Tensor | None, logits: Tensor, highest: bool, index: Tensor | None) -> Tensor:
        """The soft loss of samples that are not known is 0, and so is their share of the weight."""
        assert index is not None
        assert hard is not None
        previous, current = self._tables(logits)
        rows = index.to(current.device)
        if highest:
            current.index_copy_(0, rows, logits.detach().to(current))
        target = previous.index_select(0, rows).to(logits.device)
        known = ~target[:, 0].isnan()
        each = soft_losses(logits, target.nan_to_num(), self.temperature)
        soft = torch.where(known, each, 0.0).mean()
        return (1 - self._strength * known.float().mean()) * hard + self._strength * soft

    def _tables(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Previous and current predictions, where they belong: with the logits, unless they are too large."""
        classes = logits.shape[-1]
        home = logits.device if 8 * self.samples * classes <= LARGEST_TABLES else torch.device("cpu")
        if self.current is None:
            self.previous, self.current = (torch.full((self.samples, classes), math.nan, device=home) for _ in range(2))
        assert self.previous is not None
        if self.current.device != home or self._strength.device != logits.device:
            self.previous, self.current = self.previous.to(home), self.current.to(home)
            self._strength = self._strength.to(logits.device)
            self._grow()
        return self.previous, self.current

    def _grow(self) -> None:
        """Set the weight of the soft loss to that of the present epoch."""
        self._strength.fill_(self.weight * (self.epoch + 1) / self.epochs)

    def share(self) -> None:
        """Let every rank know the predictions of all."""
        if self.current is not None:
            merge_rows(self.current)

    def end_epoch(self) -> None:
        """Turn this epoch's predictions into the next one's targets."""
        self.epoch += 1
        self._grow()
        self.share()
        if self.previous is not None and self.current is not None:
            self.previous.copy_(self.current)
            self.current.fill_(math.nan)

    def tensors(self) -> dict[str, Tensor]:
        """What a checkpoint must keep."""
        kept = {"previous": self.previous, "current": self.current}
        return {name: tensor for name, tensor in kept.items() if tensor is not None}

    def load(self, tensors: dict[str, Tensor], epoch: int) -> None:
        """Take back what `tensors` gave."""
        self.previous, self.current = tensors.get("previous"), tensors.get("current")
        self.epoch = epoch
        self._grow()
