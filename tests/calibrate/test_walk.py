import torch
from torch import Tensor, nn

from bitdial import QuantConfig, build_model, prepare
from bitdial.calibrate.walk import Walk

from .conftest import images, mobile, prepared


def test_a_traced_model_is_walked_by_its_blocks() -> None:
    walk = Walk(prepared(mobile()), list(images(10).split(4)))
    assert walk.traced
    assert walk.samples == 10
    assert walk.warnings == []


def test_a_model_that_cannot_be_traced_is_walked_layer_by_layer_and_says_so() -> None:
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
    walk = Walk(prepare(Keywords(), QuantConfig(keep_first_last=False), x), [x])
    assert not walk.traced
    assert "cannot be traced" in walk.warnings[0]
    assert "layer by layer" in walk.warnings[0]
    assert [block.name for block in walk.blocks] == ["first", "second"]


def test_a_model_that_cannot_be_traced_is_walked_by_its_rows_of_like_modules() -> None:
    ids = torch.randint(0, 8, (4, 6), generator=torch.Generator().manual_seed(0))
    walk = Walk(prepare(build_model("tiny_transformer"), QuantConfig(), ids), [ids])
    assert not walk.traced
    assert walk.warnings == []
    assert [block.name for block in walk.blocks] == ["blocks.0", "blocks.1"]


class Counting(nn.Module):
    """Computes something else at every call."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls = nn.Linear(4, 4), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.layer(x) * self.calls


class Keywords(nn.Module):
    """Takes any arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, **others: object) -> Tensor:
        return self.second(torch.relu(self.first(x)))


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.mul_(0.5))


class Optional(nn.Module):
    """Has an argument that is not given, and goes another way if it is."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = torch.relu(self.first(x))
        return self.second(x if mask is None else x * mask)


def test_a_graph_that_is_not_the_model_is_not_used() -> None:
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
    for network, reason in ((Counting(), "computes something else"), (InPlace(), "changes its inputs in place")):
        model = prepare(network, QuantConfig(keep_first_last=False), x.clone())
        walk = Walk(model, [x.clone()])
        assert not walk.traced
        assert reason in walk.warnings[0]


def test_arguments_that_are_not_given_keep_their_default() -> None:
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
    model = prepare(Optional(), QuantConfig(keep_first_last=False), x)
    for batches in ([x], [(x,)], [{"x": x}], [(x, torch.ones(4, 4))]):
        walk = Walk(model, list(batches))
        assert walk.traced, walk.warnings
        assert len(walk.blocks) == 2
