"""Layers kept in float, by the fixed-point operator, against their definition in `bitdial.exact`.

On a GPU the kernel runs compiled. Elsewhere this file runs itself once more in a process with Triton's interpreter;
without it, the same tests see the operator's reference.
"""

import copy
import importlib.util
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bitdial.exact import ExactBatchNorm, ExactConv2d, ExactLinear, norm_lines
from bitdial.integer.float_layers import serves_float
from bitdial.integer.layers import to_integer
from bitdial.kernels import fixed_point
from bitdial.kernels.fixed_point import fixed_point_conv2d

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.skipif(INTERPRETED or DEVICE == "cuda", reason="already runs here")
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_all_of_this_under_the_interpreter(run_under_the_interpreter: Callable[[str], None]) -> None:
    run_under_the_interpreter(__file__)


def randn(*shape: int, seed: int) -> Tensor:
    """Values of many magnitudes, also from sample to sample, and a sample of zeros."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 10.0
    x *= torch.logspace(-3, 3, shape[0]).view(-1, *(1,) * (len(shape) - 1))
    x[0] = 0
    return x.to(DEVICE)


def pair(layer: nn.Module) -> tuple[Any, Any]:
    """A float layer by its definition, and on the operator."""
    nn.init.normal_(layer.weight, std=0.3, generator=torch.Generator().manual_seed(0))
    layer.__class__ = ExactConv2d if isinstance(layer, nn.Conv2d) else ExactLinear
    exact = nn.Sequential(layer.requires_grad_(False).to(DEVICE))
    made = copy.deepcopy(exact)
    to_integer(made)
    return exact[0], made[0]


CONVS = {
    "stem": {"in_channels": 3, "out_channels": 20, "kernel_size": 7, "stride": 2, "padding": 3, "bias": False},
    "3x3": {"in_channels": 5, "out_channels": 7, "kernel_size": 3, "padding": 1},
    "1x1": {"in_channels": 40, "out_channels": 6, "kernel_size": 1, "stride": 2},
    "oblong": {"in_channels": 4, "out_channels": 6, "kernel_size": (1, 3), "stride": (2, 1), "padding": (0, 2)},
}


@pytest.mark.parametrize("name", CONVS)
def test_convolutions(name: str) -> None:
    exact, made = pair(nn.Conv2d(**CONVS[name]))
    x = randn(3, exact.in_channels, 9, 8, seed=1)
    assert type(made) is not type(exact)
    for images in (x, x.contiguous(memory_format=torch.channels_last), x[1], x[:0]):
        assert torch.equal(made(images), exact(images))


@pytest.mark.skipif(INTERPRETED or DEVICE == "cuda", reason="kernels have no chunks")
@pytest.mark.parametrize("numbers", [1, 5 * 4 * 147 * 2, 5 * 4 * 147 * 3, 1 << 18], ids=str)
def test_chunks_of_lines_and_of_samples(numbers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One line of windows at a time; as many lines or samples as fit, and what is left over; all at once."""
    monkeypatch.setattr(fixed_point, "CHUNK_NUMBERS", numbers)
    exact, made = pair(nn.Conv2d(**CONVS["stem"]))
    for height in (9, 25):  # 5 and 13 lines
        x = randn(4, 3, height, 8, seed=5)
        assert torch.equal(made(x), exact(x))


@pytest.mark.parametrize("shape", [(5, 33), (2, 3, 33), (33,), (2, 2, 2, 33)])
def test_linear_layers(shape: tuple[int, ...]) -> None:
    exact, made = pair(nn.Linear(33, 10))
    x = randn(*shape, seed=2)
    assert torch.equal(made(x), exact(x))


def test_what_follows() -> None:
    exact, made = pair(nn.Conv2d(**CONVS["3x3"]))
    norm = ExactBatchNorm(7).to(DEVICE)
    norm.running_mean.copy_(torch.linspace(-1, 1, 7))
    x, other = randn(3, 5, 6, 6, seed=3), randn(3, 7, 6, 6, seed=4)
    quantizer = torch.tensor([0.37, 11, 0, 255, 128], device=DEVICE)
    value = (norm(exact(x)) + other).clamp(0, 6)
    codes = ((value / quantizer[0]).round() + 11).clamp(0, 255) - 128
    lines = norm_lines(norm).to(DEVICE)
    got = made.run(x, norm=lines, other=other, cap=6.0, first=quantizer, second=None, keep=True)
    assert torch.equal(got[0], value)
    assert torch.equal(got[1], codes.to(torch.int8))


@pytest.mark.parametrize("odd", [{"groups": 2}, {"dilation": 2}, {"padding": 1, "padding_mode": "reflect"}])
def test_what_is_left_to_the_definition(odd: dict[str, Any]) -> None:
    exact, made = pair(nn.Conv2d(4, 6, 3, **odd))
    assert not serves_float(exact)
    assert type(made) is ExactConv2d


@pytest.mark.skipif(INTERPRETED, reason="the interpreter does not know fake tensors")
def test_opcheck() -> None:
    x, weight = torch.randn(2, 3, 6, 6, device=DEVICE), torch.randint(-99, 99, (4, 3, 3, 3), device=DEVICE).double()
    powers = torch.tensor([[2.0, 4.0], [0.5, 0.25]], dtype=torch.float64, device=DEVICE)
    one, quantizer = (
        torch.ones(1, dtype=torch.float64, device=DEVICE),
        torch.tensor([1.0, 0, 0, 255, 128], device=DEVICE),
    )
    arguments = (x, weight, powers, one, None, None, None, quantizer, None, [1, 1], [1, 1], 6.0, True)
    torch.library.opcheck(fixed_point_conv2d, arguments)
