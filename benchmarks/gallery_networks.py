"""Small networks as people write them, for benchmarks/gallery.py: one class each, none of them made for bitdial."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

CLASSES = 10


def conv_block(inputs: int, outputs: int) -> nn.Sequential:
    """Two convolutions, each with norm and ReLU."""
    layers: list[nn.Module] = []
    for channels in (inputs, outputs):
        layers += [nn.Conv2d(channels, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU()]
    return nn.Sequential(*layers)


class UNet(nn.Module):
    """Segmentation: down by pools, up by transposed convolutions, skips between; logits (B, C, H, W)."""

    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2, self.middle = conv_block(3, 8), conv_block(8, 16), conv_block(16, 32)
        self.up2, self.merge2 = nn.ConvTranspose2d(32, 16, 2, stride=2), conv_block(32, 16)
        self.up1, self.merge1 = nn.ConvTranspose2d(16, 8, 2, stride=2), conv_block(16, 8)
        self.head = nn.Conv2d(8, CLASSES, 1)

    def forward(self, x: Tensor) -> Tensor:
        first = self.down1(x)
        second = self.down2(F.max_pool2d(first, 2))
        up = self.up2(self.middle(F.max_pool2d(second, 2)))
        up = self.up1(self.merge2(torch.cat([up, second], dim=1)))
        return self.head(self.merge1(torch.cat([up, first], dim=1)))


class RecurrentClassifier(nn.Module):
    """Tokens, an LSTM or GRU, the last state, a label."""

    def __init__(self, recurrent: type[nn.RNNBase]) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 16)
        self.rnn = recurrent(16, 24, num_layers=2, batch_first=True, bidirectional=True)
        self.hidden, self.head = nn.Linear(48, 32), nn.Linear(32, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        out, _ = self.rnn(self.embed(tokens))
        return self.head(F.relu(self.hidden(out[:, -1])))


class MixerBlock(nn.Module):
    """Mixes patches, then channels."""

    def __init__(self, patches: int, channels: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(channels), nn.LayerNorm(channels)
        self.tokens = nn.Sequential(nn.Linear(patches, 32), nn.GELU(), nn.Linear(32, patches))
        self.channels = nn.Sequential(nn.Linear(channels, 64), nn.GELU(), nn.Linear(64, channels))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channels(self.norm2(x))


class MLPMixer(nn.Module):
    """Patches by a convolution, then mixer blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 32, 4, stride=4)
        self.blocks = nn.Sequential(*(MixerBlock(16, 32) for _ in range(2)))
        self.norm, self.head = nn.LayerNorm(32), nn.Linear(32, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(self.stem(x).flatten(2).transpose(1, 2))
        return self.head(self.norm(x).mean(dim=1))


class ConvNeXtBlock(nn.Module):
    """Depthwise 7x7, LayerNorm over channels, two Linear layers, a scale per channel, a residual."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(channels, channels, 7, padding=3, groups=channels)
        self.norm = nn.LayerNorm(channels)
        self.expand, self.shrink = nn.Linear(channels, 4 * channels), nn.Linear(4 * channels, channels)
        self.gamma = nn.Parameter(0.1 * torch.ones(channels))

    def forward(self, x: Tensor) -> Tensor:
        out = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        out = self.gamma * self.shrink(F.gelu(self.expand(out)))
        return x + out.permute(0, 3, 1, 2)


class ConvNeXt(nn.Module):
    """A stem and two stages of ConvNeXt blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 4, stride=4)
        self.stage1, self.down = ConvNeXtBlock(16), nn.Conv2d(16, 32, 2, stride=2)
        self.stage2, self.head = ConvNeXtBlock(32), nn.Linear(32, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.stage2(self.down(self.stage1(self.stem(x)))).mean(dim=(2, 3)))


class Audio(nn.Module):
    """1-D: strided and dilated convolutions over a waveform."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv1d(1, 16, 9, stride=4), nn.BatchNorm1d(16), nn.ReLU(),
            nn.Conv1d(16, 32, 5, dilation=2, padding=4), nn.BatchNorm1d(32), nn.ReLU(), nn.MaxPool1d(4),
            nn.Conv1d(32, 32, 3, padding="same"), nn.BatchNorm1d(32), nn.ReLU(), nn.AdaptiveAvgPool1d(1),
        )  # fmt: skip
        self.head = nn.Linear(32, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x).flatten(1))


class Video(nn.Module):
    """3-D: convolutions over time, height and width."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv3d(3, 8, 3, padding=1), nn.BatchNorm3d(8), nn.ReLU(), nn.MaxPool3d(2),
            nn.Conv3d(8, 16, 3, padding=1), nn.BatchNorm3d(16), nn.ReLU(),
            nn.Conv3d(16, 16, (3, 1, 1), padding=(1, 0, 0)), nn.BatchNorm3d(16), nn.ReLU(), nn.AdaptiveAvgPool3d(1),
        )  # fmt: skip
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x).flatten(1))


class Tabular(nn.Module):
    """Embeddings of categories beside numbers, then an MLP; takes two inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.embeddings = nn.ModuleList(nn.Embedding(size, 8) for size in (5, 12, 30))
        self.mlp = nn.Sequential(
            nn.Linear(24 + 6, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.1),
            nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 2),
        )  # fmt: skip

    def forward(self, categories: Tensor, numbers: Tensor) -> Tensor:
        embedded = [table(categories[:, i]) for i, table in enumerate(self.embeddings)]
        return self.mlp(torch.cat([*embedded, numbers], dim=1))


class Siamese(nn.Module):
    """One encoder on both inputs; their distance."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(conv_block(1, 8), nn.MaxPool2d(2), conv_block(8, 16), nn.AdaptiveAvgPool2d(1))
        self.project = nn.Linear(16, 12)

    def embed(self, x: Tensor) -> Tensor:
        return F.normalize(self.project(self.encoder(x).flatten(1)), dim=1)

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        return (self.embed(left) - self.embed(right)).square().sum(dim=1)


class ControlFlow(nn.Module):
    """Python decides, by what the tensors hold, which layer runs and how often."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.wide, self.narrow = nn.Linear(16, 32), nn.Linear(32, 32), nn.Linear(32, 32)
        self.head = nn.Linear(32, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.first(x))
        for _ in range(2 if bool(x.mean() > 0.2) else 3):
            x = F.relu(self.wide(x))
        if x.shape[0] > 1:
            x = self.narrow(x)
        return self.head(x)


class Encoder(nn.Module):
    """nn.TransformerEncoder on tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.positions = nn.Embedding(50, 32), nn.Parameter(0.1 * torch.randn(1, 12, 32))
        layer = nn.TransformerEncoderLayer(32, 4, dim_feedforward=64, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(32, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.encoder(self.embed(tokens) + self.positions).mean(dim=1))


class Translator(nn.Module):
    """nn.Transformer: encoder and decoder with a causal mask."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 32)
        self.transformer = nn.Transformer(32, 4, 1, 1, 64, dropout=0.0, batch_first=True)
        self.head = nn.Linear(32, 50)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        out = self.transformer(self.embed(source), self.embed(target), tgt_mask=mask)
        return self.head(out)


class Autoencoder(nn.Module):
    """Strided convolutions down, transposed ones up; the loss is on the image."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(1, 8, 3, 2, 1), nn.ReLU(), nn.Conv2d(8, 16, 3, 2, 1), nn.ReLU(), nn.Flatten(), nn.Linear(256, 12)
        )
        self.decoder = nn.Sequential(
            nn.Linear(12, 256), nn.ReLU(), nn.Unflatten(1, (16, 4, 4)),
            nn.ConvTranspose2d(16, 8, 4, 2, 1), nn.ReLU(), nn.ConvTranspose2d(8, 1, 4, 2, 1), nn.Sigmoid(),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(self.encoder(x))


class WeightNorm(nn.Module):
    """Weights that are computed from others at every call."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv1d(1, 8, 5, padding=2), nn.ReLU(), weight_norm(nn.Conv1d(8, 16, 5, padding=2)), nn.ReLU(),
            nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(16, CLASSES),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class Separable(nn.Module):
    """Depthwise and pointwise convolutions with ReLU6."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Conv2d(3, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU6(inplace=True)]
        for inputs, outputs, stride in ((16, 24, 1), (24, 32, 2)):
            layers += [nn.Conv2d(inputs, inputs, 3, stride, 1, groups=inputs, bias=False), nn.BatchNorm2d(inputs)]
            layers += [nn.ReLU6(inplace=True), nn.Conv2d(inputs, outputs, 1, bias=False), nn.BatchNorm2d(outputs)]
            layers += [nn.ReLU6(inplace=True)]
        self.features, self.head = nn.Sequential(*layers), nn.Linear(32, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.adaptive_avg_pool2d(self.features(x), 1).flatten(1))


class Generator(nn.Module):
    """DCGAN's generator: noise to an image."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.ConvTranspose2d(16, 32, 4, bias=False), nn.BatchNorm2d(32), nn.ReLU(True),
            nn.ConvTranspose2d(32, 16, 4, 2, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU(True),
            nn.ConvTranspose2d(16, 3, 4, 2, 1, bias=False), nn.Tanh(),
        )  # fmt: skip

    def forward(self, noise: Tensor) -> Tensor:
        return self.layers(noise[:, :, None, None])


class SqueezeExcite(nn.Module):
    """A convolution network whose channels are weighed by a small MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.body = conv_block(3, 16), conv_block(16, 16)
        self.squeeze, self.excite = nn.Conv2d(16, 4, 1), nn.Conv2d(4, 16, 1)
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        out = self.body(x)
        weights = torch.sigmoid(self.excite(F.silu(self.squeeze(out.mean((2, 3), keepdim=True)))))
        return self.head((x + out * weights).mean((2, 3)))


class PointNet(nn.Module):
    """The same layers on every point, then the largest over points."""

    def __init__(self) -> None:
        super().__init__()
        self.points = nn.Sequential(
            nn.Conv1d(3, 16, 1), nn.BatchNorm1d(16), nn.ReLU(), nn.Conv1d(16, 32, 1), nn.BatchNorm1d(32), nn.ReLU()
        )
        self.head = nn.Sequential(nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.points(x).amax(dim=2))


class TwoHeads(nn.Module):
    """A policy and a value, as a dict; GroupNorm instead of batch norms."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(4, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.ELU(), nn.Conv2d(16, 16, 3, 2, 1), nn.ELU()
        )
        self.policy, self.value = nn.Linear(16, 6), nn.Linear(16, 1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = self.body(x).mean((2, 3))
        return {"policy": self.policy(x), "value": self.value(x)[:, 0]}


class Experts(nn.Module):
    """A mixture of experts: each row goes to the one that a gate chooses."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.gate = nn.Linear(16, 32), nn.Linear(32, 3)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(3))
        self.head = nn.Linear(32, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(self.stem(x))
        chances = self.gate(x).softmax(dim=1)
        best = chances.argmax(dim=1)
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            rows = best == i
            if bool(rows.any()):
                out[rows] = expert(x[rows]) * chances[rows, i : i + 1]
        return self.head(out)


class GraphNet(nn.Module):
    """Two graph convolutions: a dense adjacency matrix times features."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(8, 24), nn.Linear(24, 24), nn.Linear(24, CLASSES)

    def forward(self, features: Tensor, adjacency: Tensor) -> Tensor:
        x = F.relu(adjacency @ self.first(features))
        return self.head(F.relu(adjacency @ self.second(x)).mean(dim=1))
