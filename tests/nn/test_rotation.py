"""Modules with a rotation beside them, and models that are given them again."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bitdial.errors import ConfigError
from bitdial.nn.rotation import (
    BlockHadamard,
    RotatedInput,
    RotatedOutput,
    Turn,
    is_rotated,
    online_rotations,
    rotate_again,
    rotation_entry,
    with_rotation,
)

ENTRY = {
    "seed": 4, "residual": "merged", "values": False, "untied": ["head"],
    "online": {"down": {"form": "hadamard", "size": 4}, "embed": {"form": "turn", "size": 6},
               "norm": {"form": "turn_back", "size": 6}},
}  # fmt: skip


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.up, self.down = nn.Embedding(10, 6), nn.Linear(6, 8), nn.Linear(8, 6)
        self.norm, self.head = nn.RMSNorm(6), nn.Linear(6, 10, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        return self.head(self.norm(x + self.down(self.up(x))))


def test_forms() -> None:
    x = torch.randn(5, 6, generator=torch.Generator().manual_seed(0))
    signs = torch.tensor([1.0, -1, 1, 1, -1, -1])
    after = with_rotation(nn.Linear(6, 6), "turn", 6, signs)
    before = with_rotation(nn.RMSNorm(6), "turn_back", 6, signs)
    assert isinstance(after, RotatedOutput)
    assert isinstance(before, RotatedInput)
    torch.testing.assert_close(before.rotation(after.rotation(x)), x)
    torch.testing.assert_close(after.rotation(x).norm(dim=1), x.norm(dim=1))
    assert torch.equal(after(x), after.rotation(after.layer(x)))
    assert torch.equal(before(x), before.layer(before.rotation(x)))
    down = with_rotation(nn.Linear(8, 2), "hadamard", 4)
    y = torch.randn(3, 8)
    assert torch.equal(down(y), down.layer(down.rotation(y)))
    torch.testing.assert_close(down.rotation(down.rotation(y)), y)
    assert not down.rotation.state_dict()
    assert set(after.rotation.state_dict()) == {"signs", "matrix"}


def test_16_bits_are_rotated_in_float32() -> None:
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    signs = torch.ones(64)
    for module in (BlockHadamard(64), Turn(signs, torch.ones(1, 1), back=False)):
        assert torch.equal(module(x), module(x.float()).bfloat16())
        assert module(x.double()).dtype == torch.float64


def test_a_model_is_given_its_rotations_again() -> None:
    model: Any = Net()
    rotate_again(model, ENTRY)
    assert is_rotated(model)
    assert online_rotations(model) == ENTRY["online"]
    assert model.head.weight is not model.embed.weight
    assert rotation_entry(model) == ENTRY == rotation_entry(copy.deepcopy(model))
    inside = rotation_entry(nn.ModuleDict({"part": model}))
    assert inside is not None
    assert inside["untied"] == ["part.head"]
    assert set(inside["online"]) == {"part.down", "part.embed", "part.norm"}
    weight = model.head.weight
    rotate_again(model, ENTRY)
    assert model.head.weight is weight, "what is there stays"
    plain = Net()
    rotate_again(plain, None)
    assert rotation_entry(plain) is None


def test_models_that_do_not_fit() -> None:
    def changed(name: str, **values: Any) -> dict[str, Any]:
        return {**ENTRY, "online": {name: {"form": "hadamard", "size": 4, **values}}}

    for entry, message in (
        (changed("down", size=16), "'down': a hadamard of size 16 in the file does not fit the Linear of width 8"),
        (changed("norm", form="turn", size=4), "'norm': a turn of size 4 .* RMSNorm of width 6"),
        (changed("norm", size=2), "'norm': a hadamard of size 2 .* RMSNorm"),
        (changed("embed", size=2), "'embed': a hadamard of size 2 .* Embedding"),
        (changed("embed", form="turn", size=8), "'embed': a turn of size 8"),
        (changed("up", form="turn", size=6), "'up': a turn of size 6 .* Linear"),
        (changed("down", form="turn_back", size=8), "'down': a turn_back"),
        (changed("", form="turn_back", size=8), "'': a turn_back"),
        (changed("elsewhere"), "'elsewhere' is rotated in the file, and the model does not have it"),
        ({**ENTRY, "untied": ["away"]}, "'away' is rotated in the file"),
        ({**ENTRY, "untied": [""]}, "'' has a weight in the file, and none in the model"),
    ):
        with pytest.raises(ConfigError, match=message):
            rotate_again(Net(), entry)
    rotated = Net()
    rotate_again(rotated, ENTRY)
    for other in (None, changed("down", size=8)):
        with pytest.raises(ConfigError, match="is rotated otherwise than in the file; pass the plain float model"):
            rotate_again(rotated, other)
    with pytest.raises(ConfigError, match="two rotated models in it, '0' and '1'"):
        rotation_entry(nn.Sequential(rotated, copy.deepcopy(rotated)))


@pytest.mark.usefixtures("fresh_compiler")
def test_rotations_compile_as_one_graph() -> None:
    x = torch.randn(3, 24, generator=torch.Generator().manual_seed(0))
    for module in (BlockHadamard(8), Turn(torch.ones(24), torch.eye(3), back=True)):
        compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(compiled(x), module(x), rtol=0, atol=0)
