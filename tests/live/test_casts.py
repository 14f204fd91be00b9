"""Live models refuse casts, and nothing of them has changed then; they can be moved."""

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from bitdial import QuantConfig, code_exact, load, load_trainable, prepare, save, set_bits
from bitdial.errors import ConfigError, QuantizationError
from bitdial.live.engines.integer import IntegerModel

X = torch.rand(2, 3, 6, 6, generator=torch.Generator().manual_seed(0))
CASTS: dict[str, Callable[[nn.Module], object]] = {
    "half": lambda m: m.half(),
    "bfloat16": lambda m: m.bfloat16(),
    "double": lambda m: m.double(),
    "to": lambda m: m.to(torch.bfloat16),
    "to by keyword": lambda m: m.to(dtype=torch.float64),
    "to another device as well": lambda m: m.to("meta", torch.float16),
    "to another": lambda m: m.to(torch.ones(1, dtype=torch.float16)),
    "type": lambda m: m.type(torch.float32),  # of all tensors, so that codes would be floats
}


class Net(nn.Module):
    """Float parts before, between and behind the layers."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.first = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
        self.body = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 32, bias=False), nn.ReLU(), nn.Linear(32, 32))
        self.head = nn.Linear(32, 3)
        self.register_buffer("table", torch.linspace(0, 1, 3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(self.stem(x)).mean(dim=(2, 3))
        return self.head(self.body(x)) + self.table.to(self.head.weight.dtype)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Files with and without quantised activations."""
    folder = tmp_path_factory.mktemp("casts")
    torch.manual_seed(0)
    for activations in ("auto", "float"):
        save(prepare(Net(), QuantConfig(start="3std", activations=activations), X), folder / activations)
    return {activations: folder / activations for activations in ("auto", "float")}


def live_models(made: dict[str, Path]) -> dict[str, nn.Module]:
    live = load(made["auto"], Net())
    return {
        "float": live,
        "integer": load(made["auto"], Net(), kernels="integer"),
        "copied to integer": IntegerModel(live),
        "exact": code_exact(live),
        "packed": load(made["float"], Net(), kernels="packed"),
        "in 16 bits": load(made["float"], Net(), dtype=torch.bfloat16, kernels="packed"),
        "copy": copy.deepcopy(live),
    }


def types_of(model: nn.Module) -> dict[str, tuple[torch.dtype, torch.device, int]]:
    return {name: (t.dtype, t.device, t.data_ptr()) for name, t in (*model.named_parameters(), *model.named_buffers())}


def test_casts_are_refused_and_change_nothing(made: dict[str, Path]) -> None:
    for name, live in live_models(made).items():
        x = X.bfloat16() if name == "in 16 bits" else X
        before, wanted = types_of(live), live(x)
        for what, cast in CASTS.items():
            with pytest.raises(ConfigError, match=r"cannot be cast .*Nothing was changed.* dtype=torch\.bfloat16"):
                cast(live)
            assert types_of(live) == before, (name, what)
        with pytest.raises(ConfigError, match="cannot be cast"):
            live.body.half()  # a part with live layers in it
        with pytest.raises(ConfigError, match="cannot be cast"):
            nn.Sequential(live).half()
        assert types_of(live) == before, name
        assert torch.equal(live(x), wanted), name
        set_bits(live, 2)
        assert not torch.equal(live(x), wanted), name


def test_what_is_no_cast_passes(made: dict[str, Path]) -> None:
    """Also a cast to the types that all tensors have."""
    for name, live in live_models(made).items():
        x = X.bfloat16() if name == "in 16 bits" else X
        wanted = live(x)
        live.cpu().to("cpu").to(memory_format=torch.contiguous_format).eval().requires_grad_(False)
        assert torch.equal(live(x), wanted), name
    live = load(made["auto"], Net())
    assert torch.equal(live.float().to("cpu", torch.float32)(X), load(made["auto"], Net())(X))
    moved = live.to("meta")
    assert {t.device.type for t in (*moved.parameters(), *moved.buffers())} == {"meta"}


def test_a_copy_refuses_by_itself(made: dict[str, Path]) -> None:
    """It asks its own tensors, not those of the model that it was made from."""
    live = load(made["float"], Net(), kernels="packed")
    twin = copy.deepcopy(live).to("meta")
    assert {t.device.type for t in live.parameters()} == {"cpu"}
    assert {t.device.type for t in twin.parameters()} == {"meta"}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_prepared_models_say_it_when_they_run(made: dict[str, Path], dtype: torch.dtype) -> None:
    for model in (prepare(Net(), QuantConfig(start="3std"), X), load_trainable(made["auto"], Net())):
        with pytest.raises(QuantizationError, match=rf"layer 'body\.1': its weight is {dtype}.*autocast"):
            model.to(dtype)(X.to(dtype))
        model.float()(X)
