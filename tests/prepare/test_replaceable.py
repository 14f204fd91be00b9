"""Models that pass by what stands in the place of their layers are refused; without the check they go on in float."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bitdial import QuantConfig, Rule, prepare
from bitdial.errors import ConfigError

X = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    """Four Linear layers and a norm, run one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(16, 16) for _ in range(2)), nn.BatchNorm1d(16), nn.Linear(16, 16))
        self.head = nn.Linear(16, 4)
        self.beside: Any = [*self.layers]

    def each(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.relu(layer(x))
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.each(x))


class FromAList(Net):
    def each(self, x: Tensor) -> Tensor:
        for layer in self.beside:
            x = F.relu(layer(x))
        return x


class AsksForLinear(Net):
    def each(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x) if isinstance(layer, nn.Linear) else F.relu(x)
        return x


class AsksForNorm(Net):
    def each(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
            x = F.relu(x) if isinstance(layer, nn.BatchNorm1d) else x
        return x


class Noisy(Net):
    """Gives another output at each call, from torch's random numbers or from Python's."""

    def __init__(self, draw: Callable[[], float]) -> None:
        super().__init__()
        self.draw = draw

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.draw()


def hooked(hook: Callable[..., Any]) -> nn.Module:
    net = Net()
    net.layers[1].register_forward_hook(hook)
    return net


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (FromAList, "'layers.1': the model reaches it otherwise"),
        (AsksForLinear, "'layers.1': the model reaches it otherwise"),
        (AsksForNorm, "asks for their class"),
        (lambda: hooked(lambda module, args, out: 2 * out), "'layers.1': a forward hook on it changes"),
    ],
)
def test_what_would_pass_quantised_layers_by_is_refused(make: Callable[[], nn.Module], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        prepare(make(), QuantConfig(), X)
    assert words in str(caught.value)


def test_the_way_out_works() -> None:
    rules = tuple(Rule(pattern=f"layers.{i}", quantize=False) for i in (0, 1, 3))
    quantised = Rule(pattern="head", quantize=True)
    prepare(FromAList(), QuantConfig(rules=(*rules, quantised), switch_norms=False), X)


@pytest.mark.parametrize(
    "make",
    [
        Net,
        lambda: hooked(lambda module, args, out: None),
        lambda: Noisy(lambda: float(torch.rand(()))),
        lambda: Noisy(random.random),
    ],
)
def test_others_go_and_stay_what_they_are(make: Callable[[], nn.Module]) -> None:
    model = make()
    modules = dict(model.named_modules())
    prepare(model, QuantConfig(), X)
    assert dict(model.named_modules()) == modules
    assert not model.layers[0]._forward_pre_hooks


def test_random_numbers_go_on_as_if_nothing_had_run() -> None:
    net = Net()
    with torch.random.fork_rng():
        torch.manual_seed(3)
        expected = torch.rand(3)
        torch.manual_seed(3)
        prepare(net, QuantConfig(), X)
        assert torch.equal(torch.rand(3), expected)


class ComputesWithWeights(Net):
    """As tied autoencoders do."""

    def each(self, x: Tensor) -> Tensor:
        x = F.relu(self.layers[1](x.to(self.layers[0].weight.dtype)))  # to look at a weight is no harm
        return self.use(F.relu(self.layers[0](x)), self.layers[1].weight)

    def use(self, x: Tensor, weight: Any) -> Tensor:
        return F.linear(x, weight.t())


class ComputesWithRows(ComputesWithWeights):
    def use(self, x: Tensor, weight: Any) -> Tensor:
        return x + weight[0]


@pytest.mark.parametrize("kind", [ComputesWithWeights, ComputesWithRows])
def test_a_weight_that_is_used_outside_of_its_layer_is_refused(kind: type[Net]) -> None:
    torch.manual_seed(0)
    model, config = kind(), QuantConfig(keep_first_last=False)
    with pytest.raises(ConfigError, match=r"layer 'layers.1': the model computes with its weight outside .*Rule"):
        prepare(model, config, X)
    rules = (Rule(pattern="layers.1", quantize=False),)
    assert prepare(model, QuantConfig(keep_first_last=False, rules=rules), X)(X).shape == (8, 4)
