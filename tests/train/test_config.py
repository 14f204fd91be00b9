"""Settings that decide something by themselves."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from bitdial.errors import ConfigError
from bitdial.train.config import TrainConfig, choose_autocast


def placed(device: str, *types: torch.dtype) -> Any:
    parameters = [SimpleNamespace(device=torch.device(device), dtype=kind) for kind in types]
    return SimpleNamespace(parameters=lambda: iter(parameters))


@pytest.mark.parametrize("supported", [True, False])
def test_autocast_is_chosen_by_model_and_device(supported: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: supported)
    found = "bfloat16" if supported else None
    assert TrainConfig().autocast == "auto"
    assert choose_autocast("auto", nn.Linear(1, 1)) is None
    assert choose_autocast("auto", placed("cuda", torch.float32)) == found
    assert choose_autocast("auto", placed("cuda", torch.float32, torch.float64)) is None
    for model in (nn.Linear(1, 1), placed("cuda", torch.float32)):
        assert choose_autocast(None, model) is None
        assert choose_autocast("bfloat16", model) == "bfloat16"
    with pytest.raises(ConfigError, match="autocast='float16'"):
        TrainConfig(autocast="float16")
