"""What the training tests share: tiny networks, tiny data, and ways to stop a run."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bitdial.prepare.config import QuantConfig
from bitdial.prepare.prepare import prepare
from bitdial.train import ArrayData
from bitdial.train.data import Sample

CLASSES = 3


@pytest.fixture(autouse=True)
def in_one_thread(one_thread: None) -> None:
    """All of them."""


def float_net(*, norms: bool = True, dropout: float = 0.0, seed: int = 0, width: int = 4) -> nn.Sequential:
    """Images (batch, 2, 4, 4) to 3 logits: a float stem, two layers to quantise, a float head."""
    state = torch.get_rng_state()
    torch.manual_seed(seed)
    layers: dict[str, nn.Module] = {"stem": nn.Conv2d(2, width, 3, padding=1)}
    if norms:
        layers["norm0"] = nn.BatchNorm2d(width)
    layers |= {"relu0": nn.ReLU(), "conv": nn.Conv2d(width, width, 3, padding=1, bias=False)}
    if norms:
        layers["norm1"] = nn.BatchNorm2d(width)
    layers |= {"relu1": nn.ReLU(), "flat": nn.Flatten()}
    if dropout:
        layers["dropout"] = nn.Dropout(dropout)
    layers |= {"hidden": nn.Linear(16 * width, 6), "relu2": nn.ReLU(), "head": nn.Linear(6, CLASSES)}
    net = nn.Sequential()
    for name, layer in layers.items():
        net.add_module(name, layer)
    torch.set_rng_state(state)
    return net


def images(count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, 2, 4, 4, generator=generator)
    targets = (inputs.mean(dim=(2, 3))[:, 0] * 8).round().long().clamp(-1, 1) + 1
    return inputs, targets


@pytest.fixture
def make_float() -> Callable[..., nn.Sequential]:
    """float_net, for tests that need a teacher or a net that is not prepared."""
    return float_net


@pytest.fixture
def make_images() -> Callable[..., tuple[Tensor, Tensor]]:
    """make_images(count, seed): inputs (count, 2, 4, 4) and targets (count,)."""
    return images


@pytest.fixture
def make_model() -> Callable[..., nn.Module]:
    """make_model(bit_choices, **what float_net and QuantConfig take): a prepared net, the same at every call."""

    def make(
        bit_choices: tuple[int, ...] = (8, 4, 2),
        *,
        norms: bool = True,
        dropout: float = 0.0,
        seed: int = 0,
        width: int = 4,
        dtype: torch.dtype = torch.float32,
        **config: Any,
    ) -> nn.Module:
        net = float_net(norms=norms, dropout=dropout, seed=seed, width=width)
        calibration = images(16, seed=99)[0]
        return prepare(net, QuantConfig(bit_choices=bit_choices, **config), calibration).to(dtype)

    return make


@pytest.fixture
def make_data() -> Callable[..., ArrayData]:
    """make_data(samples, batch_size, seed): a small training set."""

    def make(samples: int = 20, batch_size: int = 8, seed: int = 0) -> ArrayData:
        return ArrayData(*images(samples), batch_size=batch_size, seed=seed)

    return make


class Stopped(Exception):
    """The power went off."""


class StoppingData:
    """Data that fails when the run asks for batch number `steps`, counted from the start: an end without warning."""

    resumable = True

    def __init__(self, data: ArrayData, steps: int):
        self.data, self.steps, self.samples = data, steps, data.samples

    def __len__(self) -> int:
        return len(self.data)

    def batches(self, epoch: int, *, start: int = 0, rank: int = 0, world: int = 1) -> Iterator[Sample]:
        for number, batch in enumerate(self.data.batches(epoch, start=start, rank=rank, world=world), start=start):
            if epoch * len(self) + number == self.steps:
                raise Stopped
            yield batch


@pytest.fixture
def stop_after() -> tuple[Callable[[ArrayData, int], StoppingData], type[Exception]]:
    """(data, steps) -> data that fails after that many steps of the whole run, and the exception it fails with."""
    return StoppingData, Stopped
