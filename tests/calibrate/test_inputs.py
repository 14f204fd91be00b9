import pytest
import torch

from bitdial.calibrate.inputs import checked
from bitdial.errors import ConfigError, QuantizationError


def test_batches_are_inputs_alone_and_finite() -> None:
    x = torch.randn(40, 3)
    assert checked(x) == ([x], [])
    assert len(checked(iter([x, x]))[0]) == 2
    assert checked([{"x": x}])[1] == []
    for batches, problem in (
        ([], "no batch"),
        ([x, torch.zeros(0, 3)], "batch 2 has no samples"),
        ([x, torch.zeros(40, dtype=torch.int64)], "batch 2 is torch.int64"),
        (["x"], "batch 1 is a str"),
        ([()], "no samples"),
    ):
        with pytest.raises(ConfigError, match=problem):
            checked(batches)
    with pytest.raises(QuantizationError, match="batch 2 holds NaN"):
        checked([x, torch.full((4, 3), float("nan"))])


def test_too_little_to_learn_from_is_said() -> None:
    assert "there are 1 samples" in checked(torch.randn(1, 3))[1][0]
    assert "all inputs have one value" in checked(torch.zeros(64, 3))[1][0]
