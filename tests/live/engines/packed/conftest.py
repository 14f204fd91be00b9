"""A small decoder of Linear layers, saved with weights only quantised."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bitdial import QuantConfig, prepare, save

WIDTHS = (8, 6, 4, 3, 2)


class Decoder(nn.Module):
    """Embedding, two gated blocks with norms and biases, a head; `late` uses the weight of `early`."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 48)
        self.norm = nn.LayerNorm(48)
        self.first = nn.Linear(48, 40, bias=False)
        self.gate = nn.Linear(48, 40)
        self.down = nn.Linear(40, 48)
        self.early = nn.Linear(48, 48)
        self.late = nn.Linear(48, 48)
        self.late.weight = self.early.weight
        self.head = nn.Linear(48, 50, bias=False)
        self.register_buffer("table", torch.rand(16), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        y = self.norm(x)
        x = x + self.down(self.first(y) * self.gate(y).sigmoid())
        x = x + self.late(self.early(x).relu())
        return self.head(x)


@pytest.fixture(scope="session")
def decoder() -> nn.Module:
    """The float model."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Decoder().eval()


@pytest.fixture(scope="session")
def tokens() -> Tensor:
    """A batch for it."""
    return torch.randint(0, 50, (3, 7), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="session")
def saved(decoder: nn.Module, tokens: Tensor, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Saves the model with weights only quantised; keywords go to QuantConfig."""
    made: dict[str, Path] = {}

    def make(scheme: str, **config: Any) -> Path:
        settings = {"activations": "float", "bit_choices": WIDTHS, "keep_first_last": False, "start": "3std", **config}
        key = f"{scheme} {settings}"
        if key not in made:
            made[key] = tmp_path_factory.mktemp("weight-only") / "model.safetensors"
            save(prepare(decoder, QuantConfig(scheme=scheme, **settings), tokens), made[key])
        return made[key]

    return make
