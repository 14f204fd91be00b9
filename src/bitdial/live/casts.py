"""Live models refuse casts: `half()`, `to(torch.bfloat16)`, `double()`, `type(...)`.

Scales, norms and tables are float32, and the codes integers, whatever a model runs in: `load(..., dtype=...)` knows
which tensors to convert. PyTorch casts a model part by part, from the first leaf on, so the refusal must come before
any part: every module that has live layers in it asks first. Moves between devices pass.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from bitdial.errors import ConfigError
from bitdial.live.layers import LiveLayer

Convert = Callable[[Tensor], Tensor]


def refuse_casts(model: nn.Module) -> None:
    """Let the live `model` and its parts refuse casts, in place."""
    for module in model.modules():
        if any(isinstance(inner, LiveLayer) for inner in module.modules()):
            module.__dict__["_apply"] = functools.partial(_apply_unless_cast, module)


def _apply_unless_cast(module: nn.Module, fn: Convert, recurse: bool = True) -> Any:
    """`nn.Module._apply`, which all conversions go through; the class's own comes after the check."""
    check_types(module, fn)
    return type(module)._apply(module, fn, recurse)


def check_types(module: nn.Module, fn: Convert) -> None:
    """Raise ConfigError if `fn` changes the type of a tensor that `module` holds; tried on tensors without elements."""
    kinds = {(tensor.dtype, tensor.device): None for tensor in (*module.parameters(), *module.buffers())}
    for dtype, device in kinds:
        wanted = fn(torch.empty(0, dtype=dtype, device=device)).dtype
        if wanted != dtype:
            raise ConfigError(
                f"a live model cannot be cast (here: {dtype} tensors to {wanted}): its scales, norms and sums are "
                "defined in their types. Nothing was changed. A weight-only model runs in 16 bits by load(path, ..., "
                "dtype=torch.bfloat16) or torch.float16; .to(device) moves any"
            )
