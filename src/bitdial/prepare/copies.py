"""The copy of a user's model that `prepare` works on: without wrappers, and in float32."""

import itertools
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from bitdial.dial.dial import copy_unwrapped
from bitdial.dial.plan import shortened
from bitdial.errors import ConfigError
from bitdial.nn.own_dtypes import widen
from bitdial.prepare.model_call import Batch


def copy_to_prepare(model: nn.Module, batches: list[Batch]) -> tuple[nn.Module, list[Batch], list[str]]:
    """A copy of `model`, `batches` in the dtype that the copy takes, and warnings of what is other than before."""
    made, said = copy_unwrapped(model), _lost_hooks(model)
    found = {t.dtype: n for n, t in _tensors(made) if t.is_floating_point() and t.dtype != torch.float32}
    if not found:
        return made, batches, said
    dtypes = " and ".join(f"{dtype} ({name!r})" for dtype, name in found.items())
    widen(made)
    warning = (
        f"the model has tensors in {dtypes}; the prepared copy is in float32, in which it trains, so give it float32 "
        "inputs. TrainConfig(autocast='bfloat16') trains in 16 bits"
    )
    return made, [tree_map_only(Tensor, _as_float32, batch) for batch in batches], [*said, warning]


def _lost_hooks(model: nn.Module) -> list[str]:
    """A warning if parameters have hooks: PyTorch copies a parameter without them."""
    hooked = [n for n, p in model.named_parameters() if p._backward_hooks or p._post_accumulate_grad_hooks]
    if not hooked:
        return []
    return [
        f"the hooks of parameters ({shortened(hooked, most=20)}) are not in the prepared copy; register them there "
        "again, if they mask gradients or the like"
    ]


def _as_float32(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.is_floating_point() else tensor


def _tensors(model: nn.Module) -> Any:
    return itertools.chain(model.named_parameters(), model.named_buffers())


def check_plain(model: nn.Module) -> None:
    """Refuse what torch.jit has compiled: layers there cannot be replaced."""
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            what = f"module {name!r}" if name else "the model"
            raise ConfigError(
                f"{what} is compiled by torch.jit, and its layers cannot be replaced; pass the nn.Module that it was "
                "made from, and compile afterwards"
            )


def check_initialised(model: nn.Module) -> None:
    """Refuse lazy modules, whose sizes are not known yet."""
    for name, module in model.named_modules():
        own = (*module._parameters.values(), *module._buffers.values())
        if any(nn.parameter.is_lazy(tensor) for tensor in own):
            raise ConfigError(
                f"layer {name!r} is a {type(module).__name__} whose sizes are not known yet; run the model on a batch "
                "once, then prepare it"
            )
