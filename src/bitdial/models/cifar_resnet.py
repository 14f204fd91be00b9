"""ResNet-20, ResNet-56 and smaller relatives for 32x32 images and below.

Three stages of ``blocks`` basic blocks (6 * blocks + 2 layers), widths w, 2w and 4w, a 3x3 stem
without pooling. Where a stage changes the shape, the shortcut is a 1x1 convolution with batch
norm (``downsample.0`` and ``.1``), not zero padding: skip convolutions are quantised too.
"""

from __future__ import annotations

from torch import Tensor, nn

from bitdial.models.resnet import BasicBlock, initialize, make_stage


class CifarResNet(nn.Module):
    """Small-image ResNet: a 3x3 stem, three stages of basic blocks, pooling, one linear layer."""

    def __init__(self, *, blocks: int, width: int, in_channels: int, num_classes: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, width, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU()
        self.layer1 = make_stage(BasicBlock, width, width, blocks, stride=1)
        self.layer2 = make_stage(BasicBlock, width, 2 * width, blocks, stride=2)
        self.layer3 = make_stage(BasicBlock, 2 * width, 4 * width, blocks, stride=2)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(4 * width, num_classes)
        initialize(self)

    def forward(self, x: Tensor) -> Tensor:
        """Map images (N, in_channels, H, W) to logits (N, num_classes)."""
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.layer3(self.layer2(self.layer1(x)))
        return self.fc(self.avgpool(x).flatten(1))


def cifar_resnet(*, blocks: int = 3, width: int = 16, in_channels: int = 3, num_classes: int = 10) -> nn.Module:
    """Return a ResNet of 6 * blocks + 2 layers.

    For 8x8 one-channel digits: ``cifar_resnet(blocks=1, width=8, in_channels=1)``.
    """
    return CifarResNet(blocks=blocks, width=width, in_channels=in_channels, num_classes=num_classes)


def resnet20(*, num_classes: int = 10, in_channels: int = 3, width: int = 16) -> nn.Module:
    """Return ResNet-20: 272,474 parameters at the default arguments."""
    return cifar_resnet(blocks=3, width=width, in_channels=in_channels, num_classes=num_classes)


def resnet56(*, num_classes: int = 10, in_channels: int = 3, width: int = 16) -> nn.Module:
    """Return ResNet-56: 855,770 parameters at the default arguments."""
    return cifar_resnet(blocks=9, width=width, in_channels=in_channels, num_classes=num_classes)
