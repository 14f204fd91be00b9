"""ResNet-18 and ResNet-50 for ImageNet, key for key the layout of torchvision's weights.

Parameter names, shapes and order follow torchvision, so its published weights load with
``strict=True``; in ResNet-50 the 3x3 convolution carries the stride, as there. ReLUs work out of
place: a quantizer behind one may keep its input for the backward pass.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut: ``relu(x' + bn(conv(relu(bn(conv(x))))))``."""

    expansion = 1

    def __init__(self, in_channels: int, width: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, width, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU()
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample = _shortcut(in_channels, width * self.expansion, stride)

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, in_channels, H, W) to (N, width, H / stride, W / stride)."""
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        shortcut = x if self.downsample is None else self.downsample(x)
        return self.relu(out + shortcut)


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions and a shortcut; the output has four times the width."""

    expansion = 4

    def __init__(self, in_channels: int, width: int, stride: int = 1) -> None:
        super().__init__()
        out_channels = width * self.expansion
        self.conv1 = nn.Conv2d(in_channels, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride=stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, out_channels, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(out_channels)
        self.relu = nn.ReLU()
        self.downsample = _shortcut(in_channels, out_channels, stride)

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, in_channels, H, W) to (N, 4 * width, H / stride, W / stride)."""
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        shortcut = x if self.downsample is None else self.downsample(x)
        return self.relu(out + shortcut)


class ResNet(nn.Module):
    """ImageNet ResNet: a 7x7 stem, four stages of blocks, average pooling, one linear layer."""

    def __init__(
        self,
        block: type[BasicBlock] | type[Bottleneck],
        blocks: Sequence[int],
        *,
        num_classes: int,
        in_channels: int,
    ) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, 64, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.relu = nn.ReLU()
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        grow = block.expansion
        self.layer1 = make_stage(block, 64, 64, blocks[0], stride=1)
        self.layer2 = make_stage(block, 64 * grow, 128, blocks[1], stride=2)
        self.layer3 = make_stage(block, 128 * grow, 256, blocks[2], stride=2)
        self.layer4 = make_stage(block, 256 * grow, 512, blocks[3], stride=2)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(512 * grow, num_classes)
        initialize(self)

    def forward(self, x: Tensor) -> Tensor:
        """Map images (N, in_channels, H, W) to logits (N, num_classes)."""
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(self.avgpool(x).flatten(1))


def resnet18(*, num_classes: int = 1000, in_channels: int = 3) -> nn.Module:
    """Return ResNet-18: 11,689,512 parameters at the default arguments."""
    return ResNet(BasicBlock, (2, 2, 2, 2), num_classes=num_classes, in_channels=in_channels)


def resnet50(
    *, num_classes: int = 1000, in_channels: int = 3, stride_first: bool = False, norm_eps: float = 1e-5
) -> nn.Module:
    """Return ResNet-50: 25,557,032 parameters at the default arguments.

    ``stride_first`` puts the stride of a stage on its first 1x1 convolution, where the paper and Keras have it;
    weights from there may also want ``norm_eps=1e-3``.
    """
    model = ResNet(Bottleneck, (3, 4, 6, 3), num_classes=num_classes, in_channels=in_channels)
    for module in model.modules():
        if isinstance(module, Bottleneck) and stride_first:
            module.conv1.stride, module.conv2.stride = module.conv2.stride, module.conv1.stride
        elif isinstance(module, nn.BatchNorm2d):
            module.eps = norm_eps
    return model


def make_stage(
    block: type[BasicBlock] | type[Bottleneck],
    in_channels: int,
    width: int,
    blocks: int,
    stride: int,
) -> nn.Sequential:
    """Return ``blocks`` residual blocks in a row; the first has the stride, the rest have 1."""
    first = block(in_channels, width, stride)
    rest = (block(width * block.expansion, width) for _ in range(blocks - 1))
    return nn.Sequential(first, *rest)


def initialize(model: nn.Module) -> None:
    """Change the convolutions of ``model`` in place: Kaiming normal, fan-out, for ReLU."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")


def _shortcut(in_channels: int, out_channels: int, stride: int) -> nn.Sequential | None:
    """Return a strided 1x1 convolution with batch norm, or None where the shape stays the same."""
    if stride == 1 and in_channels == out_channels:
        return None
    return nn.Sequential(
        nn.Conv2d(in_channels, out_channels, 1, stride=stride, bias=False),
        nn.BatchNorm2d(out_channels),
    )
