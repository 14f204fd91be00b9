"""Small networks for the tests of calibration, with norms that have seen something."""

import torch
from torch import Tensor, nn

from bitdial import QuantConfig, build_model, prepare

BITS = (8, 6, 4, 3)


class Inverted(nn.Module):
    """An inverted residual with ReLU6, whose channels have very different ranges."""

    def __init__(self) -> None:
        super().__init__()
        self.expand = nn.Sequential(nn.Conv2d(4, 16, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU6())
        self.filter = nn.Sequential(
            nn.Conv2d(16, 16, 3, padding=1, groups=16, bias=False), nn.BatchNorm2d(16), nn.ReLU6()
        )
        self.project = nn.Sequential(nn.Conv2d(16, 4, 1, bias=False), nn.BatchNorm2d(4))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.project(self.filter(self.expand(x)))


class Mobile(nn.Module):
    """A stem, two inverted residuals and a linear head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU())
        self.first, self.second = Inverted(), Inverted()
        self.pool, self.head = nn.AdaptiveAvgPool2d(1), nn.Linear(4, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.pool(self.second(self.first(self.stem(x)))).flatten(1))


def images(count: int = 48, seed: int = 0) -> Tensor:
    return torch.randn(count, 3, 8, 8, generator=torch.Generator().manual_seed(seed))


def settled(model: nn.Module, x: Tensor) -> nn.Module:
    """`model` with norms that have the statistics of `x` and unequal weights and biases."""
    generator = torch.Generator().manual_seed(1)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.weight.data.copy_(torch.rand(module.num_features, generator=generator) * 2 + 0.1)
            module.bias.data.copy_(torch.randn(module.num_features, generator=generator) * 0.3)
            module.momentum = None
    with torch.no_grad():
        model.train()(x)
    return model.eval()


def mobile(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return settled(Mobile(), images(64, seed=9))


def resnet(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return settled(build_model("cifar_resnet", blocks=1, width=8), images(64, seed=9))


def prepared(model: nn.Module, **settings: object) -> nn.Module:
    config = QuantConfig(**{"bit_choices": BITS, "keep_first_last": False, **settings})  # type: ignore[arg-type]
    return prepare(model, config, images(16)).eval()
