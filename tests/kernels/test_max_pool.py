"""Max pools of codes against windows taken one by one.

On a GPU kernels run compiled, in `test_interpreter.py` under Triton's interpreter; elsewhere the same tests see
the operator's reference.
"""

import os
from typing import NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from bitdial.errors import QuantizationError
from bitdial.kernels.max_pool import run_max_pool
from bitdial.kernels.ops import max_pool_codes

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = pytest.mark.interpreter


class Windows(NamedTuple):
    """Rows and columns each, as the operator takes them."""

    kernel: list[int]
    stride: list[int]
    padding: list[int]
    dilation: list[int]


STEM = Windows([3, 3], [2, 2], [1, 1], [1, 1])


def codes(*shape: int, seed: int = 0) -> Tensor:
    x = torch.randint(-128, 128, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.int8)
    return x.contiguous(memory_format=torch.channels_last).to(DEVICE)


def one_by_one(x: np.ndarray, windows: Windows) -> np.ndarray:
    """The largest code of each window, in int64; -128 where no tap meets the image."""
    sizes = [(size + 2 * p - d * (k - 1) - 1) // s + 1 for size, k, s, p, d in zip(x.shape[2:], *windows, strict=True)]
    out = np.full((*x.shape[:2], *sizes), -128, np.int64)
    for row, column in np.ndindex(*sizes):
        taps = [
            [place for t in range(k) if 0 <= (place := at * s - p + t * d) < size]
            for at, size, k, s, p, d in zip((row, column), x.shape[2:], *windows, strict=True)
        ]
        if all(taps):
            out[:, :, row, column] = x[:, :, taps[0]][..., taps[1]].max(axis=(2, 3))
    return out


def check(x: Tensor, windows: Windows) -> None:
    before = x.clone()
    found = max_pool_codes(x, *windows)
    assert found.dtype == torch.int8
    assert found.is_contiguous(memory_format=torch.channels_last)
    assert np.array_equal(found.cpu().numpy(), one_by_one(x.cpu().numpy(), windows))
    assert torch.equal(x, before)


@st.composite
def cases(draw: st.DrawFn) -> tuple[tuple[int, ...], Windows]:
    """A shape (N, C, H, W), and windows that fit its images."""
    kernel, stride, dilation = ([draw(st.integers(1, most)) for _ in range(2)] for most in (4, 3, 3))
    padding = [draw(st.integers(0, k // 2)) for k in kernel]
    least = [max(1, d * (k - 1) + 1 - 2 * p) for k, p, d in zip(kernel, padding, dilation, strict=True)]
    sizes = [draw(st.integers(low, low + 6)) for low in least]
    images, channels = draw(st.integers(1, 3)), draw(st.sampled_from([1, 3, 16, 37, 64, 130]))
    return (images, channels, *sizes), Windows(kernel, stride, padding, dilation)


@settings(max_examples=30 if INTERPRETED else 150, deadline=None)
@given(cases(), st.integers(0, 2**31))
@example(((2, 64, 12, 11), STEM), 0)
@example(((3, 130, 7, 9), Windows([2, 3], [1, 2], [0, 1], [1, 1])), 0)  # more than a tile of pixels, and of channels
@example(((1, 3, 1, 1), Windows([2, 2], [1, 1], [1, 1], [2, 2])), 0)  # no tap meets the image
def test_any_windows(case: tuple[tuple[int, ...], Windows], seed: int) -> None:
    shape, windows = case
    check(codes(*shape, seed=seed), windows)


def test_codes_of_the_largest_value() -> None:
    """As PyTorch pools values: its padding never wins, and nor does this one's."""
    x = torch.full((1, 16, 5, 5), -128, dtype=torch.int8, device=DEVICE)
    x[:, :, 2, 2] = -127
    pooled = F.max_pool2d(x.float().cpu(), *STEM)
    assert torch.equal(max_pool_codes(x, *STEM).cpu().float(), pooled)


def test_any_memory_layout() -> None:
    x = codes(2, 20, 6, 7)
    wide = torch.zeros(2, 20, 6, 14, dtype=torch.int8, device=DEVICE)
    wide[..., ::2] = x
    for arranged in (x.contiguous(), x.transpose(2, 3).contiguous().transpose(2, 3), wide[..., ::2]):
        check(arranged, STEM)


def test_one_image_and_no_images() -> None:
    x = codes(2, 5, 6, 7)
    assert torch.equal(run_max_pool(x, *STEM), max_pool_codes(x, *STEM))
    assert torch.equal(run_max_pool(x[1], *STEM), max_pool_codes(x, *STEM)[1])
    assert run_max_pool(x[:0], *STEM).shape == (0, 5, 3, 4)


def test_what_is_no_image_or_too_small() -> None:
    with pytest.raises(QuantizationError, match=r"its input is \(4, 5\), expected images"):
        run_max_pool(torch.zeros(4, 5, dtype=torch.int8, device=DEVICE), *STEM)
    with pytest.raises(QuantizationError, match=r"its input \(1, 3, 4, 2\) is smaller than its window \(3, 3\)"):
        run_max_pool(codes(1, 3, 4, 2), *STEM._replace(padding=[0, 0]))


@pytest.mark.interpreter(only=True)
@pytest.mark.parametrize(
    "shape, windows", [((1, 3, 8, 8), STEM), ((1, 3, 2, 2), Windows([2, 2], [1, 1], [1, 1], [1, 1]))]
)
def test_what_32_bits_cannot_index_falls_back(
    shape: tuple[int, ...], windows: Windows, monkeypatch: pytest.MonkeyPatch
) -> None:
    from bitdial.kernels.triton import ops as triton_ops
    from bitdial.kernels.triton.inference import max_pool as triton_pool

    def launched(*args: object) -> Tensor:
        raise AssertionError("the kernel was launched")

    x = codes(*shape)
    monkeypatch.setattr(triton_pool, "max_pool", launched)
    with pytest.raises(AssertionError, match="was launched"):
        check(x, windows)
    monkeypatch.setattr(triton_ops, "INDEXABLE", max(x.numel(), one_by_one(x.cpu().numpy(), windows).size))
    check(x, windows)


@pytest.mark.skipif(INTERPRETED, reason="the interpreter does not know fake tensors")
@pytest.mark.parametrize(
    "windows", [STEM, Windows([1, 1], [1, 1], [0, 0], [1, 1]), Windows([1, 2], [1, 3], [0, 1], [2, 1])]
)
def test_opcheck(windows: Windows) -> None:
    torch.library.opcheck(max_pool_codes, (codes(2, 5, 6, 7), *windows))
    torch.library.opcheck(max_pool_codes, (codes(2, 5, 6, 7).contiguous(), *windows))
