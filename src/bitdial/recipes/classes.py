"""What a model says that images are of: right answers where labels are known, and agreement with another model."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from bitdial.errors import ConfigError, QuantizationError
from bitdial.images import ImageBatches
from bitdial.images.labels import FOLDERS, class_folders
from bitdial.planning.progress import tracked
from bitdial.prepare.model_call import evaluating


@dataclass(frozen=True)
class Predicted:
    """The class of each image, int64 (images,) on the CPU, and out of how many."""

    classes: Tensor
    outputs: int


@dataclass(frozen=True)
class Judged:
    """Shares of images, 0 to 1: right answers, and the same answer as the reference; None where it is not known."""

    top1: float | None
    agreement: float | None


def predict(model: nn.Module, images: ImageBatches, *, label: str = "", progress: bool = False) -> Predicted:
    """The classes with the largest outputs, in eval mode, at the model's present setting."""
    found, outputs = [], 0
    with evaluating(model), torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        for inputs in tracked(images, label, show=progress):
            logits = model(inputs)
            if not isinstance(logits, Tensor) or logits.dim() != 2 or len(logits) != len(inputs):
                what = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
                raise ConfigError(
                    f"the model gives {what} for {len(inputs)} images; a classifier gives (images, classes)"
                )
            if not bool(torch.isfinite(logits).all()):
                raise QuantizationError("the model's output holds NaN or infinity; check its weights and the images")
            found.append(logits.argmax(dim=1).cpu())
            outputs = logits.shape[1]
    return Predicted(torch.cat(found), outputs)


def judge(predicted: Predicted, images: ImageBatches, reference: Predicted | None) -> Judged:
    """How `predicted`, of `images`, compares with their labels and with `reference`."""
    if images.labels is not None:
        check_labels(images, predicted.outputs)
    top1 = None if images.labels is None else _share(predicted.classes, images.labels)
    return Judged(top1, None if reference is None else _share(predicted.classes, reference.classes))


def check_labels(images: ImageBatches, outputs: int) -> None:
    """Raise ConfigError if the labels of `images` cannot be those of a model with so many outputs."""
    assert images.labels is not None
    if images.label_source == FOLDERS and (count := len(class_folders(images.folder))) != outputs:
        raise ConfigError(
            f"{images.folder} has {count} folders and the model {outputs} classes, so their order says nothing; give "
            "labels in a JSON or CSV file"
        )
    if int(images.labels.max()) >= outputs:
        name = images.names[int(images.labels.argmax())]
        raise ConfigError(
            f"{images.label_source}: {name} is of class {int(images.labels.max())}, and the model has classes 0 to "
            f"{outputs - 1}"
        )


def _share(found: Tensor, expected: Tensor) -> float:
    return int((found == expected).sum()) / len(found)
