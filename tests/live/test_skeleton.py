"""Float models are built and copied without their weights, and nothing else of them is lost."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from bitdial import QuantConfig, build_model, load, load_trainable, prepare, save
from bitdial.live.skeleton import NoInitialValues, copy_of

X = torch.rand(4, 6, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    """Has what a state does not hold, and other ways to its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 3)
        self.gain = nn.Parameter(torch.rand(6))
        self.register_buffer("table", torch.rand(6), persistent=False)
        self.register_buffer("kept", torch.rand(6))
        self.plain = torch.rand(6)
        self.ways = [self.gain, self.kept]

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x * self.table + self.plain) * self.ways[0] + self.ways[1]
        return self.last(x)


@pytest.mark.parametrize("loader", [load, load_trainable])
def test_a_copy_keeps_what_the_file_does_not_have(tmp_path: Path, loader: object) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Net()
    prepared = prepare(model, QuantConfig(start="3std", rules=(), keep_first_last=False), X).eval()
    save(prepared, tmp_path / "m")
    before = {name: t.clone() for name, t in model.state_dict().items()}
    live = loader(tmp_path / "m", model).eval()  # type: ignore[operator]
    assert torch.equal(live(X), prepared(X))
    assert live.ways[0] is live.gain
    assert live.ways[1] is live.kept
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    mine = {t.data_ptr() for t in (*model.parameters(), *model.buffers(), model.plain)}
    assert mine.isdisjoint({t.data_ptr() for t in (*live.parameters(), *live.buffers(), live.plain) if t.numel()})


def test_a_copy_has_the_form_of_the_original() -> None:
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4)).to(memory_format=torch.channels_last)
    model[0].weight.requires_grad_(False)
    made = copy_of(model)
    for name, tensor in model.state_dict(keep_vars=True).items():
        twin = made.state_dict(keep_vars=True)[name]
        assert (twin.shape, twin.dtype, twin.stride()) == (tensor.shape, tensor.dtype, tensor.stride())
        assert (type(twin), twin.requires_grad) == (type(tensor), tensor.requires_grad)


def test_models_are_built_without_random_numbers() -> None:
    before = torch.random.get_rng_state()
    with NoInitialValues():
        model = build_model("resnet20", width=4)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert all(bool((norm.running_var == 1).all()) for norm in model.modules() if isinstance(norm, nn.BatchNorm2d))
