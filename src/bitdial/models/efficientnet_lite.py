"""EfficientNet-Lite0: inverted residuals with ReLU6, without squeeze-and-excitation.

Made for integer hardware, and hard for calibration: its depthwise layers have channels of very different ranges. A
convolution with stride 2 pads one more on the right and below than on the left and above, as TensorFlow does for images
of even size; the published weights want that.
"""

from __future__ import annotations

from torch import Tensor, nn

from bitdial.models.resnet import initialize

# expansion, output channels, number of blocks, stride of the first block, kernel
_STAGES = (
    (1, 16, 1, 1, 3),
    (6, 24, 2, 2, 3),
    (6, 40, 2, 2, 5),
    (6, 80, 3, 2, 3),
    (6, 112, 3, 1, 5),
    (6, 192, 4, 2, 5),
    (6, 320, 1, 1, 3),
)
_EPS = 1e-3


class InvertedResidual(nn.Module):
    """Expand by a 1x1, filter by a depthwise convolution, project by a linear 1x1; add where it fits."""

    def __init__(self, in_channels: int, out_channels: int, stride: int, expansion: int, kernel: int) -> None:
        super().__init__()
        hidden = in_channels * expansion
        layers: list[nn.Module] = []
        if expansion != 1:
            layers.append(_conv_bn_relu6(in_channels, hidden, kernel=1))
        layers.append(_conv_bn_relu6(hidden, hidden, kernel=kernel, stride=stride, groups=hidden))
        layers.append(nn.Conv2d(hidden, out_channels, 1, bias=False))
        layers.append(nn.BatchNorm2d(out_channels, eps=_EPS))
        self.conv = nn.Sequential(*layers)
        self.has_shortcut = stride == 1 and in_channels == out_channels

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, in_channels, H, W) to (N, out_channels, H / stride, W / stride)."""
        return x + self.conv(x) if self.has_shortcut else self.conv(x)


class EfficientNetLite(nn.Module):
    """A stem, 16 inverted residuals, a 1x1 head, average pooling, dropout, one linear layer."""

    def __init__(self, *, num_classes: int, in_channels: int, dropout: float) -> None:
        super().__init__()
        channels = 32
        features: list[nn.Module] = [_conv_bn_relu6(in_channels, channels, kernel=3, stride=2)]
        for expansion, width, blocks, stage_stride, kernel in _STAGES:
            for block in range(blocks):
                stride = stage_stride if block == 0 else 1
                features.append(InvertedResidual(channels, width, stride, expansion, kernel))
                channels = width
        features.append(_conv_bn_relu6(channels, 1280, kernel=1))
        self.features = nn.Sequential(*features)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Sequential(nn.Dropout(dropout), nn.Linear(1280, num_classes))
        initialize(self)

    def forward(self, x: Tensor) -> Tensor:
        """Map images (N, in_channels, H, W) to logits (N, num_classes)."""
        return self.classifier(self.avgpool(self.features(x)).flatten(1))


def efficientnet_lite0(*, num_classes: int = 1000, in_channels: int = 3, dropout: float = 0.2) -> nn.Module:
    """Return EfficientNet-Lite0: 4,652,008 parameters at the default arguments."""
    return EfficientNetLite(num_classes=num_classes, in_channels=in_channels, dropout=dropout)


def _conv_bn_relu6(
    in_channels: int, out_channels: int, *, kernel: int, stride: int = 1, groups: int = 1
) -> nn.Sequential:
    """Return convolution (0), batch norm (1) and ReLU6 (2), behind padding of its own where the stride is 2."""
    padding: int = kernel // 2 if stride == 1 else 0
    conv = nn.Conv2d(in_channels, out_channels, kernel, stride, padding, groups=groups, bias=False)
    before, after = (kernel - 2) // 2, (kernel - 1) // 2
    first = conv if stride == 1 else nn.Sequential(nn.ZeroPad2d((before, after, before, after)), conv)
    return nn.Sequential(first, nn.BatchNorm2d(out_channels, eps=_EPS), nn.ReLU6())
