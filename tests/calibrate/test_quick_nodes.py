import pytest
import torch
from torch import Tensor, nn

from bitdial import set_bits
from bitdial.calibrate.blocks import find_blocks
from bitdial.calibrate.quick_nodes import quick_nodes
from bitdial.calibrate.values import run

from .conftest import mobile, prepared

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


def test_what_somebody_watches_is_called() -> None:
    model = prepared(mobile())
    block = find_blocks(model)[1]
    model.get_submodule("first.expand.2").register_forward_hook(lambda module, args, out: None)
    model.get_submodule("first.filter.1").register_forward_pre_hook(lambda module, args: None)
    names = {str(node.target) for node in quick_nodes(model, block)}
    assert names.isdisjoint({"first.expand.2", "first.filter.1", "first.filter.2"})
    assert {"first.expand.1", "first.project.1"} <= names
