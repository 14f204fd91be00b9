"""Put other modules into a model."""

from torch import nn


def swap_modules(model: nn.Module, new: dict[nn.Module, nn.Module]) -> None:
    """Replace modules of `model` in place, wherever they appear; a module used twice stays one module."""
    for parent in list(model.modules()):
        for name, child in parent._modules.items():
            if child is not None and child in new:
                parent._modules[name] = new[child]
    turn_off_fast_paths(model)


def turn_off_fast_paths(model: nn.Module) -> None:
    """Let PyTorch's own encoders call their layers, in place: fast paths read float weights and make nested tensors."""
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoderLayer):
            module.activation_relu_or_gelu = 0
        elif isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False
