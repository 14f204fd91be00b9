"""The optimizers of training: PyTorch's, at a rate that may lie on the device."""

from typing import Any

import torch
from torch import Tensor, nn

from bitdial.nn import ActivationSite, QuantLayer
from bitdial.train.config import TrainConfig


def make_optimizer(
    kind: str, parameters: list[nn.Parameter], *, lr: float, weight_decay: float = 0.0
) -> torch.optim.Optimizer:
    """The optimizer named `kind` over `parameters`; on a GPU fused, and fit for a CUDA graph."""
    device = parameters[0].device
    settings: dict[str, Any] = {"lr": lr, "weight_decay": weight_decay}
    on_device = device.type == "cuda" and not hasattr(parameters[0], "to_local")  # sharded ones take plain numbers
    if device.type == "cuda":
        settings |= {"lr": torch.tensor(lr, device=device) if on_device else lr, "fused": True}
    if kind == "sgd":
        sgd = torch.optim.SGD(parameters, momentum=0.9, **settings)
        for parameter in parameters:  # or the fused one fails when some of them step for the first time and others not
            sgd.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter, requires_grad=False)
        return sgd
    adam = torch.optim.Adam if kind == "adam" else torch.optim.AdamW
    return adam(parameters, capturable=on_device, **settings)


def make_scale_optimizers(
    config: TrainConfig, scales: list[nn.Parameter], bit_choices: tuple[int, ...]
) -> dict[int, torch.optim.Optimizer]:
    """One optimizer of the scales per width: the same one for all, unless each keeps a state of its own.

    None where there is no scale to learn: weight-only layers of a scheme that derives them.
    """
    if not scales:
        return {}
    if config.scale_state == "shared":
        return dict.fromkeys(bit_choices, make_optimizer("adam", scales, lr=config.lr))
    return {bits: make_optimizer("adam", scales, lr=config.lr) for bits in bit_choices}


def step_at(optimizer: torch.optim.Optimizer, lr: float | Tensor) -> None:
    """A step of `optimizer` at the rate `lr`."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr
    optimizer.step()


def split_parameters(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """The parameters of the quantizers, and all others; each parameter once, in the model's order."""
    quantizers: list[nn.Module | None] = []
    for module in model.modules():
        if isinstance(module, QuantLayer):
            quantizers += [module.weight_quantizer, module.act_quantizer]
        elif isinstance(module, ActivationSite):
            quantizers.append(module.quantizer)
    scales = list(dict.fromkeys(p for each in quantizers if each is not None for p in each.parameters()))
    mine = set(scales)
    return scales, [p for p in model.parameters() if p not in mine and p.requires_grad]
