"""Tensors that were in 16 bits before a model became float32: what they were, so that a file can store them so.

A prepared model is float32 throughout. A value that came from bfloat16 and was not trained since is a bfloat16 value
still: stored in 16 bits, it loses nothing. A module remembers the types that its own tensors had.
"""

import torch
from torch import Tensor, nn

OWN_DTYPES = "own_dtypes"  # the attribute by which a module remembers: {name of a tensor of its own: dtype}
SHORT = (torch.bfloat16, torch.float16)


def widen(model: nn.Module) -> None:
    """Convert all that is floating-point in `model` to float32, in place; modules remember what was in 16 bits."""
    for module in model.modules():
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None and tensor.dtype in SHORT:
                remember(module, name, tensor.dtype)
    model.float()


def remember(module: nn.Module, name: str, dtype: torch.dtype) -> None:
    """Let `module` remember, in place, that its tensor called `name` was of that type."""
    setattr(module, OWN_DTYPES, {**remembered(module), name: dtype})


def remembered(module: nn.Module) -> dict[str, torch.dtype]:
    """What `module` remembers: {name: dtype}."""
    found = vars(module).get(OWN_DTYPES)
    return found if isinstance(found, dict) else {}


def shortest(module: nn.Module, name: str, tensor: Tensor) -> Tensor:
    """`tensor`, which `module` calls `name`, in the type that it was of if that is shorter and loses nothing."""
    dtype = remembered(module).get(name)
    if dtype not in SHORT or tensor.dtype != torch.float32 or tensor.is_meta:
        return tensor
    short = tensor.detach().to(dtype)
    return short if torch.equal(short.float(), tensor) else tensor


def shortest_of(model: nn.Module, key: str, tensor: Tensor) -> Tensor:
    """`shortest` for the tensor that the state of `model` calls `key`."""
    place, _, name = key.rpartition(".")
    try:
        return shortest(model.get_submodule(place), name, tensor)
    except AttributeError:  # a module with a state of its own making
        return tensor
