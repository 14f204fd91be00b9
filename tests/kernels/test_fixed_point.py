"""The fixed-point operators against whole numbers: Python's integers and fractions, and int64 sums of numpy.

On a GPU kernels run compiled, in `test_interpreter.py` under Triton's interpreter; elsewhere the same tests see the
reference.
"""

import math
import os
import struct
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from bitdial.functional.fixed_point import fixed_point_powers
from bitdial.kernels.conv_shape import ConvShape, conv_shape
from bitdial.kernels.epilogue import Epilogue
from bitdial.kernels.fixed_point import run_fixed_point_conv2d, run_mean, run_sample_scales
from bitdial.kernels.operands import FixedPointOperands
from bitdial.kernels.ops import fixed_point_conv2d, fixed_point_mean, sample_powers
from bitdial.kernels.reference import fixed_point as reference

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BITS = 22  # of the integers of x
pytestmark = pytest.mark.interpreter

SHAPES = {  # images, (channels, height, width), (output channels, rows, columns), stride, padding
    "stem": (3, (3, 9, 8), (20, 7, 7), (2, 2), (3, 3)),
    "3x3": (2, (5, 6, 7), (7, 3, 3), (1, 1), (1, 1)),
    "1x1": (2, (40, 5, 5), (6, 1, 1), (2, 2), (0, 0)),
    "oblong": (2, (4, 6, 5), (6, 1, 3), (2, 1), (0, 2)),
    "linear": (7, (33, 1, 1), (10, 1, 1), (1, 1), (0, 0)),
    "windows without a pixel": (2, (3, 5, 5), (5, 2, 2), (1, 1), (2, 2)),
}


def images(count: int, *image: int, seed: int) -> Tensor:
    """Values of many magnitudes, also from sample to sample, and a sample of zeros."""
    x = torch.randn((count, *image), generator=torch.Generator().manual_seed(seed)) * 10.0
    x *= torch.logspace(-3, 3, count).view(-1, *(1,) * len(image))
    x[0] = 0
    return x.to(DEVICE)


def whole_weight(shape: ConvShape) -> Tensor:
    size = (shape.out_channels, shape.rows, shape.columns, shape.channels)
    numbers = torch.randint(-(2**20), 2**20, size, generator=torch.Generator().manual_seed(2))
    return numbers.double().to(DEVICE)


def operands_for(x: Tensor, shape: ConvShape, *, bias: bool = False) -> FixedPointOperands:
    power = torch.tensor([2.0**-23], dtype=torch.float64, device=DEVICE)
    numbers = torch.randn(shape.out_channels, generator=torch.Generator().manual_seed(3)).to(DEVICE) if bias else None
    return FixedPointOperands(whole_weight(shape), run_sample_scales(x, BITS), power, numbers)


def expected(x: Tensor, shape: ConvShape, operands: FixedPointOperands) -> np.ndarray:
    """Integer sums, tap by tap, times the powers of two, rounded to float32 once; then the bias."""
    values = x.cpu().numpy().astype(np.float64)
    powers = np.array([sample_power(sample) for sample in values]).reshape(-1, 1, 1, 1)
    whole = np.rint(values / powers).astype(np.int64)
    whole = np.pad(whole, ((0, 0), (0, 0), (shape.padding[0],) * 2, (shape.padding[1],) * 2))
    weight = operands.weight.cpu().numpy().astype(np.int64)
    sums = np.zeros(shape.output(len(values)), np.int64)
    for r in range(shape.rows):
        for s in range(shape.columns):
            part = whole[:, :, r:, s:][:, :, :: shape.stride[0], :: shape.stride[1]]
            part = part[:, :, : shape.out_height, : shape.out_width]
            sums += np.einsum("nchw,kc->nkhw", part, weight[:, r, s])
    assert np.abs(sums).max() < 2**53
    y = (sums.astype(np.float64) * powers * 2.0**-23).astype(np.float32)
    return y if operands.bias is None else y + operands.bias.cpu().numpy()[:, None, None]


def sample_power(sample: np.ndarray) -> float:
    """The smallest power of two that takes the sample to integers of BITS bits; that of 1 for zeros."""
    largest = float(np.abs(sample).max())
    return 2.0 ** ((math.frexp(largest)[1] if largest else 0) - BITS)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", SHAPES)
def test_convolutions(name: str, bias: bool) -> None:
    count, image, filters, stride, padding = SHAPES[name]
    shape = ConvShape.of(image, filters, stride, padding)
    x = images(count, *image, seed=1)
    operands = operands_for(x, shape, bias=bias)
    for arranged in (
        x,
        x.contiguous(memory_format=torch.channels_last),
        x.transpose(2, 3).contiguous().transpose(2, 3),
    ):
        value, codes_a, codes_b = run_fixed_point_conv2d(arranged, operands, shape, Epilogue())
        assert np.array_equal(value.cpu().numpy(), expected(x, shape, operands))
        assert value.is_contiguous(memory_format=torch.channels_last)
        assert codes_a.numel() == codes_b.numel() == 0
    none = operands._replace(sample_scales=operands.sample_scales[:, :0])
    assert run_fixed_point_conv2d(x[:0], none, shape, Epilogue())[0].shape == (0, *value.shape[1:])


def test_an_epilogue() -> None:
    count, image, filters, stride, padding = SHAPES["3x3"]
    shape = ConvShape.of(image, filters, stride, padding)
    x = images(count, *image, seed=3)
    operands = operands_for(x, shape)
    norm, residual = (torch.randn(size, generator=torch.Generator().manual_seed(4)) for size in ((2, 7), (2, 7, 6, 7)))
    numbers = torch.tensor([0.37, 11, 0, 255, 128])
    y = expected(x, shape, operands) * norm[0].numpy()[:, None, None] + norm[1].numpy()[:, None, None]
    y = np.clip(y + residual.numpy(), np.float32(0), np.float32(6))
    codes = np.clip(np.rint(y / np.float32(0.37)) + 11, 0, 255) - 128
    for keep in (True, False):
        epilogue = Epilogue(norm.to(DEVICE), residual.to(DEVICE), 6.0, numbers.to(DEVICE), None, keep)
        value, codes_a, _ = run_fixed_point_conv2d(x, operands, shape, epilogue)
        assert np.array_equal(value.cpu().numpy(), y) if keep else value.numel() == 0
        assert np.array_equal(codes_a.cpu().numpy(), codes)


@pytest.mark.skipif(INTERPRETED or DEVICE == "cuda", reason="kernels have no chunks")
def test_chunks_of_lines_and_of_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """One line of windows at a time; as many lines or samples as fit, and what is left over; all at once."""
    for numbers in (1, 5 * 4 * 147 * 2, 5 * 4 * 147 * 3, 1 << 18):
        monkeypatch.setattr(reference, "CHUNK_NUMBERS", numbers)
        for height in (9, 25):  # 5 and 13 lines
            shape = ConvShape.of((3, height, 8), (20, 7, 7), (2, 2), (3, 3))
            x = images(4, 3, height, 8, seed=5)
            operands = operands_for(x, shape)
            found = run_fixed_point_conv2d(x, operands, shape, Epilogue())[0]
            assert np.array_equal(found.numpy(), expected(x, shape, operands)), (numbers, height)


@pytest.mark.interpreter(only=True)
@pytest.mark.parametrize("processors", [1, 2, 132])
@pytest.mark.parametrize(
    ("count", "image", "filters", "stride", "padding", "pixels"),
    [
        (4, (3, 25, 24), (40, 7, 7), (2, 2), (3, 3), (128, 64, 32)),
        (4, (1, 25, 24), (6, 3, 3), (1, 1), (0, 0), (128, 128, 32)),
        (19, (300, 1, 1), (20, 1, 1), (1, 1), (0, 0), (16, 16, 16)),
    ],
    ids=["many outputs", "few terms", "many terms"],
)
def test_tiles_for_many_pixels_for_few_and_for_many_terms(
    count: int, image: Any, filters: Any, stride: Any, padding: Any, pixels: Any, processors: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    from bitdial.kernels.triton.inference import fixed_point as kernels

    sizes, chosen = [], kernels.default_tiles
    monkeypatch.setattr(kernels, "PROCESSORS", processors)
    monkeypatch.setattr(kernels, "default_tiles", lambda *given: sizes.append(chosen(*given).pixels) or chosen(*given))
    shape, x = ConvShape.of(image, filters, stride, padding), images(count, *image, seed=9)
    operands = operands_for(x, shape)
    found = run_fixed_point_conv2d(x, operands, shape, Epilogue())[0]
    assert np.array_equal(found.cpu().numpy(), expected(x, shape, operands))
    assert sizes == [dict(zip((1, 2, 132), pixels, strict=True))[processors]]


@pytest.mark.interpreter(only=True)
@pytest.mark.parametrize(("largest", "launches"), [(14 * 15 * 3, 1), (14 * 15 * 3 - 1, 0)])
def test_samples_of_more_blocks_than_a_gpu_takes_fall_back(
    largest: int, launches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from bitdial.kernels.triton import ops as triton_ops
    from bitdial.kernels.triton.inference import fixed_point as kernels

    calls, convolve = [], kernels.convolve
    monkeypatch.setattr(kernels, "convolve", lambda *given, **more: calls.append(1) or convolve(*given, **more))
    monkeypatch.setattr(triton_ops, "LARGEST_SAMPLE", largest)
    shape, x = ConvShape.of((3, 9, 8), (20, 7, 7), (2, 2), (3, 3)), images(3, 3, 9, 8, seed=1)  # 15 x 14 with zeros
    operands = operands_for(x, shape)
    found = run_fixed_point_conv2d(x, operands, shape, Epilogue())[0]
    assert np.array_equal(found.cpu().numpy(), expected(x, shape, operands))
    assert len(calls) == launches


@pytest.mark.filterwarnings("ignore:invalid value")  # numpy, of what the test is about
@pytest.mark.parametrize("name", SHAPES)
def test_a_sample_that_is_not_finite_becomes_nan(name: str) -> None:
    """All of it, and no other sample."""
    _, image, filters, stride, padding = SHAPES[name]
    shape = ConvShape.of(image, filters, stride, padding)
    for bad in (math.nan, math.inf, -math.inf):
        x = images(3, *image, seed=11)
        good = run_fixed_point_conv2d(x, operands_for(x, shape), shape, Epilogue())[0]
        x[1, 0, -1, -1] = bad
        found = run_fixed_point_conv2d(x, operands_for(x, shape), shape, Epilogue())[0]
        assert found.flatten(1).isnan().all(dim=1).tolist() == [False, True, False]
        assert torch.equal(found[::2], good[::2])


# --- the power of two of each sample ----------------------------------------------------------------


def bits_of(powers: Tensor) -> list[list[int]]:
    """Float64 numbers as their bit patterns."""
    return powers.view(torch.int64).reshape(2, -1).tolist()


HUGE = torch.finfo(torch.float32).max
LARGEST = [0.0, 2.0**-149, 1e-40, -(2.0**-126), 0.99999994, 1.0, -1.0000001, 255.0, -HUGE, math.inf, math.nan]


@pytest.mark.parametrize("size", [1, 15, 4096, 4097, 9000])
@pytest.mark.parametrize("bits", [1, 22, 52])
def test_scales_of_samples(size: int, bits: int) -> None:
    """Whatever is largest, wherever it stands, in one part of a sample or in several."""
    x = torch.zeros(len(LARGEST), size)
    for row, largest in enumerate(LARGEST):
        x[row, row * 37 % size] = largest
        x[row, -1 - row % size] += largest / 3
    found = run_sample_scales(x.to(DEVICE), bits).cpu()
    assert bits_of(found) == bits_of(torch.stack(fixed_point_powers(x, bits, by_sample=True)))
    for sample, (inverse, power) in zip(x.tolist(), found.t().tolist(), strict=True):
        largest = max(map(abs, sample))
        if 0 < largest < math.inf and not any(map(math.isnan, sample)):
            assert power * inverse == 1
            assert 2 ** (bits - 1) <= Fraction(largest) / Fraction(power) < 2**bits


@pytest.mark.interpreter(only=True)
@pytest.mark.parametrize("most", [1, 3, 16])
def test_parts_of_several_blocks(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from bitdial.kernels.triton.inference import sample_scales as kernels

    monkeypatch.setattr(kernels, "BLOCK", 64)
    monkeypatch.setattr(kernels, "MOST_PARTS", most)
    for place in (0, 63, 64, 700, 999):
        x = torch.linspace(-1.0, 1.0, 1000).repeat(2, 1)
        x[1, place] = 1e3
        found = run_sample_scales(x.to(DEVICE), 20).cpu()
        assert bits_of(found) == bits_of(torch.stack(fixed_point_powers(x, 20, by_sample=True)))


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_scales_of_images_in_any_layout(layout: torch.memory_format) -> None:
    x = images(5, 3, 9, 8, seed=6).contiguous(memory_format=layout)
    for some in (x, x[:, :, 1:, ::2], x[:0]):
        expected_scales = torch.stack(fixed_point_powers(some, 20, by_sample=True))
        assert bits_of(run_sample_scales(some, 20)) == bits_of(expected_scales)


# --- means ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("channels, height, width", [(3, 1, 1), (70, 7, 7), (64, 5, 9), (1, 16, 1), (130, 3, 11)])
def test_means_of_images(channels: int, height: int, width: int) -> None:
    """As rational numbers have it; in some, a product with 1 / 49 is another float64."""
    x = images(4, channels, height, width, seed=7)
    wanted = []
    for sample in x.cpu().numpy().astype(np.float64):
        power = sample_power(sample)
        totals = np.rint(sample / power).astype(np.int64).sum(axis=(1, 2)).tolist()
        quotients = [float(Fraction(total, height * width)) * power for total in totals]
        wanted.append([struct.unpack("f", struct.pack("f", q))[0] for q in quotients])
    for arranged in (x, x.contiguous(memory_format=torch.channels_last)):
        found = run_mean(arranged, BITS)
        assert found.shape == (4, channels, 1, 1)
        assert found.flatten(1).tolist() == wanted
    assert run_mean(x[:0], BITS).shape == (0, channels, 1, 1)


@pytest.mark.filterwarnings("ignore:invalid value")  # numpy, of what the test is about
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_means_of_a_sample_that_is_not_finite(bad: float) -> None:
    x = images(3, 4, 5, 5, seed=12)
    good = run_mean(x, BITS)
    x[1, 2, 3, 3] = bad
    found = run_mean(x, BITS)
    assert found.isnan().all(dim=(1, 2, 3)).tolist() == [False, True, False]
    assert torch.equal(found[::2], good[::2])


# --- as operators -----------------------------------------------------------------------------------


@pytest.mark.skipif(INTERPRETED, reason="the interpreter does not know fake tensors")
def test_opcheck() -> None:
    x = torch.randn(2, 3, 6, 6, device=DEVICE)
    torch.library.opcheck(sample_powers, (x, 20))
    torch.library.opcheck(fixed_point_mean, (x, sample_powers(x, 20)))
    weight = torch.randint(-99, 99, (4, 3, 3, 3), device=DEVICE).double()
    one, numbers = torch.ones(1, dtype=torch.float64, device=DEVICE), torch.tensor([1.0, 0, 0, 255, 128], device=DEVICE)
    operands = FixedPointOperands(weight, sample_powers(x, 20), one, None)
    shape, epilogue = conv_shape(x, weight, (1, 1), (1, 1)), Epilogue(relu_max=6.0, quantizer_a=numbers)
    torch.library.opcheck(fixed_point_conv2d, (x, *operands, shape.stride, shape.padding, *epilogue))
