"""The tiny networks of the golden files. A file fits only the network that it was saved from: do not change them."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

EPS = 0.25  # variances of 0.75 and 3.75 have square roots without rounding


class Convs(nn.Module):
    """Strides, paddings, groups, dilation, a depthwise layer, reflected borders, an addition, pools of both kinds."""

    def __init__(self, *, norms: bool = True, eps: float = EPS):
        super().__init__()
        bias = not norms
        self.stem = nn.Conv2d(2, 4, 3, padding=1)
        self.strided = nn.Conv2d(4, 6, 3, stride=2, padding=1, bias=bias)
        self.depthwise = nn.Conv2d(6, 6, 3, padding=1, groups=6, bias=bias)
        self.reflected = nn.Conv2d(6, 6, (3, 1), padding=(2, 0), dilation=(2, 1), padding_mode="reflect", bias=bias)
        self.grouped = nn.Conv2d(6, 4, 1, groups=2)
        self.norms = nn.ModuleList(nn.BatchNorm2d(c, eps=eps) if norms else nn.Identity() for c in (4, 6, 6, 6))
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.most = nn.MaxPool2d(2)
        self.head = nn.Linear(4 + 16, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Images (N, 2, 8, 8) to logits (N, 4)."""
        x = F.relu(self.norms[0](self.stem(x)))
        x = F.relu(self.norms[1](self.strided(x)))
        y = F.relu6(self.norms[2](self.depthwise(x)))
        x = F.relu(self.norms[3](self.reflected(y)) + x)
        x = self.grouped(x)
        return self.head(torch.cat([self.pool(x).flatten(1), self.most(x).flatten(1)], dim=1))


class Dilated(nn.Module):
    """A dilated and a strided convolution without padding, a norm of vectors, two Linear layers."""

    def __init__(self, *, norms: bool = True, eps: float = EPS):
        super().__init__()
        self.wide = nn.Conv2d(2, 4, 3, dilation=2, padding="same", padding_mode="circular")
        self.short = nn.Conv2d(4, 4, 2, stride=(3, 2), bias=False)
        self.norm = nn.BatchNorm2d(4, eps=eps) if norms else nn.Identity()
        self.hidden = nn.Linear(48, 6, bias=False)
        self.vectors = nn.BatchNorm1d(6, eps=eps) if norms else nn.Identity()
        self.head = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Images (N, 2, 8, 8) to logits (N, 4)."""
        x = F.relu(self.norm(self.short(self.wide(x))))
        return self.head(self.vectors(self.hidden(x.flatten(1))))


class Tied(nn.Module):
    """Linear layers, two of which share their weight but not their bias; works on (N, 8) and on (N, L, 8)."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.one = nn.Linear(8, 8)
        self.two = nn.Linear(8, 8)
        self.two.weight = self.one.weight
        self.head = nn.Linear(8, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Vectors (..., 8) to logits (..., 4)."""
        x = F.relu(self.one(F.relu(self.first(x))))
        return self.head(self.two(x))


class Heads(nn.Module):
    """Layers side by side, two of them tied: a float input meets 8-bit weights once, so that sums stay exact."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(11, 5)
        self.two = nn.Linear(11, 5, bias=False)
        self.two.weight = self.one.weight
        self.wide = nn.Linear(11, 3)
        self.conv = nn.Conv1d(1, 2, 3)  # of a type that stays in float

    def forward(self, x: Tensor) -> Tensor:
        """Vectors (N, 11) to (N, 31)."""
        return torch.cat([self.one(x), self.two(x.flip(-1)), self.wide(x), self.conv(x[:, None]).flatten(1)], dim=1)


class Mixed(nn.Module):
    """A convolution and Linear layers for float activations: packed words serve the Linear ones only."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 3, 3, stride=2, padding=1, bias=False)  # in 16 bits, rounded once
        self.wide = nn.Linear(48, 5)
        self.head = nn.Linear(5, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Images (N, 2, 8, 8) to logits (N, 4)."""
        return self.head(F.relu(self.wide(self.conv(x).flatten(1))))


NETWORKS = {
    "convs": Convs,
    "convs_plain": lambda: Convs(norms=False),
    "convs_usual": lambda: Convs(eps=1e-5),
    "dilated": Dilated,
    "dilated_plain": lambda: Dilated(norms=False),
    "dilated_usual": lambda: Dilated(eps=1e-5),
    "tied": Tied,
    "heads": Heads,
    "mixed": Mixed,
}
