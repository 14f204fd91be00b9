"""Files of models that learned nothing: said once, and of no other."""

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

from bitdial import (
    ArrayData,
    CalibrateConfig,
    QuantConfig,
    TrainConfig,
    calibrate,
    load_trainable,
    prepare,
    save,
    train,
)

SAID = "weights and scales are as prepare() made them, neither trained nor calibrated"


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))


def prepared_model(model: nn.Module) -> nn.Module:
    config = QuantConfig(bit_choices=(8, 4), keep_first_last=False, start="balanced")
    return prepare(model, config, torch.randn(16, 8, generator=torch.Generator().manual_seed(1)))


def said(caplog: pytest.LogCaptureFixture) -> int:
    count = sum(SAID in message for message in caplog.messages)
    caplog.clear()
    return count


def test_it_is_said_once(model: nn.Module, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    prepared = prepared_model(model)
    save(copy.deepcopy(prepared), tmp_path / "copy.safetensors")
    assert said(caplog) == 1, "of a copy, too"
    save(prepared, tmp_path / "net.safetensors")
    assert said(caplog) == 1
    save(prepared, tmp_path / "net.safetensors")
    assert said(caplog) == 0
    save(load_trainable(tmp_path / "net.safetensors", model), tmp_path / "again.safetensors")
    assert said(caplog) == 0, "what a file was made of is not known"


def test_what_learned_is_silent(model: nn.Module, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    x, y = torch.randn(32, 8), torch.randint(0, 3, (32,))
    trained, calibrated, scaled, stepped = (prepared_model(model) for _ in range(4))
    train(trained, ArrayData(x, y, batch_size=16), TrainConfig(epochs=1), progress=False)
    save(copy.deepcopy(trained), tmp_path / "copy.safetensors")
    calibrate(calibrated, x, CalibrateConfig(), progress=False)
    scales = [parameter for name, parameter in scaled.named_parameters() if "scale" in name]
    for parameters, one in ((scales, scaled), (stepped.parameters(), stepped)):
        one(x).square().sum().backward()
        torch.optim.SGD(parameters, lr=1e-3).step()
    for number, one in enumerate((trained, calibrated, scaled, stepped)):
        save(one, tmp_path / f"{number}.safetensors")
        assert said(caplog) == 0, number
