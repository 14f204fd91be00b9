"""Outputs of layers in the place of a model's own."""

from typing import Any

import pytest
import torch
from torch import nn

from bitdial import LayerOutputs
from bitdial.errors import ConfigError
from bitdial.prepare.layer_outputs import compared


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shared, self.other = nn.Linear(2, 3), nn.Identity()

    def forward(self, images: list[torch.Tensor]) -> Any:
        return [{"boxes": self.shared(image)} for image in images]


def test_all_calls_in_order() -> None:
    model, images = Twice(), [torch.randn(1, 2), torch.randn(4, 2)]
    found = compared(model, images, LayerOutputs("shared"))
    assert [one.shape for one in found] == [(1, 3), (4, 3)]
    assert torch.equal(found[1], model.shared(images[1]))
    assert not model.shared._forward_hooks


def test_what_cannot_be_compared_is_refused() -> None:
    model, images = Twice(), [torch.randn(1, 2)]
    for output, problem in (
        (None, "output=LayerOutputs"),
        (LayerOutputs("nothing"), "no module 'nothing'"),
        (LayerOutputs("other"), "none of them was called"),
    ):
        with pytest.raises(ConfigError, match=problem):
            compared(model, images, output)
    for names in ((), ("",)):
        with pytest.raises(ConfigError, match="names of modules"):
            LayerOutputs(*names)
    with pytest.raises(ConfigError, match="runs the model itself"):
        LayerOutputs("shared")(None)
