"""prepare works unchanged on torchvision's own models; see torchvision_ops.py for torchvision beside CPU torch."""

from typing import Any

import pytest
import torch

import bitdial
from bitdial.dial.dial import dialled_layers

from .torchvision_ops import torchvision_or_none

torchvision: Any = torchvision_or_none()
pytestmark = pytest.mark.skipif(torchvision is None, reason="needs torchvision; see torchvision_ops.py")


@pytest.mark.parametrize("name", ["resnet18", "resnet50", "mobilenet_v2"])
def test_torchvision_model_prepares_trains_ships_and_runs(name: str, tmp_path) -> None:
    torch.manual_seed(0)
    model = getattr(torchvision.models, name)(num_classes=10)
    x, y = torch.randn(4, 3, 64, 64), torch.randint(0, 10, (4,))
    prepared = bitdial.prepare(model, bitdial.QuantConfig(), x)
    ours = bitdial.prepare(bitdial.build_model(name, num_classes=10), bitdial.QuantConfig(), x)
    assert list(dialled_layers(prepared)) == list(dialled_layers(ours))
    bitdial.train(prepared, [(x, y)], bitdial.TrainConfig(epochs=1), progress=False)
    bitdial.save(prepared, tmp_path / "model.safetensors")
    live = bitdial.load(tmp_path / "model.safetensors", model)
    for bits in (8, 6, 4, 2):
        bitdial.set_bits(prepared, bits)
        bitdial.set_bits(live, bits)
        with torch.no_grad():
            assert torch.equal(prepared(x), live(x))
