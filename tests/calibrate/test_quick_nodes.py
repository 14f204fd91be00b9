from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bitdial import QuantConfig, prepare, set_bits
from bitdial.calibrate.blocks import find_blocks
from bitdial.calibrate.quick_nodes import quick_nodes
from bitdial.calibrate.values import run

from .conftest import images, mobile, prepared, settled

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def results(model: nn.Module, quick: bool) -> list[Tensor]:
    """The value of a block and the gradients of its parameters."""
    block = find_blocks(model)[1]
    x = torch.randn(4, 4, 8, 8, generator=torch.Generator().manual_seed(3)).to(DEVICE)
    found = run(model, block.nodes, {block.reads[0]: x}, quick_nodes(model, block) if quick else {})
    found[block.made[0]].square().mean().backward()
    kept = [parameter for parameter in model.parameters() if parameter.grad is not None]
    grads = [parameter.grad for parameter in kept]
    for parameter in kept:
        parameter.grad = None
    return [found[block.made[0]].detach(), *(grad for grad in grads if grad is not None)]


@pytest.mark.parametrize("bits", [8, 3])
def test_they_compute_what_the_nodes_do(bits: int) -> None:
    model = prepared(mobile()).to(DEVICE)
    set_bits(model, bits)
    plain, quick = results(model, quick=False), results(model, quick=True)
    assert len(plain) == len(quick) > 10
    for found, wanted in zip(quick, plain, strict=True):
        if DEVICE == "cpu":
            assert torch.equal(found, wanted)
        else:
            torch.testing.assert_close(found, wanted, rtol=2e-3, atol=1e-4 * float(wanted.abs().max()))


def test_norms_take_the_relu_behind_them_along() -> None:
    model = prepared(mobile())
    blocks = find_blocks(model)
    names = [str(node.target) for node in quick_nodes(model, blocks[1])]
    norms = ["first.expand.1", "first.filter.1", "first.project.1"]
    assert [name for name in names if name.endswith(".1")] == norms
    assert [name for name in names if name.endswith(".2")] == ["first.expand.2", "first.filter.2"]


class Relus(nn.Module):
    """A ReLU module by the name of a method, one by function with settings, one behind a norm that is read again."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Conv2d(3, 3, 1, bias=False) for _ in range(3))
        self.norms = nn.ModuleList(nn.BatchNorm2d(3) for _ in range(3))
        self.relu, self.head = nn.ReLU(), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.norms[0](self.first(x)))
        x = F.relu(self.norms[1](self.second(x)), True)
        x = self.norms[2](self.third(x))
        return self.head((x + x.relu()).mean(dim=(2, 3)))


def test_relus_of_all_kinds() -> None:
    x = images(4)
    model = prepare(settled(Relus(), images(64)), QuantConfig(bit_choices=(8, 3)), x).to(DEVICE)
    blocks = find_blocks(model)
    nodes = [node for block in blocks for node in block.nodes]
    whole = replace(blocks[0], nodes=tuple(nodes), gives=blocks[-1].gives)
    quick, inputs = quick_nodes(model, whole), {nodes[0]: x.to(DEVICE)}
    assert [str(node.target) for node in quick if node.op == "call_module"] == [
        "norms.0", "relu", "norms.1", "norms.2"
    ]  # fmt: skip
    assert [node.target for node in quick if node.op != "call_module"] == [F.relu]
    found, wanted = run(model, nodes, dict(inputs), quick)[nodes[-1]], run(model, nodes, dict(inputs))[nodes[-1]]
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3 if DEVICE == "cuda" else 0.0)
    model.get_submodule("relu").register_forward_hook(lambda module, args, out: None)
    assert "relu" not in {str(node.target) for node in quick_nodes(model, whole)}


def test_what_somebody_watches_is_called() -> None:
    model = prepared(mobile())
    block = find_blocks(model)[1]
    model.get_submodule("first.expand.2").register_forward_hook(lambda module, args, out: None)
    model.get_submodule("first.filter.1").register_forward_pre_hook(lambda module, args: None)
    names = {str(node.target) for node in quick_nodes(model, block)}
    assert names.isdisjoint({"first.expand.2", "first.filter.1", "first.filter.2"})
    assert {"first.expand.1", "first.project.1"} <= names
