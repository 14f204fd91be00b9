"""Losses that the model returns itself."""

from typing import Any

import pytest
import torch

from bitdial import OwnLosses
from bitdial.errors import ConfigError, TrainingError
from bitdial.prepare.own_losses import with_targets


def test_the_loss_is_the_weighted_sum() -> None:
    given = {"a": torch.tensor([2.0]), "b": torch.tensor(3.0, requires_grad=True), "c": torch.tensor(5.0)}
    assert float(OwnLosses()(given, None).detach()) == 10.0
    weighted = OwnLosses(weights={"a": 0.5, "c": 0})
    assert {name: float(value) for name, value in weighted.parts(given).items()} == {"a": 1.0, "b": 3.0}
    loss = weighted(given, None)
    loss.backward()
    assert loss.shape == ()
    assert float(given["b"].grad) == 1.0  # type: ignore[arg-type]


def test_what_is_no_dict_of_numbers_is_refused() -> None:
    one = torch.ones(())
    for weights, returned, problem in (
        ({}, [one], "returns a list"),
        ({}, {}, "returns a dict instead"),
        ({}, {"a": torch.ones(2)}, r"'a' is of shape \(2,\)"),
        ({}, {"a": 1.0}, "'a' is a float"),
        ({"b": 1.0}, {"a": one}, "there is no loss 'b'"),
        ({"a": 0}, {"a": one}, "leave out every loss"),
    ):
        with pytest.raises(TrainingError, match=problem):
            OwnLosses(weights=weights)(returned, None)
    with pytest.raises(ConfigError, match="at least 0"):
        OwnLosses(weights={"a": -1.0})


def test_targets_go_behind_the_inputs() -> None:
    images: list[Any] = [1, 2]
    assert with_targets(images, "t", None) is images
    for inputs, expected in (
        (images, (images, "t")),
        ((images, 3), (images, 3, "t")),
        ({"images": images}, {"images": images, "targets": "t"}),
    ):
        assert with_targets(inputs, "t", OwnLosses()) == expected
