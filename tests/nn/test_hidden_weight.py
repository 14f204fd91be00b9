"""Live layers have no float weight: models may look at its shape, type and device, and nobody gets numbers from it."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bitdial import QuantConfig, export_onnx, load, load_trainable, prepare, save, set_bits
from bitdial.errors import BitdialError, HiddenWeightError
from bitdial.nn.hidden_weight import HiddenWeight

X = torch.randn(6, 2, 5, 5, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    """A model that looks at its layers' weights, as many do."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(2, 4, 3)
        self.conv = nn.Conv2d(4, 6, 3, groups=2, bias=False)
        self.up = nn.Linear(6, 12, bias=False)
        self.down = nn.Linear(12, 6)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(self.stem(x.to(self.conv.weight.dtype)).relu()).relu().flatten(1)
        x = self.up(x.to(self.up.weight.device, self.up.weight.dtype))
        return self.head(self.down(x.view(-1, self.down.weight.shape[1]).relu()).to(self.up.weight.dtype))


LAYERS = {"conv": (6, 2, 3, 3), "up": (12, 6), "down": (6, 12)}
KERNELS = ("float", "integer", "packed")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    folder = tmp_path_factory.mktemp("hidden")

    def make(scheme: str, activations: str) -> Path:
        path = folder / f"{scheme}-{activations}"
        if not path.exists():
            torch.manual_seed(0)
            save(prepare(Net(), QuantConfig(scheme=scheme, activations=activations, start="3std"), X), path)
        return path

    return make


@pytest.fixture
def hidden(saved: Callable[..., Path]) -> HiddenWeight:
    return load(saved("nested", "float"), Net(), kernels="packed").up.weight  # type: ignore[return-value, union-attr]


@pytest.mark.parametrize("scheme", ["double_rounding", "nested", "lsq"])
@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("activations", ["auto", "float"])
def test_models_that_look_at_weights_run(
    saved: Callable[..., Path], scheme: str, kernels: str, activations: str
) -> None:
    if kernels == "packed" and (activations == "auto" or scheme == "lsq"):
        pytest.skip("packed kernels do not serve it")
    path = saved(scheme, activations)
    live, trained = load(path, Net(), kernels=kernels), load_trainable(path, Net()).eval()
    for name, shape in LAYERS.items():
        weight = live.get_submodule(name).weight if kernels != "integer" else getattr(live, name).weight
        assert (weight.shape, weight.dtype, weight.device) == (shape, torch.float32, torch.device("cpu"))
        assert isinstance(weight.shape, torch.Size)
    for bits in (8, 2):
        set_bits(live, bits)
        set_bits(trained, bits)
        torch.testing.assert_close(live(X), trained(X).detach(), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("kernels", ["float", "packed"])
@pytest.mark.parametrize("scheme", ["double_rounding", "nested"])
def test_the_type_is_the_models(saved: Callable[..., Path], kernels: str, scheme: str) -> None:
    """Also of a layer without a bias, whose tensors all keep a type of their own."""
    path = saved(scheme, "float")
    for live in (
        load(path, Net(), kernels=kernels, dtype=torch.bfloat16),
        load(path, Net(), kernels=kernels, dtype=torch.bfloat16).to("cpu"),
        copy.deepcopy(load(path, Net(), kernels=kernels, dtype=torch.bfloat16)).cpu(),
    ):
        assert {live.get_submodule(name).weight.dtype for name in LAYERS} == {torch.bfloat16}
        assert live(X.bfloat16()).dtype == torch.bfloat16


def test_it_is_part_of_no_state(saved: Callable[..., Path]) -> None:
    for kernels in ("float", "packed"):
        live = load(saved("nested", "float"), Net(), kernels=kernels)
        assert not [key for key in live.state_dict() if key.endswith(("up.weight", "up.active"))]
        assert not [key for key, _ in live.named_parameters() if key.endswith("up.weight")]


@pytest.mark.parametrize("kernels", KERNELS)
def test_nothing_can_be_put_in_its_place(saved: Callable[..., Path], kernels: str) -> None:
    """No layer would use it."""
    live = load(saved("nested", "float"), Net(), kernels=kernels)
    before = live(X)
    for value in (nn.Parameter(torch.zeros(12, 6)), torch.zeros(12, 6), live.up.weight, None):
        with pytest.raises(HiddenWeightError, match=r"layer 'up' of a live model .* load_trainable\(path\)"):
            live.up.weight = value  # type: ignore[assignment, union-attr]
    assert isinstance(live.up.weight, HiddenWeight)  # type: ignore[union-attr]
    assert torch.equal(live(X), before)


def test_what_can_be_known(hidden: HiddenWeight) -> None:
    assert (hidden.ndim, hidden.dim(), hidden.numel(), hidden.size(), hidden.size(-1)) == (2, 2, 72, (12, 6), 6)
    assert not hidden.requires_grad
    assert not hasattr(hidden, "quant_state")
    assert getattr(hidden, "grad", None) is None
    assert copy.deepcopy(hidden).shape == hidden.shape
    assert repr(hidden) == "HiddenWeight('up', (12, 6), torch.float32, cpu)"


USES: dict[str, Callable[[Any], Any]] = {
    "linear": lambda w: F.linear(torch.ones(2, 6), w),
    "matmul": lambda w: torch.ones(2, 12) @ w,
    "mul": lambda w: torch.ones(12, 6) * w,
    "stack": lambda w: torch.stack([w, w]),
    "copy_": lambda w: torch.ones(12, 6).copy_(w),
    "normal_": lambda w: nn.init.normal_(w),
    "zeros_like": lambda w: torch.zeros_like(input=w),
    "T": lambda w: w.T,
    "data": lambda w: w.data,
    "abs": lambda w: w.abs(),
}


@pytest.mark.parametrize("use", USES)
def test_numbers_are_refused_by_name(hidden: HiddenWeight, use: str) -> None:
    with pytest.raises(HiddenWeightError, match=rf"layer 'up' of a live model .* no values, which '{use}' needs") as e:
        USES[use](hidden)
    assert isinstance(e.value, BitdialError)


@pytest.mark.parametrize("use", [lambda w: w + 1, lambda w: w[0], float, torch.tensor, lambda w: np.asarray(w) * 2.0])
def test_numbers_are_refused_by_python_too(hidden: HiddenWeight, use: Callable[[Any], Any]) -> None:
    with pytest.raises((TypeError, RuntimeError)):
        use(hidden)


class Padded(nn.Module):
    """PyTorch's own encoder, which looks whether its layers' weights are tensors before it passes the layers by."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(6, 8), nn.Linear(8, 3)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.head(self.encoder(self.stem(x), src_key_padding_mask=mask))


@pytest.mark.parametrize(("kernels", "activations"), [("float", "auto"), ("integer", "auto"), ("packed", "float")])
def test_fast_paths_do_not_pass_layers_by(tmp_path: Path, kernels: str, activations: str) -> None:
    x = torch.randn(3, 5, 6, generator=torch.Generator().manual_seed(1))
    mask = torch.zeros(3, 5, dtype=torch.bool)
    mask[1, 3:] = True
    trained = prepare(Padded(), QuantConfig(activations=activations), (x, mask)).eval()
    save(trained, tmp_path / "model")
    live = load(tmp_path / "model", Padded(), kernels=kernels)
    with torch.no_grad():
        for bits in (8, 2):
            set_bits(live, bits)
            set_bits(trained, bits)
            torch.testing.assert_close(live(x, mask), trained(x, mask), rtol=1e-3, atol=1e-3)


def test_programs_and_files_are_made_of_such_models(saved: Callable[..., Path], tmp_path: Path) -> None:
    live = load(saved("double_rounding", "auto"), Net())
    program = torch.export.export(live, (X,))
    assert torch.equal(program.module()(X), live(X))
    assert export_onnx(live, tmp_path / "net.onnx", X).weights.keys() == LAYERS.keys()
    words = load(saved("nested", "float"), Net(), kernels="packed")
    compiled = torch.compile(words, backend="aot_eager")
    assert torch.equal(compiled(X), words(X))
