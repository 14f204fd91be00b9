"""Subclasses of known layers, and layers with attributes of their own, through the whole path."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bitdial import QuantConfig, code_exact, export_onnx, load, load_trainable, prepare, save, set_bits
from bitdial.errors import ConfigError
from bitdial.live.layers import LiveLayer
from bitdial.nn import QuantLayer, kind_of
from bitdial.nn.layers import QuantLinear
from bitdial.nn.stand_in import RESERVED

QUICK = QuantConfig(bit_choices=(8, 4, 2), start="3std")
X = torch.randn(16, 6, generator=torch.Generator().manual_seed(0))


class Scaled(nn.Linear):
    """Another constructor, an attribute and a constant that models read, and methods."""

    power = 2

    def __init__(self, width: int, *, gain: float):
        super().__init__(width, width)
        self.gain, self._shift = gain, 0.5

    def summed(self) -> Tensor:
        return self.weight.sum()

    @property
    def twice(self) -> float:
        return 2 * self.gain


class Net(nn.Module):
    def __init__(self, read: str = "gain") -> None:
        super().__init__()
        self.stem, self.mid, self.head = nn.Linear(6, 6), Scaled(6, gain=3.0), nn.Linear(6, 3)
        self.mid.note = "a note"  # type: ignore[assignment]  # as anybody may
        self.read = read

    def forward(self, x: Tensor) -> Tensor:
        mid: Any = self.mid
        if self.read == "summed":
            return self.head(mid(x) * mid.summed())
        if self.read == "twice":
            return self.head(mid(x) * mid.twice)
        assert mid.note == "a note"
        return self.head((mid(self.stem(x)) * mid.gain + mid._shift) ** mid.power)


def test_a_subclass_goes_all_the_way(tmp_path: Path) -> None:
    pytest.importorskip("onnxscript")
    torch.manual_seed(0)
    model = prepare(Net(), QUICK, X).eval()
    assert isinstance(model.mid, QuantLayer)
    save(model, tmp_path / "m")
    live = load(tmp_path / "m", Net())
    others = load_trainable(tmp_path / "m", Net()).eval(), copy.deepcopy(live)
    exact = code_exact(live)
    with torch.no_grad():
        for bits in (8, 4, 2):
            for each in (model, live, exact, *others):
                set_bits(each, bits)
            assert all(torch.equal(each(X), model(X)) for each in (live, *others)), bits
            assert exact(X).shape == (16, 3)
    export_onnx(live, tmp_path / "m.onnx", X)


@pytest.mark.parametrize("read", ["summed", "twice"])
def test_methods_stay_behind_with_an_error_that_names_the_layer(tmp_path: Path, read: str) -> None:
    model = prepare(Net(read), QuantConfig(bit_choices=(8, 4), keep_first_last=False, start="3std"), X)
    with pytest.raises(AttributeError, match=f"layer 'mid' was a Scaled, whose '{read}' .* quantize=False"):
        model(X)
    save(model, tmp_path / "m")
    with pytest.raises(AttributeError, match="layer 'mid' was a Scaled"):
        load(tmp_path / "m", Net(read))(X)


def test_our_own_attributes_are_not_taken_for_the_models() -> None:
    model = Net()
    model.mid.name = "middle"  # type: ignore[assignment]
    with pytest.raises(ConfigError, match=r"layer 'mid': its attribute 'name' .* rename it"):
        prepare(model, QUICK, X)


def test_reserved_names_are_those_that_our_layers_have(tmp_path: Path) -> None:
    save(prepare(Net(), QUICK, X), tmp_path / "m")
    live = load(tmp_path / "m", Net())
    quantised = prepare(Net(), QUICK, X).mid
    known = {*dir(nn.Linear(1, 1)), "power", "gain", "note", "summed", "twice"}
    for layer in (live.mid, quantised):
        assert isinstance(layer, LiveLayer | QuantLinear)
        ours = {name for name in (*dir(layer), *layer._modules, *layer._parameters, *layer._buffers) if name[0] != "_"}
        assert ours - known - RESERVED == set()


def test_a_layer_with_more_state_has_no_kind() -> None:
    masked = nn.Linear(3, 3)
    masked.register_buffer("mask", torch.ones(3))
    assert kind_of(masked) is None
    assert kind_of(nn.Linear(3, 3)) is not None
