"""MobileNetV2, key for key the layout of torchvision's weights; optionally for 32x32 images.

Parameter names, shapes and order follow torchvision, so its published weights load with
``strict=True``. ``small_input`` changes strides only, never a parameter.
"""

from __future__ import annotations

from torch import Tensor, nn

from bitdial.models.resnet import initialize

# expansion, output channels, number of blocks, stride of the first block
_STAGES = (
    (1, 16, 1, 1),
    (6, 24, 2, 2),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)
_FIRST_DOWN_STAGE = 1


class InvertedResidual(nn.Module):
    """Expand by a 1x1, filter by a depthwise 3x3, project by a linear 1x1; add where it fits."""

    def __init__(self, in_channels: int, out_channels: int, stride: int, expansion: int) -> None:
        super().__init__()
        hidden = in_channels * expansion
        layers: list[nn.Module] = []
        if expansion != 1:
            layers.append(_conv_bn_relu6(in_channels, hidden, kernel=1))
        layers.append(_conv_bn_relu6(hidden, hidden, kernel=3, stride=stride, groups=hidden))
        layers.append(nn.Conv2d(hidden, out_channels, 1, bias=False))
        layers.append(nn.BatchNorm2d(out_channels))
        self.conv = nn.Sequential(*layers)
        self.has_shortcut = stride == 1 and in_channels == out_channels

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, in_channels, H, W) to (N, out_channels, H / stride, W / stride)."""
        return x + self.conv(x) if self.has_shortcut else self.conv(x)


class MobileNetV2(nn.Module):
    """A stem, 17 inverted residuals, a 1x1 head, average pooling, dropout, one linear layer."""

    def __init__(
        self,
        *,
        num_classes: int,
        in_channels: int,
        width_mult: float,
        dropout: float,
        small_input: bool,
    ) -> None:
        super().__init__()
        channels = _round_to_8(32 * width_mult)
        features: list[nn.Module] = [_conv_bn_relu6(in_channels, channels, kernel=3, stride=1 if small_input else 2)]
        for stage, (expansion, width, blocks, stage_stride) in enumerate(_STAGES):
            out_channels = _round_to_8(width * width_mult)
            keeps_size = small_input and stage == _FIRST_DOWN_STAGE
            for block in range(blocks):
                stride = stage_stride if block == 0 and not keeps_size else 1
                features.append(InvertedResidual(channels, out_channels, stride, expansion))
                channels = out_channels
        last_channels = _round_to_8(1280 * max(1.0, width_mult))
        features.append(_conv_bn_relu6(channels, last_channels, kernel=1))
        self.features = nn.Sequential(*features)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        head = nn.Linear(last_channels, num_classes)
        self.classifier = nn.Sequential(nn.Dropout(dropout), head)
        initialize(self)
        nn.init.normal_(head.weight, std=0.01)
        nn.init.zeros_(head.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Map images (N, in_channels, H, W) to logits (N, num_classes)."""
        return self.classifier(self.avgpool(self.features(x)).flatten(1))


def mobilenet_v2(
    *,
    num_classes: int = 1000,
    in_channels: int = 3,
    width_mult: float = 1.0,
    dropout: float = 0.2,
    small_input: bool = False,
) -> nn.Module:
    """Return MobileNetV2: 3,504,872 parameters at the default arguments.

    ``small_input`` is for 32x32 images: stride 1 in the stem and in the first stage that would
    down-sample, so that 4x4 positions remain at the end.
    """
    return MobileNetV2(
        num_classes=num_classes,
        in_channels=in_channels,
        width_mult=width_mult,
        dropout=dropout,
        small_input=small_input,
    )


def _conv_bn_relu6(
    in_channels: int, out_channels: int, *, kernel: int, stride: int = 1, groups: int = 1
) -> nn.Sequential:
    """Return convolution (0), batch norm (1) and ReLU6 (2); the padding keeps the size."""
    padding = kernel // 2
    return nn.Sequential(
        nn.Conv2d(in_channels, out_channels, kernel, stride, padding, groups=groups, bias=False),
        nn.BatchNorm2d(out_channels),
        nn.ReLU6(),
    )


def _round_to_8(channels: float) -> int:
    """Round to the nearest multiple of 8, at least 8, and up where that would lose over 10 %."""
    rounded = max(8, int(channels + 4) // 8 * 8)
    return rounded if rounded >= 0.9 * channels else rounded + 8
