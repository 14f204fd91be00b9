"""Layers kept in float, by the fixed-point operator, against their definition in `bitdial.live.engines.exact`.

On a GPU kernels run compiled, in `test_interpreter.py` under Triton's interpreter; elsewhere the same tests see
the operator's reference.
"""

import copy
import importlib.util
import math
import os
import struct
from fractions import Fraction
from typing import Any

import pytest
import torch
from bitdial.kernels.fixed_point_ops import fixed_point_conv2d, fixed_point_mean, sample_powers
from torch import Tensor, nn

from bitdial.functional.fixed_point import fixed_point_powers
from bitdial.kernels import fixed_point_ops as fixed_point
from bitdial.live.engines.exact import ExactAdaptiveAvgPool2d, ExactBatchNorm, ExactConv2d, ExactLinear, norm_lines
from bitdial.live.engines.integer.float_layers import serves_float
from bitdial.live.engines.integer.layers import to_integer

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


@pytest.mark.interpreter(only=True)
@pytest.mark.parametrize("processors", [1, 2, 132])
@pytest.mark.parametrize(
    ("layer", "pixels"),
    [(nn.Conv2d(3, 40, 7, 2, 3), (128, 64, 32)), (nn.Conv2d(1, 6, 3), (128, 128, 32)), (nn.Linear(300, 20), (16,) * 3)],
    ids=str,
)
def test_tiles_for_many_pixels_for_few_and_for_many_terms(
    layer: nn.Module, pixels: tuple[int, ...], processors: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from bitdial.kernels.triton.inference import fixed_point as triton_fixed_point

    sizes, chosen = [], triton_fixed_point.default_tiles
    monkeypatch.setattr(triton_fixed_point, "PROCESSORS", processors)
    monkeypatch.setattr(
        triton_fixed_point, "default_tiles", lambda *given: sizes.append(chosen(*given).pixels) or chosen(*given)
    )
    exact, made = pair(copy.deepcopy(layer))
    x = randn(19, 300, seed=9) if isinstance(layer, nn.Linear) else randn(4, exact.in_channels, 25, 24, seed=9)
    assert torch.equal(made(x), exact(x))
    assert sizes == [dict(zip((1, 2, 132), pixels, strict=True))[processors]]


@pytest.mark.interpreter(only=True)
@pytest.mark.parametrize(("largest", "launches"), [(14 * 15 * 3, 1), (14 * 15 * 3 - 1, 0)])
def test_samples_of_more_blocks_than_a_gpu_takes_fall_back(
    largest: int, launches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from bitdial.kernels.triton.inference import fixed_point as triton_fixed_point

    calls, convolve = [], triton_fixed_point.convolve
    monkeypatch.setattr(
        triton_fixed_point, "convolve", lambda *given, **more: calls.append(1) or convolve(*given, **more)
    )
    monkeypatch.setattr(fixed_point, "LARGEST_SAMPLE", largest)
    exact, made = pair(nn.Conv2d(**CONVS["stem"]))
    x = randn(3, 3, 9, 8, seed=1)  # 15 x 14 with zeros around
    assert torch.equal(made(x), exact(x))
    assert len(calls) == launches


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


def bits_of(powers: Tensor) -> list[list[int]]:
    """Float64 numbers as their bit patterns."""
    return powers.view(torch.int64).reshape(2, -1).tolist()


HUGE = torch.finfo(torch.float32).max
LARGEST = [0.0, 2.0**-149, 1e-40, -(2.0**-126), 0.99999994, 1.0, -1.0000001, 255.0, -HUGE, math.inf, math.nan]


@pytest.mark.parametrize("size", [1, 15, 4096, 4097, 9000])
@pytest.mark.parametrize("bits", [1, 22, 52])
def test_powers_of_samples(size: int, bits: int) -> None:
    """Whatever is largest, wherever it stands, in one part of a sample or in several."""
    x = torch.zeros(len(LARGEST), size)
    for row, largest in enumerate(LARGEST):
        x[row, row * 37 % size] = largest
        x[row, -1 - row % size] += largest / 3
    x = x.to(DEVICE)
    assert bits_of(sample_powers(x, bits)) == bits_of(torch.stack(fixed_point_powers(x, bits, by_sample=True)))


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.parametrize("most", [1, 3, 16])
def test_parts_of_several_blocks(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from bitdial.kernels.triton.inference import sample_scales as triton_powers

    monkeypatch.setattr(triton_powers, "BLOCK", 64)
    monkeypatch.setattr(triton_powers, "MOST_PARTS", most)
    for place in (0, 63, 64, 700, 999):
        x = torch.linspace(-1.0, 1.0, 1000).repeat(2, 1)
        x[1, place] = 1e3
        x = x.to(DEVICE)
        assert bits_of(sample_powers(x, 20)) == bits_of(torch.stack(fixed_point_powers(x, 20, by_sample=True)))


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_powers_of_images_in_any_layout(layout: torch.memory_format) -> None:
    x = randn(5, 3, 9, 8, seed=6).contiguous(memory_format=layout)
    for images in (x, x[:, :, 1:, ::2], x[:0]):
        expected = torch.stack(fixed_point_powers(images, 20, by_sample=True))
        assert bits_of(sample_powers(images, 20)) == bits_of(expected)


@pytest.mark.parametrize("channels, height, width", [(3, 1, 1), (70, 7, 7), (64, 5, 9), (1, 16, 1), (130, 3, 11)])
def test_means_of_images(channels: int, height: int, width: int) -> None:
    exact = nn.Sequential(ExactAdaptiveAvgPool2d(1))
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
    exact = nn.Sequential(ExactAdaptiveAvgPool2d(1))
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
    made = nn.Sequential(ExactAdaptiveAvgPool2d((1, 1)))
    to_integer(made)
    got = made(x.to(DEVICE)).flatten().tolist()
    totals = [int(total) for total in x.double().sum(dim=(2, 3)).flatten().tolist()]
    assert got == [struct.unpack("f", struct.pack("f", float(Fraction(total, 49))))[0] for total in totals]


@pytest.mark.skipif(INTERPRETED, reason="the interpreter does not know fake tensors")
def test_opcheck_of_powers_and_means() -> None:
    x = torch.randn(2, 3, 6, 6, device=DEVICE)
    torch.library.opcheck(sample_powers, (x, 20))
    torch.library.opcheck(fixed_point_mean, (x, sample_powers(x, 20)))


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
