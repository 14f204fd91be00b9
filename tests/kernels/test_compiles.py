"""Every kernel that a training step launches compiles for a GPU, seen on a machine without one.

The interpreter runs kernels by their values and does not know their types: what it accepts need not compile.
"""

import importlib.util
import os
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bitdial import QuantConfig, build_model, prepare
from bitdial.kernels import fake_quantize as quantize
from bitdial.kernels import training as fused
from bitdial.train import JointStep, TrainConfig
from bitdial.train.gpu.fuse import FastModel

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="here they are compiled to be run"),
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing"),
]

POINTERS = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.int64: "*i64"}


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The names of the kernels compiled so far: a launch compiles for an H200, and leaves outputs as they are."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.runtime.jit import JITFunction

    names: set[str] = set()
    done: set[Any] = set()

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **settings: Any) -> None:
        given = dict(zip(self.arg_names, args, strict=False)) | settings
        options = {name: value for name, value in settings.items() if name not in self.arg_names}
        constants = {(p.num,): given[p.name] for p in self.params if p.is_constexpr}
        types = {p.name: "constexpr" if p.is_constexpr else type_of(given[p.name]) for p in self.params}
        key = (self.__name__, *types.items(), *constants.items(), *options.items())
        if key not in done:
            triton.compile(ASTSource(self, types, constants), target=GPUTarget("cuda", 90, 32), options=options)
            done.add(key)
            names.add(self.__name__)

    monkeypatch.setattr(JITFunction, "run", compile_only)
    return names


def type_of(value: object) -> str:
    if isinstance(value, Tensor):
        return POINTERS[value.dtype]
    return "fp32" if isinstance(value, float) else "i32"


class Net(nn.Module):
    """Convolutions with and without kernels of their own, norms with and without what can follow, a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.stem_norm = nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)
        self.block = build_model("cifar_resnet", blocks=1, width=16).layer1  # type: ignore[union-attr]
        self.depthwise, self.norm = nn.Conv2d(16, 16, 3, groups=16, bias=False), nn.BatchNorm2d(16)
        self.grouped, self.bare = nn.Conv2d(16, 16, 3, groups=2), nn.BatchNorm2d(16)
        self.hidden, self.head = nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.block(torch.relu(self.stem_norm(self.stem(x))))
        x = self.bare(self.grouped(torch.relu(self.norm(self.depthwise(x)))))
        return self.head(self.hidden(x.mean(dim=(2, 3))))


@pytest.mark.parametrize("sampling", ["none", "random"])
@pytest.mark.parametrize("activations", ["auto", "asymmetric", "float"])
def test_a_step_compiles(compiled: set[str], sampling: str, activations: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    model = prepare(Net(), QuantConfig(bit_choices=(4, 2), activations=activations), x)
    config = TrainConfig(epochs=1, sampling=sampling, autocast="bfloat16")
    step = JointStep(model, config, steps_per_epoch=1, loss=lambda output, _: output.sum() * 0.0)
    step.fast = FastModel(model, fused=True)
    step.seats = step._take_seats() if sampling == "random" else None
    assert (step.seats is not None) == (sampling == "random" and activations != "asymmetric")
    for module in (quantize, fused):
        monkeypatch.setattr(module, "use_triton", lambda tensor: True)
    monkeypatch.setattr(
        sys.modules[JointStep.__module__], "check_loss", lambda *args, **settings: None
    )  # outputs hold anything
    monkeypatch.setattr(step.guard, "check", lambda **settings: None)
    step(x, torch.zeros(2, dtype=torch.long))
    assert {
        "_apply",
        "_backward_sums",
        "_join_sums",
        "_backward_apply",
        "_weight_forward",
        "_weight_backward",
    } <= compiled
    assert activations == "float" or {"_act_forward", "_act_backward"} <= compiled
