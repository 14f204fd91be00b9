"""What a model returns: the part of it that is wanted, and the axis along which the classes lie."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from bitdial.errors import ConfigError, TrainingError

Output = str | int | Callable[[Any], Any] | None
OWN_MEASURE = "a measure of your own, measure(model, batches), says what is right: evaluate(..., measure=...)"


def selected(returned: Any, output: Output) -> Any:
    """The part of what a model `returned` that `output` names; all of it for None.

    A name is the key of a dict or the attribute of an object such as transformers' ModelOutput, a number the place in a
    tuple. A function is given what was returned.
    """
    if output is None:
        return returned
    if callable(output):
        return output(returned)
    if isinstance(output, bool) or not isinstance(output, str | int):
        raise ConfigError(f"output={output!r} must be a name, a place in a tuple, or a function of what is returned")
    kind = type(returned).__name__
    if isinstance(output, int):
        if not isinstance(returned, tuple | list) or not -len(returned) <= output < len(returned):
            size = f" of {len(returned)}" if isinstance(returned, tuple | list) else ""
            raise ConfigError(f"output={output}: the model returns a {kind}{size}, which has no such place")
        return returned[output]
    if isinstance(returned, Mapping):
        if output not in returned:
            raise ConfigError(f"output={output!r}: the model returns a {kind} of {', '.join(map(repr, returned))}")
        return returned[output]
    if isinstance(returned, Tensor) or not hasattr(returned, output):
        raise ConfigError(f"output={output!r}: the model returns a {kind}, which has no part of that name")
    return getattr(returned, output)


def no_tensor(returned: Any) -> str:
    """What to say of a model that `returned` something else than the one tensor that is wanted."""
    kind = type(returned).__name__
    if isinstance(returned, Mapping) and returned:
        names = list(returned)
        part = "logits" if "logits" in names else names[0]
        return f"the model returns a {kind} of {', '.join(map(repr, names))}; say which part is meant: output={part!r}"
    if isinstance(returned, list) and returned and isinstance(returned[0], Mapping):
        return f"the model returns a dict for each image, as detectors do; {OWN_MEASURE}"
    if isinstance(returned, tuple | list) and returned:
        return f"the model returns a {kind} of {len(returned)}; say which part is meant: output=0, its first"
    return f"the model returns a {kind} instead of a tensor; say which part of it is meant: output='logits'"


def possible_class_axes(output: Tensor, targets: Tensor) -> list[int]:
    """The axes of `output` without which it has the shape of `targets`; the first of several is the batch's."""
    shape, wanted = tuple(output.shape), tuple(targets.shape)
    axes = range(1 if len(shape) > 1 else 0, len(shape))
    return [axis for axis in axes if shape[:axis] + shape[axis + 1 :] == wanted]


def known_class_axis(output: Any, targets: Any) -> int | None:
    """The one axis along which `output` can have the classes of `targets`; None if there is not exactly one."""
    if not isinstance(output, Tensor) or not isinstance(targets, Tensor):
        return None
    axes = possible_class_axes(output, targets)
    return axes[0] if len(axes) == 1 and output.shape[axes[0]] > 1 else None


def find_class_axis(output: Tensor, targets: Tensor, class_axis: int | None = None) -> int:
    """The axis of `output` along which the classes lie: `class_axis`, or the only one that fits `targets`.

    TrainingError where none does, or several do, or the axis has one logit.
    """
    shapes = f"an output of shape {tuple(output.shape)} and targets of shape {tuple(targets.shape)}"
    axes = possible_class_axes(output, targets)
    if class_axis is not None:
        axis = class_axis + output.dim() if class_axis < 0 else class_axis
        rest = [size for place, size in enumerate(output.shape) if place != axis]
        if not 0 <= axis < output.dim() or rest != list(targets.shape):
            raise TrainingError(f"class_axis={class_axis} does not go with {shapes}")
        axes = [axis]
    if output.shape == targets.shape:
        raise TrainingError(
            f"{shapes}: no axis has the classes. For one logit, or several labels for a sample, {OWN_MEASURE}. Of "
            "one-hot targets, take targets.argmax(1)"
        )
    if not axes:
        raise TrainingError(f"{shapes} do not go together: the targets have the output's axes without the classes")
    if len(axes) > 1:
        raise TrainingError(
            f"{shapes}: the classes can lie along axis {' or '.join(map(str, axes))}. Say which: class_axis={axes[0]}, "
            f"as in measure=functools.partial(accuracy, class_axis={axes[0]})"
        )
    if output.shape[axes[0]] == 1:
        raise TrainingError(f"{shapes}: the model has one logit, so the largest says nothing; {OWN_MEASURE}")
    return axes[0]
