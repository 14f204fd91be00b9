"""What operators have in common that switch a model in place: called for little work, they must not cost or wait."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bitdial.errors import PlanError

Numbers = NDArray[np.int32]
BLOCK_WORDS = 2048  # what one program of a switch handles: at most, and of codes exactly


def in_place_op(name: str, *, mutates: tuple[str, ...]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Declare the operator `bitdial::name`, which returns nothing and has no gradient.

    As by `torch.library.custom_op`, but for the layer that guards gradients: that takes longer than all else on the way
    to a kernel.
    """

    def declare(function: Callable[..., None]) -> Callable[..., None]:
        full_name = f"bitdial::{name}"
        torch.library.define(full_name, torch.library.infer_schema(function, mutates_args=mutates))
        torch.library.impl(full_name, "default")(function)
        torch.library.register_fake(full_name)(_nothing)
        op: Callable[..., None] = getattr(torch.ops.bitdial, name).default
        return op

    return declare


def _nothing(*arguments: Any) -> None:
    return None


def send(numbers: Numbers, target: Tensor) -> None:
    """Copy `numbers` into `target`, int32, without waiting for the device; PlanError while a graph is recorded."""
    on_gpu = target.is_cuda
    if on_gpu and torch.cuda.is_current_stream_capturing():
        raise PlanError("a switch cannot be recorded; call set_bits outside, recorded graphs follow the dial")
    # Pinned memory that PyTorch does not use again before the copy is done.
    staged = torch.empty(target.shape, dtype=torch.int32, pin_memory=on_gpu)
    staged.numpy()[...] = numbers
    target.copy_(staged, non_blocking=True)
