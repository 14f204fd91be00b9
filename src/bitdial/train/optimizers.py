"""The optimizers of training: PyTorch's, at a rate that may lie on the device."""

from typing import Any

import torch
from torch import Tensor, nn

from bitdial.nn import ActivationSite, QuantLayer


def make_optimizer(
    kind: str, parameters: list[nn.Parameter], *, lr: float, weight_decay: float = 0.0
) -> torch.optim.Optimizer:
    """The optimizer named `kind` over `parameters`; on a GPU fused, and fit for a CUDA graph."""
    device = parameters[0].device
    settings: dict[str, Any] = {"lr": lr, "weight_decay": weight_decay}
    if device.type == "cuda":
        settings |= {"lr": torch.tensor(lr, device=device), "fused": True}
    if kind == "sgd":
        sgd = torch.optim.SGD(parameters, momentum=0.9, **settings)
        for parameter in parameters:  # or the fused one fails when some of them step for the first time and others not
            sgd.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter, requires_grad=False)
        return sgd
    adam = torch.optim.Adam if kind == "adam" else torch.optim.AdamW
    return adam(parameters, capturable=device.type == "cuda", **settings)


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
