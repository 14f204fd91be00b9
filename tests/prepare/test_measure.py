"""The contract of a measure: (model, batches) in, a number or a dict of numbers out."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from bitdial.errors import ConfigError
from bitdial.prepare.measure import take_measure


def test_numbers_of_any_kind_become_floats() -> None:
    model = nn.Linear(2, 2).train()
    seen: list[Any] = []

    def measure(model: nn.Module, batches: list[Any]) -> Any:
        seen.append((model.training, torch.is_grad_enabled(), batches))
        return {"a": torch.tensor([0.5]), "b": np.float32(0.25), 3: 1}

    assert take_measure(model, iter([1, 2]), measure) == {"a": 0.5, "b": 0.25, "3": 1.0}
    assert seen == [(False, False, [1, 2])]
    assert model.training
    assert take_measure(model, [], lambda *_: torch.tensor(2.0)) == 2.0


@pytest.mark.parametrize("returned", [None, "0.5", torch.zeros(2), {"a": None}, {"a": {"b": 1.0}}, [1.0]])
def test_what_is_no_number(returned: Any) -> None:
    with pytest.raises(ConfigError, match="the measure returned "):
        take_measure(nn.Linear(2, 2), [], lambda *_: returned)
    with pytest.raises(ConfigError, match=r"must be a function measure\(model, batches\)"):
        take_measure(nn.Linear(2, 2), [], "accuracy")  # type: ignore[arg-type]
