"""Which modules are taken apart, what is kept of them, and what is left whole."""

import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bitdial import QuantConfig, prepare
from bitdial.errors import ConfigError
from bitdial.nn.decompose import DECOMPOSITIONS, decompose, decompose_again, decomposed_modules, decomposition_of


class Conv1D(nn.Module):
    """GPT-2's layer as transformers has it: a Linear whose weight is (in, out)."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf, self.nx = nf, nx
        self.weight, self.bias = nn.Parameter(torch.randn(nx, nf) * 0.3), nn.Parameter(torch.randn(nf))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.reshape(-1, self.nx), self.weight).view(*x.shape[:-1], self.nf)


Conv1D.__module__ = "transformers.pytorch_utils"  # by which it is known


X = torch.randn(3, 4, 8, generator=torch.Generator().manual_seed(0))
MAKE: dict[str, Callable[..., nn.Module]] = {
    "MultiheadAttention": lambda: nn.MultiheadAttention(8, 2, batch_first=True, dropout=0.25),
    "Conv1D": lambda: Conv1D(6, 8),
    "LSTM": lambda: nn.LSTM(8, 6, num_layers=2, bidirectional=True, dropout=0.25),
    "GRU": lambda: nn.GRU(8, 6),
    "RNN": lambda: nn.RNN(8, 6, bias=False),
}


def held(*modules: nn.Module) -> nn.Module:
    return nn.ModuleDict({str(place): module for place, module in enumerate(modules)})


def parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    return dict(module.named_parameters(remove_duplicate=False))


def test_every_decomposition_is_here() -> None:
    assert {*MAKE, "FrozenBatchNorm2d"} == set(DECOMPOSITIONS)  # a norm, no layers: tests/nn/test_frozen_norm.py
    for name, make in MAKE.items():
        assert decomposition_of(make()) is DECOMPOSITIONS[name]
    assert decomposition_of(nn.Linear(2, 2)) is None


def test_transformers_has_the_layer_that_is_known_by_name() -> None:
    real = pytest.importorskip("transformers.pytorch_utils").Conv1D
    assert decomposition_of(real(3, 2)) is DECOMPOSITIONS["Conv1D"]
    model: Any = held(real(3, 2))
    x = torch.randn(5, 4, 2)
    expected = model["0"](x)
    decompose(model)
    assert (type(model["0"]), model["0"].nf, model["0"].nx) == (nn.Linear, 3, 2)
    torch.testing.assert_close(model["0"](x), expected, rtol=1e-6, atol=1e-6)


def test_what_is_kept() -> None:
    """Number of weights, modes, frozen parameters, hooks, attributes; what it was is known."""
    for name, make in MAKE.items():
        module: Any = make().eval()
        module.note = "a note"
        for parameter in module.parameters():
            parameter.requires_grad_(False)
        called: list[str] = []
        module.register_forward_hook(lambda *_, called=called: called.append("hook"))
        model = held(module)
        assert decompose(model) == {"0": name} == decomposed_modules(copy.deepcopy(model))
        made: Any = model["0"]  # type: ignore[index]
        assert made is not module
        assert made.note == "a note"
        assert not any(part.training for part in made.modules())
        assert not any(parameter.requires_grad for parameter in made.parameters())
        assert sum(p.numel() for p in made.parameters()) == sum(p.numel() for p in module.parameters())
        made(*(X, X, X) if name == "MultiheadAttention" else (X,))
        assert called == ["hook"], name


def test_a_module_in_two_places_and_a_tied_weight_stay_one() -> None:
    for name, make in MAKE.items():
        one: Any = make()
        two: Any = make()
        weight = next(key for key, p in one.named_parameters() if p.dim() == 2)
        setattr(two, weight, getattr(one, weight))
        model: Any = held(one, two, one)
        assert decompose(model) == {"0": name, "1": name}
        assert model["0"] is model["2"]
        mine, theirs = parameters(model["0"]), parameters(model["1"])
        tied = {key for key in mine if mine[key] is theirs[key]}
        assert sum(mine[key].numel() for key in tied) == getattr(one, weight).numel(), name


def test_what_is_left_whole_is_named(caplog: pytest.LogCaptureFixture) -> None:
    for name, make in MAKE.items():
        caplog.clear()
        weight = next(key for key, p in make().named_parameters() if p.dim() == 2)
        other: Any = nn.Linear(2, 2)
        shared: Any = make()
        other.weight = getattr(shared, weight)
        likewise: Any = make()
        likewise.register_buffer("mask", torch.ones(1))
        tied: Any = make()
        setattr(tied, weight, getattr(likewise, weight))
        model = held(shared, other, likewise, tied, make())
        with caplog.at_level(logging.WARNING):
            assert list(decompose(model)) == ["4"]
        assert [record.getMessage() for record in caplog.records] == [
            f"{name} '2' is left whole, in float: it has a tensor 'mask', which a {name} does not have",
            f"{name} '0' is left whole, in float: '1' uses its weights too",
            f"{name} '3' is left whole, in float: '2' uses its weights too",
        ]


def test_subclasses_that_compute_otherwise_are_left_alone() -> None:
    for name, make in MAKE.items():
        base: Any = type(make())

        class Same(base):  # type: ignore[misc]
            def extra_repr(self) -> str:
                return ""

        class Other(base):  # type: ignore[misc]
            def forward(self, *args: Any) -> Any:
                return args[0]

        for kind, expected in ((Same, DECOMPOSITIONS[name]), (Other, None)):
            module = copy.deepcopy(make())
            made = kind.__new__(kind)
            made.__dict__.update(vars(module))
            assert decomposition_of(made) is expected
        patched: Any = make()
        patched.forward = lambda x: x
        assert decomposition_of(patched) is None


def test_a_file_says_what_to_take_apart() -> None:
    for name, make in MAKE.items():
        first, second = held(make(), make()), held(make(), make())
        decompose(first)
        decompose_again(second, {"0": name})
        assert decomposed_modules(second) == {"0": name}
        shapes = [{key: p.shape for key, p in parameters(m["0"]).items()} for m in (first, second)]  # type: ignore[index]
        assert shapes[0] == shapes[1]
        for names, there in (({"7": name}, "nothing"), ({"0": name}, "a Linear")):
            with pytest.raises(ConfigError, match=f"is a {name} in the file, and the model has {there} there"):
                decompose_again(held(nn.Linear(2, 2)), names)


def test_a_model_of_one_module_has_no_name_for_its_layers() -> None:
    for name, make in MAKE.items():
        with pytest.raises(ConfigError, match=f"the model is a single {name}; wrap it"):
            prepare(make(), QuantConfig(), X)


def test_the_users_model_stays_whole() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.attention(x, x, x)[0]

    net = Net()
    before = copy.deepcopy(net.state_dict())
    prepare(net, QuantConfig(start="3std", keep_first_last=False), X)
    assert type(net.attention) is nn.MultiheadAttention
    assert all(torch.equal(value, before[key]) for key, value in net.state_dict().items())
