"""Unquantised layers by the fixed-point operators, against their definition in `bitdial.live.engines.exact`.

On a GPU kernels run compiled, in `test_interpreter.py` under Triton's interpreter; elsewhere the same tests see the
operator's reference.
"""

import copy
import math
import os
import struct
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bitdial.kernels.epilogue import Epilogue
from bitdial.live.engines.exact import ExactLayer, ExactNorm, fixed_point_weight, norm_affine, run_exactly
from bitdial.live.engines.integer.convert import to_integer
from bitdial.live.engines.integer.float_layers import serves_float

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = pytest.mark.interpreter


def randn(*shape: int, seed: int) -> Tensor:
    """Values of many magnitudes, also from sample to sample, and a sample of zeros."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 10.0
    x *= torch.logspace(-3, 3, shape[0]).view(-1, *(1,) * (len(shape) - 1))
    x[0] = 0
    return x.to(DEVICE)


def pair(layer: nn.Module) -> tuple[Any, Any]:
    """A float layer by its definition, and on the operator."""
    nn.init.normal_(layer.weight, std=0.3, generator=torch.Generator().manual_seed(0))
    exact = run_exactly(nn.Sequential(layer.requires_grad_(False).to(DEVICE)))
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


@pytest.mark.parametrize("shape", [(5, 33), (2, 3, 33), (33,), (2, 2, 2, 33)])
def test_linear_layers(shape: tuple[int, ...]) -> None:
    exact, made = pair(nn.Linear(33, 10))
    x = randn(*shape, seed=2)
    assert torch.equal(made(x), exact(x))


@pytest.mark.filterwarnings("ignore:invalid value")  # numpy, of what the test is about
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", [*CONVS, "windows without a pixel"])
def test_a_sample_that_is_not_finite_becomes_nan(name: str, bad: float) -> None:
    """All of it, and no other sample."""
    outside = {"in_channels": 3, "out_channels": 5, "kernel_size": 2, "padding": 2}
    exact, made = pair(nn.Conv2d(**CONVS.get(name, outside)))
    x = randn(3, exact.in_channels, 9, 8, seed=11)
    x[1, 0, 4, 4] = bad
    got, expected = made(x), exact(x)
    assert got.isnan().all(dim=(1, 2, 3)).tolist() == [False, True, False]
    assert torch.equal(got[::2], expected[::2])
    assert torch.equal(got.isnan(), expected.isnan())


def test_an_epilogue() -> None:
    exact, made = pair(nn.Conv2d(**CONVS["3x3"]))
    norm = ExactNorm(nn.BatchNorm2d(7).to(DEVICE))
    norm.running_mean.copy_(torch.linspace(-1, 1, 7))
    x, other = randn(3, 5, 6, 6, seed=3), randn(3, 7, 6, 6, seed=4)
    quantizer = torch.tensor([0.37, 11, 0, 255, 128], device=DEVICE)
    value = (norm(exact(x)) + other).clamp(0, 6)
    codes = ((value / quantizer[0]).round() + 11).clamp(0, 255) - 128
    affine = norm_affine(norm).to(DEVICE)
    got = made.run(x, Epilogue(affine, other, 6.0, quantizer))
    assert torch.equal(got[0], value)
    assert torch.equal(got[1], codes.to(torch.int8))


def test_weights_take_half_of_float64_and_follow_what_is_loaded() -> None:
    exact, made = pair(nn.Linear(33, 10))
    assert made.integers.dtype == torch.float32
    assert torch.equal(made.integers[:, 0, 0].double(), fixed_point_weight(exact)[0])
    x = randn(5, 33, seed=2)
    state = {"weight": torch.randn(10, 33), "bias": torch.randn(10)}
    for layer in (exact, made):
        layer.load_state_dict(state)
    assert torch.equal(made(x), exact(x))


@pytest.mark.parametrize("odd", [{"groups": 2}, {"dilation": 2}, {"padding": 1, "padding_mode": "reflect"}])
def test_what_is_left_to_the_definition(odd: dict[str, Any]) -> None:
    exact, made = pair(nn.Conv2d(4, 6, 3, **odd))
    assert not serves_float(exact)
    assert type(made) is ExactLayer


@pytest.mark.parametrize("channels, height, width", [(3, 1, 1), (70, 7, 7), (64, 5, 9), (1, 16, 1), (130, 3, 11)])
def test_means_of_images(channels: int, height: int, width: int) -> None:
    exact = run_exactly(nn.Sequential(nn.AdaptiveAvgPool2d(1)))
    made = copy.deepcopy(exact)
    to_integer(made)
    assert type(made[0]) is not type(exact[0])
    x = randn(4, channels, height, width, seed=7)
    for images in (x, x.contiguous(memory_format=torch.channels_last), x[1], x[:0], x.double()):
        got, expected = made(images), exact(images)
        assert got.shape == expected.shape
        assert torch.equal(got, expected)


@pytest.mark.filterwarnings("ignore:invalid value")  # numpy, of what the test is about
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_means_of_a_sample_that_is_not_finite(bad: float) -> None:
    exact = run_exactly(nn.Sequential(nn.AdaptiveAvgPool2d(1)))
    made = copy.deepcopy(exact)
    to_integer(made)
    x = randn(3, 4, 5, 5, seed=12)
    x[1, 2, 3, 3] = bad
    for got in (made(x), exact(x)):
        assert got.isnan().all(dim=(1, 2, 3)).tolist() == [False, True, False]
    assert torch.equal(made(x)[::2], exact(x)[::2])


def test_a_mean_is_the_rounded_quotient() -> None:
    """As rational numbers have it; a product with 1 / 49 is another float64 in some of these."""
    x = torch.randint(-(2**22), 2**22, (1, 400, 7, 7), generator=torch.Generator().manual_seed(8)).float()
    made = run_exactly(nn.Sequential(nn.AdaptiveAvgPool2d((1, 1))))
    to_integer(made)
    got = made(x.to(DEVICE)).flatten().tolist()
    totals = [int(total) for total in x.double().sum(dim=(2, 3)).flatten().tolist()]
    assert got == [struct.unpack("f", struct.pack("f", float(Fraction(total, 49))))[0] for total in totals]
