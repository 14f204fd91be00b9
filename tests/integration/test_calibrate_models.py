"""Models of many forms through calibrate and the file: recurrent, attention, dict and tuple outputs, 1-D."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from bitdial import CalibrateConfig, QuantConfig, calibrate, load, prepare, save, set_bits

BITS = (8, 4, 2)


class Lstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.lstm, self.head = nn.Linear(5, 8), nn.LSTM(8, 8, batch_first=True), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(self.embed(x))[0][:, -1])


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.embed, self.encoder, self.head = nn.Linear(5, 8), nn.TransformerEncoder(layer, 2), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> dict[str, Tensor | None]:
        return {"logits": self.head(self.encoder(self.embed(x)).mean(1)), "loss": None}


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(5, 8), nn.Linear(8, 3)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.embed(x)
        mixed, weights = self.attention(x, x, x)
        return self.head(x + mixed), weights


class Joined(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.norm = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.middle, self.join = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(8, 4, 1)
        self.up = nn.ConvTranspose2d(4, 2, 2, stride=2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = torch.relu(self.norm(self.down(x)))
        z = self.middle(y)
        return self.up(self.join(torch.cat([y, z], 1))), z


def signal() -> nn.Module:
    first = (nn.Conv1d(3, 8, 3), nn.BatchNorm1d(8), nn.ReLU(), nn.Conv1d(8, 8, 3, groups=2), nn.BatchNorm1d(8))
    return nn.Sequential(*first, nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(48, 4), nn.ReLU(), nn.Linear(4, 2))


def outputs(model: nn.Module, x: Tensor) -> list[Any]:
    with torch.no_grad():
        return [leaf for leaf in tree_leaves(model(x)) if isinstance(leaf, Tensor)]


@pytest.mark.parametrize("effort", ["quick", "full"])
def test_calibrated_equals_loaded_and_is_near_float(effort: str, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    for make, shape in (
        (Lstm, (6, 5)),
        (Encoder, (6, 5)),
        (Attention, (6, 5)),
        (Joined, (3, 8, 8)),
        (signal, (3, 10)),
    ):
        torch.manual_seed(0)
        net, x = make().eval(), torch.randn(40, *shape, generator=generator)
        model = prepare(net, QuantConfig(bit_choices=BITS, keep_first_last=False), x).eval()
        config = CalibrateConfig(effort=effort, iterations=3)
        report = calibrate(model, list(x.split(20)), config, progress=False)
        assert report.warnings == (), make
        assert report.error[8] < 2e-3 < report.error[2], make
        covered = {name for block in report.blocks for name in block.layers}
        assert covered == {name for name, module in model.named_modules() if hasattr(module, "weight_quantizer")}
        save(model, tmp_path / "m.safetensors")
        live = load(tmp_path / "m.safetensors", net)
        for bits in BITS:
            set_bits(model, bits)
            set_bits(live, bits)
            pairs = zip(outputs(model, x), outputs(live, x), strict=True)
            assert all(torch.equal(one, other) for one, other in pairs), (make, bits)
