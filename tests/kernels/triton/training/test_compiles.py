"""Every kernel that a training step launches compiles for a GPU, seen on a machine without one."""

import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bitdial import QuantConfig, build_model, prepare
from bitdial.train import JointStep, TrainConfig
from bitdial.train.gpu.fuse import FastModel


class Net(nn.Module):
    """Convolutions with and without kernels of their own, norms with and without what can follow, a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.stem_norm = nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)
        self.block = build_model("cifar_resnet", blocks=1, width=16).layer1  # type: ignore[union-attr]
        self.depthwise, self.norm = nn.Conv2d(16, 16, 3, groups=16, bias=False), nn.BatchNorm2d(16)
        self.grouped, self.bare = nn.Conv2d(16, 16, 3, groups=2), nn.BatchNorm2d(16)
        self.hidden, self.head = nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.block(torch.relu(self.stem_norm(self.stem(x))))
        x = self.bare(self.grouped(torch.relu(self.norm(self.depthwise(x)))))
        return self.head(self.hidden(x.mean(dim=(2, 3))))


@pytest.mark.slow
@pytest.mark.parametrize("sampling", ["none", "random"])
@pytest.mark.parametrize("activations", ["auto", "asymmetric", "float"])
def test_a_step_compiles(compiled: Any, sampling: str, activations: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    model = prepare(Net(), QuantConfig(bit_choices=(4, 2), activations=activations), x)
    config = TrainConfig(epochs=1, sampling=sampling, autocast="bfloat16")
    step = JointStep(model, config, steps_per_epoch=1, loss=lambda output, _: output.sum() * 0.0)
    step.fast = FastModel(model, fused=True)
    step.slots = step._make_slots() if sampling == "random" else None
    assert (step.slots is not None) == (sampling == "random" and activations != "asymmetric")
    monkeypatch.setattr(
        sys.modules[JointStep.__module__], "check_loss", lambda *args, **settings: None
    )  # outputs hold anything
    monkeypatch.setattr(step.guard, "check", lambda **settings: None)
    step(x, torch.zeros(2, dtype=torch.long))
    names = {launch.name for launch in compiled}
    assert {"_apply", "_backward_sums", "_join_sums", "_backward_apply", "_weight_forward", "_weight_backward"} <= names
    assert activations == "float" or {"_act_forward", "_act_backward"} <= names
