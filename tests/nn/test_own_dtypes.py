"""What modules remember of the types that their tensors had."""

import copy

import torch
from torch import nn

from bitdial.nn.own_dtypes import remembered, shortest, shortest_of, widen


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.short, self.brief, self.wide = nn.Linear(3, 2).bfloat16(), nn.LayerNorm(3).half(), nn.Linear(3, 3)
        self.register_buffer("table", torch.ones(2, dtype=torch.bfloat16))
        self.register_buffer("long", torch.ones(2, dtype=torch.float64))
        self.register_buffer("none", None)


def test_widening_remembers() -> None:
    model = Net()
    values = model.short.weight.detach().clone()
    widen(model)
    assert {t.dtype for t in (*model.parameters(), *model.buffers())} == {torch.float32}
    for net in (model, copy.deepcopy(model)):
        assert remembered(net.short) == {"weight": torch.bfloat16, "bias": torch.bfloat16}
        assert remembered(net.brief) == {"weight": torch.float16, "bias": torch.float16}
        assert remembered(net) == {"table": torch.bfloat16}
        assert remembered(net.wide) == {}
    widen(model)
    assert remembered(model.short)["weight"] == torch.bfloat16, "still"
    found = shortest_of(model, "short.weight", model.short.weight)
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, values)
    assert shortest_of(model, "table", model.table).dtype == torch.bfloat16


def test_only_what_loses_nothing_becomes_shorter() -> None:
    model = Net()
    widen(model)
    layer = model.short
    for value in (1.0 + 2**-9, 3e38, 1e-45, torch.pi):
        changed = layer.weight.detach().clone()
        changed[1, 2] = value
        assert shortest(layer, "weight", changed) is changed, value
    for value in (0.0, -0.0, 2.0**-130, 1.0 + 2**-7, float("inf")):
        changed = layer.weight.detach().clone()
        changed[1, 2] = value
        short = shortest(layer, "weight", changed)
        assert short.dtype == torch.bfloat16
        assert torch.equal(short.float().view(torch.int32), changed.view(torch.int32)), "bit for bit"
    for tensor in (layer.weight.double(), layer.weight.to("meta")):
        assert shortest(layer, "weight", tensor) is tensor
    assert shortest(model.wide, "weight", model.wide.weight) is model.wide.weight
    assert shortest_of(model, "elsewhere.weight", layer.weight) is layer.weight
    layer.own_dtypes = "a user's own"
    assert shortest(layer, "weight", layer.weight) is layer.weight
