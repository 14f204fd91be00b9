import itertools

import pytest
import torch
from torch import Tensor, nn

from bitdial import QuantConfig, build_model, prepare
from bitdial.calibrate.blocks import find_blocks
from bitdial.errors import ConfigError

from .conftest import mobile, prepared, resnet


def names(model: nn.Module) -> list[tuple[str, int, int]]:
    return [(block.name, len(block.layers), len(block.norms)) for block in find_blocks(model)]


def test_residual_blocks_are_blocks_and_ends_stand_alone() -> None:
    assert names(prepared(resnet())) == [
        ("conv1", 1, 1), ("layer1.0", 2, 2), ("layer2.0", 3, 3), ("layer3.0", 3, 3), ("fc", 1, 0),
    ]  # fmt: skip
    assert names(prepared(mobile())) == [("stem.0", 1, 1), ("first", 3, 3), ("second", 3, 3), ("head", 1, 0)]


def test_rows_of_layers_belong_together_where_a_module_holds_them() -> None:
    model = prepare(build_model("mobilenet_v2"), QuantConfig(), torch.randn(2, 3, 32, 32))
    found = names(model)
    assert ("features.2.conv", 3, 3) in found  # a stride, so no addition: three layers in a row
    assert ("features.3.conv", 3, 3) in found
    assert found[-1][1:] == (0, 0)  # what comes behind the last quantised layer


class UNet(nn.Module):
    """Two values are read again, the first after nine layers and the second after one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(4, 4, 3, padding=1) for _ in range(12))

    def forward(self, x: Tensor) -> Tensor:
        x = kept = torch.relu(self.layers[0](x))
        for layer in self.layers[1:10]:
            x = torch.relu(layer(x))
        x = torch.relu(self.layers[10](x)) + x
        return self.layers[11](x + kept)


def test_values_that_are_read_much_later_are_handed_on() -> None:
    model = prepare(UNet(), QuantConfig(keep_first_last=False), torch.randn(2, 4, 8, 8))
    blocks = find_blocks(model)
    assert [block.name for block in blocks] == [f"layers.{i}" for i in range(12)]
    kept = blocks[0].made[0]
    assert all(kept in block.gives for block in blocks[:-2])
    assert kept in blocks[-2].reads  # which ends with the additions
    # All nodes are in one block each, in order; nothing is read that was not given.
    for before, block in itertools.pairwise(blocks):
        assert set(block.reads) <= set(before.gives)


class Tower(nn.Module):
    """A row of layers on several inputs; or the row twice, the second time on what it gave."""

    def __init__(self, *, again: bool = False) -> None:
        super().__init__()
        self.rows = nn.ModuleList(nn.ModuleList(nn.Linear(4, 4) for _ in range(3)) for _ in range(2))
        self.again = again

    def row(self, x: Tensor) -> Tensor:
        for row in self.rows:
            for layer in row:
                x = torch.relu(layer(x))
        return x

    def forward(self, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        if self.again:
            return self.row(self.row(a)) + b + c
        return torch.cat([self.row(x) for x in (a, b, c)])


def test_a_layer_is_in_one_block_with_all_of_its_calls() -> None:
    inputs = tuple(torch.randn(2, 4) for _ in range(3))
    model = prepare(Tower(), QuantConfig(keep_first_last=False), inputs)
    blocks = find_blocks(model)
    assert [(block.name, len(block.layers)) for block in blocks] == [("rows.0", 3), ("rows.1", 3)]
    places = [node.target for block in blocks for node in block.nodes if node.op == "call_module"]
    assert places == [f"rows.{row}.{layer}" for row in range(2) for layer in range(3) for _ in range(3)]
    assert len(blocks[0].made) == 3  # a value for each of the three inputs goes on

    model = prepare(Tower(again=True), QuantConfig(keep_first_last=False), inputs)
    found = [set(block.layers) for block in find_blocks(model)]
    assert set.union(*found) == {f"rows.{row}.{layer}" for row in range(2) for layer in range(3)}
    assert sum(map(len, found)) == 6


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) if x.sum() > 0 else self.layer(-x)


def test_what_cannot_be_traced_is_said() -> None:
    model = prepare(Branching(), QuantConfig(keep_first_last=False), torch.ones(2, 4))
    with pytest.raises(ConfigError, match="cannot be traced: symbolically traced variables"):
        find_blocks(model)
