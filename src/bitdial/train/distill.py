"""Knowledge distillation: where the soft targets come from, and how they enter the loss.

loss = (1 - w) * hard + w * T^2 * KL(target || student)       both at temperature T
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bitdial.errors import ConfigError, TrainingError
from bitdial.observe import Batch, call
from bitdial.train.config import TrainConfig
from bitdial.train.distributed import merge_rows


def soft_loss(logits: Tensor, target_logits: Tensor, temperature: float) -> Tensor:
    """T^2 * KL(target || student), averaged over everything but the class dimension (the last)."""
    classes = logits.shape[-1]
    student = F.log_softmax(logits.reshape(-1, classes).float() / temperature, dim=1)
    target = F.log_softmax(target_logits.reshape(-1, classes).float() / temperature, dim=1)
    return F.kl_div(student, target, reduction="batchmean", log_target=True) * temperature**2


class Distiller:
    """Mixes soft targets into the loss of each width; without distillation it returns the hard loss.

    Call `begin` once a batch, `loss` once a width with the highest first, `end_epoch` after each epoch.
    """

    def __init__(self, config: TrainConfig, *, teacher: nn.Module | None = None, samples: int | None = None):
        self.kind, self.weight, self.temperature = config.distill, config.distill_weight, config.temperature
        self.epochs = config.epochs
        self.epoch = 0
        if (self.kind == "teacher") != (teacher is not None):
            raise ConfigError("distill='teacher' and a teacher model go together; pass both or neither")
        if self.kind == "progressive" and samples is None:
            raise ConfigError(
                "distill='progressive' needs the number of training samples (samples=...) and batches "
                "that carry the samples' indices"
            )
        self.teacher = teacher.eval().requires_grad_(False) if teacher is not None else None
        self.samples = samples or 0
        self._targets: Tensor | None = None
        # Logits by sample index, float32 on the CPU: of the epoch before, and of this one. NaN: not seen.
        self.previous: Tensor | None = None
        self.current: Tensor | None = None

    def begin(self, inputs: Batch) -> None:
        """Prepare the targets of a new batch."""
        self._targets = None
        if self.teacher is not None:
            with torch.no_grad():
                self._targets = call(self.teacher, inputs)

    def loss(self, hard: Tensor, logits: Tensor, *, highest: bool, index: Tensor | None) -> Tensor:
        """The loss of one width; `index` (batch,) names the samples for progressive self-distillation."""
        if self.kind == "none":
            return hard
        if not isinstance(logits, Tensor):
            raise TrainingError("distillation needs a model that returns one tensor of logits")
        if self.kind == "progressive":
            return self._progressive(hard, logits, highest, index)
        if self.kind == "in_place" and highest:
            self._targets = logits.detach()
            return hard
        assert self._targets is not None
        return (1 - self.weight) * hard + self.weight * soft_loss(logits, self._targets, self.temperature)

    def _progressive(self, hard: Tensor, logits: Tensor, highest: bool, index: Tensor | None) -> Tensor:
        if index is None:
            raise TrainingError(
                "distill='progressive' needs batches (inputs, targets, index) with the samples' indices"
            )
        rows = index.cpu()
        if self.current is None:
            self.current = torch.full((self.samples, logits.shape[-1]), float("nan"))
        if int(rows.max()) >= self.samples or int(rows.min()) < 0:
            raise TrainingError(f"a sample index lies outside 0..{self.samples - 1}")
        if highest:
            self.current[rows] = logits.detach().float().cpu()
        if self.previous is None:
            return hard
        target = self.previous[rows]
        known = ~target[:, 0].isnan()
        if not bool(known.any()):
            return hard
        share = self.weight * (self.epoch + 1) / self.epochs * float(known.float().mean())
        known = known.to(logits.device)
        soft = soft_loss(logits[known], target.to(logits.device)[known], self.temperature)
        return (1 - share) * hard + share * soft

    def share(self) -> None:
        """Let every rank know the predictions of all."""
        if self.current is not None:
            merge_rows(self.current)

    def end_epoch(self) -> None:
        """Turn this epoch's predictions into the next one's targets."""
        self.epoch += 1
        self.share()
        self.previous, self.current = self.current, None

    def tensors(self) -> dict[str, Tensor]:
        """What a checkpoint must keep."""
        kept = {"previous": self.previous, "current": self.current}
        return {name: tensor for name, tensor in kept.items() if tensor is not None}

    def load(self, tensors: dict[str, Tensor], epoch: int) -> None:
        """Take back what `tensors` gave."""
        self.previous, self.current = tensors.get("previous"), tensors.get("current")
        self.epoch = epoch
