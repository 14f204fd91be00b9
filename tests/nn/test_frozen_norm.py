"""Frozen norms as batch norms: the same numbers, nothing learned, in a file as any norm with sets."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from bitdial import QuantConfig, load, prepare, save, set_bits
from bitdial.models.detector import FrozenBatchNorm2d
from bitdial.nn.decompose import decompose, decomposed_modules, decomposition_of
from bitdial.nn.frozen_norm import FrozenNorm2d


def frozen() -> FrozenBatchNorm2d:
    generator = torch.Generator().manual_seed(0)
    norm = FrozenBatchNorm2d(4, eps=1e-3)
    for value in norm.buffers():
        value.copy_(torch.rand(4, generator=generator) + 0.5)
    return norm


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3), frozen()
        self.head = nn.Linear(4, 2)

    def forward(self, x: Any) -> Any:
        return self.head(torch.relu(self.norm(self.conv(torch.relu(self.stem(x))))).mean(dim=(2, 3)))


def test_it_computes_the_same_and_never_trains() -> None:
    norm, x = frozen(), torch.randn(2, 4, 5, 5)
    model = nn.ModuleDict({"norm": norm})
    assert decompose(model) == {"norm": "FrozenBatchNorm2d"}
    made: Any = model["norm"].train()
    assert type(made) is FrozenNorm2d
    torch.testing.assert_close(made(x), norm(x), rtol=1e-5, atol=1e-6)
    made.training = True
    torch.testing.assert_close(made(x), norm(x), rtol=1e-5, atol=1e-6)
    assert not made.training
    assert not any(parameter.requires_grad for parameter in made.parameters())
    assert all(torch.equal(getattr(made, key), value) for key, value in norm.state_dict().items())


def test_other_norms_with_buffers_are_left_alone() -> None:
    class Mine(nn.Module):
        pass

    assert decomposition_of(Mine()) is None
    other = type("FrozenBatchNorm2d", (nn.Module,), {"__module__": "torchvision.ops.misc"})
    assert decomposition_of(other()) is not None  # torchvision's, by its name


def test_a_file_has_its_sets(tmp_path: Path) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 3, 9, 9)
    model = prepare(Net(), QuantConfig(bit_choices=(8, 4)), x).eval()
    sets: Any = model.norm.sets  # type: ignore[union-attr]
    sets["4"].running_mean += 0.5
    assert decomposed_modules(model) == {"norm": "FrozenBatchNorm2d"}
    save(model, tmp_path / "m")
    live = load(tmp_path / "m", Net())
    outputs = []
    for bits in (8, 4):
        set_bits(model, bits)
        set_bits(live, bits)
        with torch.no_grad():
            outputs.append(model(x))
            assert torch.equal(live(x), outputs[-1])
    assert not torch.equal(*outputs)
