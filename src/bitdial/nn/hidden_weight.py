"""What a layer on integer codes gives for its `weight`, which it does not have.

Models look at the weights of their layers without multiplying by them: `x.to(self.proj.weight.dtype)`. That must work,
and nothing else may: a tensor of the right shape would give wrong numbers without a word to whoever computes with it.
torch's functions take any object with `__torch_function__` and ask it what they shall do. Live layers have it as a
property.
"""

from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from bitdial.errors import HiddenWeightError


class HiddenWeight:
    """The shape, type and device of the weight of `layer`, and no numbers: anything else is a HiddenWeightError.

    Type and device are those of `like`. It is no Tensor, so torch's fast paths, which pass layers by, are not taken.
    """

    requires_grad = False

    def __init__(self, layer: str, shape: tuple[int, ...], like: Tensor):
        self.layer, self.shape, self.dtype, self.device = layer, torch.Size(shape), like.dtype, like.device

    @property
    def ndim(self) -> int:
        """How many dimensions it has."""
        return len(self.shape)

    def dim(self) -> int:
        """How many dimensions it has."""
        return len(self.shape)

    def size(self, dim: int | None = None) -> torch.Size | int:
        """Its shape, or one of its sizes."""
        return self.shape if dim is None else self.shape[dim]

    def numel(self) -> int:
        """How many weights it has."""
        return self.shape.numel()

    def __repr__(self) -> str:
        return f"HiddenWeight({self.layer!r}, {tuple(self.shape)}, {self.dtype}, {self.device})"

    def __getattr__(self, name: str) -> NoReturn:
        raise HiddenWeightError(_problem(vars(self).get("layer"), name))

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        hidden = [value for value in tree_leaves((args, kwargs)) if isinstance(value, cls)]
        raise HiddenWeightError(_problem(hidden[0].layer if hidden else None, getattr(func, "__name__", str(func))))


def _problem(layer: str | None, name: str) -> str:
    return (
        f"layer {layer!r} of a live model runs on integer codes: its weight has a shape, dtype and device, but no "
        f"values, which {name!r} needs. Call the layer itself; load_trainable(path) gives a model with float weights"
    )
