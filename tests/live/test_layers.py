"""A live layer has codes and an engine: one class, whatever it is and whatever it runs on."""

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bitdial
from bitdial import QuantConfig, code_exact, get_bits, load, prepare, resident_bytes, save, set_bits
from bitdial.dial.dial import dialled_layers
from bitdial.live.engines.integer import IntegerModel
from bitdial.live.layers import LiveLayer
from bitdial.live.plain import plain_copy

X = torch.rand(3, 4, 6, 6, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    """Convolutions, a norm, pools and linear layers; the last ones on one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(4, 6, 3, padding=1), nn.BatchNorm2d(6)
        self.conv = nn.Conv2d(6, 6, (3, 1), stride=2, padding="valid", groups=2, bias=False)
        self.own_norm, self.pool = nn.BatchNorm2d(6), nn.AdaptiveAvgPool2d(1)
        self.left, self.right = nn.Linear(6, 6), nn.Linear(6, 6, bias=False)
        self.right.weight = self.left.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.own_norm(self.conv(torch.relu(self.norm(self.stem(x)))))
        return self.right(torch.relu(self.left(self.pool(x).flatten(1))))


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        prepared = prepare(Net(), QuantConfig(bit_choices=(8, 4, 2), scheme="centred", keep_first_last=False), X)
        for name, buffer in prepared.named_buffers():
            if name.endswith("running_mean"):
                buffer.normal_(0, 0.1)
    path = tmp_path_factory.mktemp("layers") / "m"
    save(prepared, path)
    return path


def every_engine(file: Path) -> dict[str, nn.Module]:
    live = load(file, Net())
    integer = load(file, Net(), kernels="integer")
    return {"float": live, "exact": code_exact(live), "integer": integer, "exact from integers": code_exact(integer)}


def test_one_class_for_every_kind_and_engine(file: Path) -> None:
    for name, model in every_engine(file).items():
        layers = dialled_layers(model)
        assert list(layers) == ["stem", "conv", "left", "right"], name
        assert {type(layer) for layer in layers.values()} == {LiveLayer}
        conv: Any = layers["conv"]
        assert (conv.in_channels, conv.out_channels, conv.kernel_size) == (6, 6, (3, 1))
        assert (conv.stride, conv.padding, conv.groups, conv.padding_mode) == ((2, 2), "valid", 2, "zeros")
        assert (layers["left"].in_features, layers["left"].out_features) == (6, 6)  # type: ignore[attr-defined]
        assert "Conv2d, in_channels=6" in repr(conv)
        assert "centred, w8a8" in repr(conv)
        assert conv.weight.shape == (6, 3, 3, 1)


def test_all_of_them_say_the_same_codes(file: Path) -> None:
    models = every_engine(file)
    for layer in ("stem", "conv", "left"):
        for bits in (8, 4, 2):
            found = [dialled_layers(model)[layer].codes.weight_codes(bits) for model in models.values()]
            assert all(torch.equal(codes, found[0]) for codes in found)
    for bits in (8, 4, (2, 8)):
        for model in models.values():
            set_bits(model, bits)
        outputs = {name: model(X) for name, model in models.items() if name != "float"}
        assert all(torch.equal(y, outputs["exact"]) for y in outputs.values())


def test_the_class_of_an_object_never_changes() -> None:
    sources = Path(bitdial.__file__).parent
    found = [path.name for path in sources.rglob("*.py") if re.search(r"__class__\s*=[^=]", path.read_text())]
    assert found == []


@pytest.mark.parametrize("kernels", ["float", "integer"])
def test_a_plain_copy_has_codes_and_pytorchs_own_modules(file: Path, kernels: str) -> None:
    live = load(file, Net(), kernels=kernels)
    set_bits(live, (2, 4))
    plain: Any = plain_copy(live)
    assert not isinstance(plain, IntegerModel)
    assert all(layer.engine is None for layer in plain.modules() if isinstance(layer, LiveLayer))
    assert type(plain.pool) is nn.AdaptiveAvgPool2d
    assert type(plain.norm.active) is nn.BatchNorm2d
    assert plain.norm.bits == 2
    assert get_bits(plain) == get_bits(live)
    with torch.no_grad():
        for tensor in (*plain.parameters(), *plain.buffers()):
            tensor.zero_()
    assert not torch.equal(live(X), torch.zeros_like(live(X)))  # it shares nothing with the model


def test_a_model_on_integer_kernels_inside_another(file: Path) -> None:
    live = load(file, Net(), kernels="integer")
    around = nn.Sequential(nn.Identity(), live)
    assert torch.equal(code_exact(around)(X), live(X))
    assert torch.equal(around(X), copy.deepcopy(around)(X))


def test_integers_count_as_active_memory(file: Path) -> None:
    weights = {n: layer.weight_shape.numel() for n, layer in dialled_layers(load(file, Net())).items()}
    found = resident_bytes(load(file, Net(), kernels="integer"))
    assert found["active"] == sum(weights.values())
    assert found["master"] == sum(weights.values()) - weights["right"]
