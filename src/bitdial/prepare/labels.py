"""Batches with targets, and labels that are no class of the model."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from bitdial.errors import ConfigError
from bitdial.prepare.model_call import Batch


def pairs(batches: Iterable[Any]) -> Iterator[tuple[Batch, Any]]:
    """`batches` one by one; ConfigError for what is not a pair (inputs, targets)."""
    for number, batch in enumerate(batches):
        if not isinstance(batch, tuple | list) or len(batch) != 2:
            size = f" of {len(batch)}" if isinstance(batch, tuple | list) else ""
            raise ConfigError(
                f"batch {number} is not a pair (inputs, targets) but a {type(batch).__name__}{size}; "
                "batched(inputs, targets) makes pairs of two tensors"
            )
        yield batch[0], batch[1]


def ignored_label(loss: Callable[..., Any]) -> int | None:
    """The label that `loss` leaves out, if it is torch's cross-entropy; None if its targets may be anything else."""
    if loss is F.cross_entropy:
        return -100
    return loss.ignore_index if isinstance(loss, nn.CrossEntropyLoss) else None


def classes_of(output: Any) -> int | None:
    """How many classes cross-entropy sees in `output` (batch, classes, ...) or (classes,); None if it is no tensor."""
    return output.shape[min(output.dim() - 1, 1)] if isinstance(output, Tensor) and output.dim() else None


def find_odd_label(targets: Any, classes: int, ignored: int | None = None) -> int | None:
    """The first of the class numbers in `targets` that is not below `classes`, or negative; None if there is none.

    Targets that are no whole numbers are not looked at. On a GPU this waits for the device.
    """
    if not isinstance(targets, Tensor) or targets.is_floating_point() or targets.is_complex() or not targets.numel():
        return None
    odd = (targets < 0) | (targets >= classes)
    if ignored is not None:
        odd &= targets != ignored
    return int(targets[odd][0]) if bool(odd.any()) else None


def label_problem(label: float, classes: int) -> str:
    """What to say of a label that is no class."""
    return (
        f"the label {label} is none of the model's {classes} classes, 0 to {classes - 1}; "
        "check the targets, or leave such samples out"
    )
