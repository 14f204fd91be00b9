"""Call a model on a batch, whatever form its inputs have."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn

from bitdial.dial.dial import unwrap
from bitdial.errors import ConfigError

Batch = Tensor | tuple[Any, ...] | dict[str, Any]
INPUTS_ALONE = "Where inputs alone are wanted, leave out the targets: [x for x, _ in batches]"
_INPUTS = f"give a tensor, a tuple of positional or a dict of keyword arguments of the model. {INPUTS_ALONE}"


def call(model: Callable[..., Any], batch: Batch) -> Any:
    """Run `model` on a tensor, a tuple of positional or a dict of keyword arguments; ConfigError if it has others."""
    if not isinstance(batch, Tensor | tuple | dict):
        raise ConfigError(f"the inputs are a {type(batch).__name__}; {_INPUTS}")
    args = batch if isinstance(batch, tuple) else () if isinstance(batch, dict) else (batch,)
    kwargs = batch if isinstance(batch, dict) else {}
    try:
        return model(*args, **kwargs)
    except TypeError:
        _check_arguments(model, args, kwargs)
        raise


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
