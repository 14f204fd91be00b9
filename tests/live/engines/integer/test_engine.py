"""Layers whose tokens have a scale each, on integer kernels: on the reference, under the interpreter and on a GPU."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bitdial import QuantConfig, code_exact, load, prepare, resident_bytes, save, set_bits
from bitdial.errors import QuantizationError
from bitdial.live.engines.integer.engine import IntegerEngine
from bitdial.live.layers import LiveLayer

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Net(nn.Module):
    """A layer behind the input, one behind a ReLU that could be fused, one without a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(24, 40)
        self.second = nn.Linear(40, 16, bias=False)
        self.third = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.third(torch.relu(self.second(torch.relu(self.first(x)) + 0.5)))


def models(folder: Path, scheme: str) -> tuple[nn.Module, nn.Module]:
    """On integer kernels, and by the definition."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = Net()
        config = QuantConfig(bit_choices=(8, 4), scheme=scheme, activations="dynamic", keep_first_last=False)
        save(prepare(net, config, torch.randn(16, 24)), folder / "m")
    exact = code_exact(load(folder / "m", net, kernels="float", device=DEVICE))
    return load(folder / "m", net, kernels="integer", device=DEVICE), exact


@pytest.mark.interpreter
def test_tokens_on_kernels_are_those_of_the_definition(tmp_path: Path) -> None:
    x = torch.randn(2, 3, 24, generator=torch.Generator().manual_seed(1)) * torch.logspace(-4, 4, 6).view(2, 3, 1)
    x[1, 0] = 0
    x = x.to(DEVICE)
    for scheme in ("double_rounding", "centred", "lsq"):  # on the board, of 2 * code + 1, and off the board
        integer, exact = models(tmp_path, scheme)
        layers = [m for m in integer.modules() if isinstance(m, LiveLayer)]
        assert all(isinstance(layer.engine, IntegerEngine) for layer in layers)
        for setting in (8, (8, 4), 4, (4, 8)):
            for model in (integer, exact):
                set_bits(model, setting)
            assert torch.equal(integer(x), exact(x)), (scheme, setting)
        assert torch.equal(integer(x[0, 0]), exact(x[0, 0])), "a token alone"
        assert integer(x[:0]).shape == (0, 3, 5)
    assert resident_bytes(integer)["active"] == sum(m.weight_shape.numel() for m in layers)


def test_inputs_of_other_types(tmp_path: Path) -> None:
    integer: Any
    integer, exact = models(tmp_path, "double_rounding")
    x = torch.randn(4, 24, device=DEVICE).bfloat16()
    assert torch.equal(integer(x), exact(x.float()))
    with pytest.raises(QuantizationError, match=r"layer 'first': its input is torch.float64"):
        integer(x.double())
    with pytest.raises(QuantizationError, match=r"layer 'first': its input is .*expected \(..., 24\)"):
        integer(torch.randn(4, 23, device=DEVICE))


def test_what_appears_inside_stays_visible(tmp_path: Path) -> None:
    """Only the model's own inputs are looked at: an infinity that a layer makes must not turn into codes."""
    integer, _ = models(tmp_path, "double_rounding")
    x = torch.randn(3, 24, device=DEVICE)
    x[1] = 3e38
    out = integer(x)
    assert not bool(out[1].isfinite().any())
    assert bool(out[[0, 2]].isfinite().all())
