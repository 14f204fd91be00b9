"""Call a model on a batch, whatever form its inputs have."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from bitdial.dial.dial import unwrap
from bitdial.errors import ConfigError

Batch = Tensor | list[Any] | tuple[Any, ...] | dict[str, Any]
INPUTS_ALONE = "Where inputs alone are wanted, leave out the targets: [x for x, _ in batches]"
_INPUTS = (
    "give a tensor, a list of images for a detector, a tuple of positional or a dict of keyword arguments of the "
    f"model. {INPUTS_ALONE}"
)


def call(model: Callable[..., Any], batch: Batch) -> Any:
    """Run `model` on a tensor, a tuple of positional or a dict of keyword arguments; ConfigError if it has others.

    A list is one argument: the images of a detector.
    """
    if not isinstance(batch, Tensor | list | tuple | dict):
        raise ConfigError(f"the inputs are a {type(batch).__name__}; {_INPUTS}")
    args = batch if isinstance(batch, tuple) else () if isinstance(batch, dict) else (batch,)
    kwargs = batch if isinstance(batch, dict) else {}
    try:
        return model(*args, **kwargs)
    except (TypeError, AttributeError) as problem:
        _check_arguments(model, args, kwargs)
        if isinstance(batch, list):
            raise ConfigError(f"the model does not take a list ({problem}); {_INPUTS}") from problem
        raise


def sample_lists(batch: Batch) -> bool:
    """Whether the samples of `batch` are in a list, as the images of a detector: it is one, or begins with one."""
    first = batch if isinstance(batch, list) else next(iter(_parts(batch)), None)
    return isinstance(first, list)


def sample_count(batch: Batch) -> int | None:
    """How many samples `batch` has: the length of its list, or that of the first axis of its first tensor.

    None without a tensor, or if that has no axes.
    """
    tensors = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]
    if sample_lists(batch) and tensors:
        return len(batch if isinstance(batch, list) else next(iter(_parts(batch))))
    return len(tensors[0]) if tensors and tensors[0].dim() else None


def _parts(batch: Any) -> Any:
    """The arguments that `batch` has."""
    return batch.values() if isinstance(batch, dict) else batch if isinstance(batch, tuple) else (batch,)


def _check_arguments(model: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise ConfigError if `model` does not take these arguments; else a TypeError is its own affair."""
    forward = getattr(unwrap(cast(nn.Module, model)), "forward", model)
    try:
        inspect.signature(forward).bind(*args, **kwargs)
    except TypeError as problem:
        raise ConfigError(f"the model does not take these inputs ({problem}); {_INPUTS}") from problem


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put `model` in eval mode without gradients, then give every module its own mode back."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes.items():
            module.training = mode
