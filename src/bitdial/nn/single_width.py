"""A prepared model that trains at one width which nobody chose says so, once: after some passes, or when it is saved.

Any training loop runs a prepared model, transformers' Trainer for example: at the highest width, and the others stay
untrained. The first quantised layer that goes by the dial counts the passes in train mode with gradients, until a width
is set.
"""

import warnings
from typing import Any

import torch
from torch import nn

PASSES = 100
FEW_PASSES = 10  # after which a model that is saved has been trained


def watch_width(model: nn.Module) -> None:
    """Let the first quantised layer of the prepared `model` that goes by the dial count, in place."""
    layers: list[Any] = [module for module in model.modules() if hasattr(type(module), "unset_passes")]
    layer = next((layer for layer in layers if layer.fixed_bits is None), None)
    if layer is not None and len(layer.bit_choices) > 1:
        layer.unset_passes = 0


def count_pass(layer: Any) -> None:
    """Count a pass of `layer`, if it is one of training and no width was set so far."""
    if layer.unset_passes is None or not layer.training or not torch.is_grad_enabled():
        return
    layer.unset_passes += 1
    if layer.unset_passes > PASSES:
        _warn(layer, PASSES)


def check_trained_widths(model: nn.Module) -> None:
    """Warn if `model`, which is about to be saved, was trained and no width was ever set."""
    for layer in model.modules():
        passes: Any = getattr(layer, "unset_passes", None)
        if passes is not None and passes >= FEW_PASSES:
            _warn(layer, passes)


def _warn(layer: Any, passes: int) -> None:
    layer.unset_passes = None
    warnings.warn(
        f"this prepared model has run {passes} times in training, and no width was ever set: only "
        f"{layer.bit_choices[0]} bits are trained, the other widths are not. bitdial.train or JointStep trains "
        "all of them, joint_trainer with transformers' Trainer; "
        f"set_bits(model, {layer.bit_choices[0]}) says that one width is meant",
        stacklevel=3,
    )
