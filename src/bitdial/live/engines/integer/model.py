"""A live model that runs from integer to integer; `set_bits` switches it, and `code_exact` says what it computes."""

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from bitdial.dial.dial import SWITCHBOARD
from bitdial.errors import QuantizationError
from bitdial.live.engines.exact import run_exactly
from bitdial.live.engines.integer.convert import to_integer
from bitdial.live.engines.integer.parts import fuse_model
from bitdial.live.plain import plain_copy


class IntegerModel(nn.Module):
    """The live `model` (from `load`) on integer kernels: the outputs of `code_exact(model)`, bit for bit.

    The model is copied; with `copy=False` it becomes part of this one, and its layers must have no engine yet. Layers,
    norms and widths are found under the names that they have there, as in a compiled model; what the kernels do not
    serve runs by the definition. Called outside of compilers and recordings, it looks whether its inputs are finite,
    for which it waits for the device.
    """

    def __init__(self, model: nn.Module, *, copy: bool = True):
        super().__init__()
        exact = run_exactly(plain_copy(model) if copy else model)
        to_integer(exact)
        self._orig_mod = exact.requires_grad_(False)
        self._fused = (fuse_model(exact),)  # not a submodule: it shares those of the model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The output of the model."""
        if not torch.compiler.is_compiling() and not _recording():
            _check_finite((args, kwargs))
        with torch.no_grad():
            return self._fused[0](*args, **kwargs)

    def train(self, mode: bool = True) -> Self:
        """Change nothing: a live model is always in eval mode."""
        return self

    def plain(self) -> nn.Module:
        """The model itself."""
        return self._orig_mod

    def __getattr__(self, name: str) -> Any:
        """The attributes of the model."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "_orig_mod":
                raise
            return getattr(self._orig_mod, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """What the model has is set there, such as a detector's threshold of scores."""
        inner = vars(self).get("_modules", {}).get("_orig_mod")
        if inner is not None and name in vars(inner) and name not in vars(self):
            setattr(inner, name, value)
        else:
            super().__setattr__(name, value)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        getattr(self._orig_mod, SWITCHBOARD).rebind()  # where operands have been moved
        self._fused = (fuse_model(self._orig_mod),)  # tensors that it holds itself have moved
        return self


def _recording() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def _check_finite(inputs: object) -> None:
    for tensor in tree_leaves(inputs):
        if isinstance(tensor, Tensor) and tensor.is_floating_point() and tensor.numel():
            low, high = tensor.aminmax()
            if not bool((low > -float("inf")) & (high < float("inf"))):  # also false for NaN
                raise QuantizationError("the model's input holds NaN or infinity; check what goes in")
