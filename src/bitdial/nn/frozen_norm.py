"""FrozenBatchNorm2d, of torchvision's detectors, as a batch norm of PyTorch that learns nothing.

Its weight, bias and statistics are buffers, and its class is not derived from PyTorch's. As a batch norm it can have a
set for each width, which training leaves alone and calibration corrects, and every engine runs it as any other norm.
"""

from typing import Any

import torch
from torch import Tensor, nn

from bitdial.nn.parts import Parts

# The classes that compute just this, by name: torchvision is not imported.
NAMES = ("torchvision.ops.misc.FrozenBatchNorm2d", "bitdial.models.detector.FrozenBatchNorm2d")
STATE = "weight|bias|running_mean|running_var"


class FrozenNorm2d(nn.BatchNorm2d):
    """A batch norm that is always in eval mode, with a weight and a bias that want no gradient."""

    def __init__(self, num_features: int, eps: float, **settings: Any):
        super().__init__(num_features, eps, **settings)
        self.requires_grad_(False)

    @property
    def training(self) -> bool:
        """False, whatever it is set to: it normalises by its statistics in training, too."""
        return False

    @training.setter
    def training(self, mode: bool) -> None:
        pass


def frozen_norm(module: Any, parts: Parts) -> FrozenNorm2d:
    """The batch norm that computes what the frozen `module` does."""
    made = FrozenNorm2d(len(module.weight), float(module.eps), device=module.weight.device)
    for name in STATE.split("|"):
        value: Tensor = getattr(module, name).detach()
        own = value.clone() if parts.values else torch.empty_like(value)
        setattr(made, name, nn.Parameter(own, requires_grad=False) if name in ("weight", "bias") else own)
    return made
