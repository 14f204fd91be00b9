"""Wrapped models, and models in other dtypes: what is prepared, saved and loaded is the plain model in float32."""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from bitdial import JointStep, QuantConfig, TrainConfig, at_bits, load, load_trainable, prepare, save
from bitdial.errors import ConfigError
from bitdial.nn import QuantLayer

BITS = (8, 4, 2)
CONFIG = QuantConfig(bit_choices=BITS, start="3std")
IMAGES = torch.randn(8, 2, 6, 6, generator=torch.Generator().manual_seed(0))
TARGETS = torch.arange(8) % 3


class Net(nn.Module):
    """With a tensor of each sort: weights, statistics, a buffer that is saved and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.a = nn.Conv2d(2, 4, 3), nn.Conv2d(4, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.block = nn.Sequential(nn.Conv2d(4, 4, 1), nn.ReLU())
        self.head = nn.Linear(4, 3)
        self.register_buffer("shift", torch.rand(4, 1, 1))
        self.register_buffer("stretch", torch.rand(4, 1, 1) + 0.5, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.a(torch.relu(self.stem(x)))))
        return self.head(self.block(x * self.stretch + self.shift).amax(dim=(2, 3)))


def made(dtype: torch.dtype = torch.float32) -> Net:
    torch.manual_seed(0)
    return Net().to(dtype)


def outputs(model: nn.Module) -> list[Tensor]:
    found = []
    for bits in BITS:
        with at_bits(model, bits), torch.no_grad():
            found.append(model(IMAGES))
    return found


def same(first: list[Tensor], second: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def trained(model: nn.Module) -> nn.Module:
    JointStep(model, TrainConfig(epochs=1, lr=1e-2), steps_per_epoch=1)(IMAGES, TARGETS)
    return model.eval()


def compiled_inside() -> nn.Module:
    model: Any = made()
    model.block = torch.compile(model.block, backend="eager")
    return model


def test_the_model_inside_a_wrapper_is_prepared(tmp_path: Path) -> None:
    expected = trained(prepare(made(), CONFIG, IMAGES))
    for wrapped in (
        torch.compile(made(), backend="eager"),
        nn.DataParallel(made()).cpu(),  # it goes to a GPU by itself
        AveragedModel(made()),
        torch.compile(nn.DataParallel(made()).cpu(), backend="eager"),
        compiled_inside(),
    ):
        model = prepare(wrapped, CONFIG, IMAGES)
        assert [n for n, m in model.named_modules() if isinstance(m, QuantLayer)] == ["a", "block.0"]
        assert type(model) is Net
        assert same(outputs(trained(model)), outputs(expected))
        save(model, tmp_path / "m")
        for plain in (made(), wrapped):
            assert same(outputs(load(tmp_path / "m", plain)), outputs(expected))


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_what_torch_jit_compiled_is_refused_with_the_way_out(tmp_path: Path) -> None:
    save(prepare(made(), CONFIG, IMAGES), tmp_path / "net.safetensors")
    whole, part = torch.jit.trace(made().eval(), IMAGES), made()
    part.block = torch.jit.script(part.block)
    for model, words in ((whole, "the model is compiled by torch.jit"), (part, "module 'block' is compiled by torch")):
        with pytest.raises(ConfigError, match=f"{words}.*pass the nn.Module that it was made from"):
            prepare(model, CONFIG, IMAGES)
        with pytest.raises(ConfigError, match=words):
            load(tmp_path / "net.safetensors", model)


def test_a_model_in_distributed_data_parallel_too(tmp_path: Path) -> None:
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        model = prepare(nn.parallel.DistributedDataParallel(made()), CONFIG, IMAGES)
    finally:
        torch.distributed.destroy_process_group()
    assert type(model) is Net
    assert same(outputs(model.eval()), outputs(prepare(made(), CONFIG, IMAGES).eval()))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_dtypes_become_float32_and_that_is_said(
    dtype: torch.dtype, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    given = made(dtype)
    before = copy.deepcopy(given.state_dict())
    with caplog.at_level(logging.WARNING, "bitdial"):
        model = prepare(given, CONFIG, IMAGES.to(dtype))
    (said,) = [r.getMessage() for r in caplog.records]
    assert f"the model has tensors in {dtype}" in said
    assert "float32 inputs" in said
    assert {t.dtype for t in (*model.parameters(), *model.buffers()) if t.is_floating_point()} == {torch.float32}
    assert all(torch.equal(value, before[name]) for name, value in given.state_dict().items()), "the original stays"
    expected = outputs(trained(model))
    save(model, tmp_path / "m")
    with caplog.at_level(logging.INFO, "bitdial"):
        assert same(outputs(load(tmp_path / "m", given)), expected)
    assert f"the given model is in {dtype}, the loaded one in float32" in caplog.text
    assert same(outputs(load_trainable(tmp_path / "m", given).eval()), expected)
    assert same(outputs(load(tmp_path / "m", given.float())), expected)
    assert same(
        outputs(load(tmp_path / "m", given.float(), kernels="integer")),
        outputs(load(tmp_path / "m", given, kernels="integer")),
    )


def test_mixed_dtypes_become_float32_wherever_they_are(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A buffer in another dtype would make all that follows so."""
    for part in ("shift", "stretch", "head"):
        given: Any = made()
        setattr(given, part, getattr(given, part).to(torch.float64))
        caplog.clear()
        with caplog.at_level(logging.WARNING, "bitdial"):
            model = prepare(given, CONFIG, IMAGES)
        assert f"torch.float64 ('{part}" in caplog.text
        expected = outputs(trained(model))
        assert {y.dtype for y in expected} == {torch.float32}
        save(model, tmp_path / "m")
        assert same(outputs(load(tmp_path / "m", given)), expected)


def test_hooks_of_parameters_are_said_to_be_lost(caplog: pytest.LogCaptureFixture) -> None:
    model = made()
    prepare(model, CONFIG, IMAGES)
    assert "hooks of parameters" not in caplog.text
    model.a.weight.register_hook(lambda gradient: 0 * gradient)
    model.head.bias.register_post_accumulate_grad_hook(lambda parameter: None)
    ready = prepare(model, CONFIG, IMAGES)
    assert "the hooks of parameters ('a.weight', 'head.bias') are not in the prepared copy" in caplog.text
    before = ready.a.weight.clone()
    trained(ready)
    assert not torch.equal(ready.a.weight, before), "a mask is lost"
