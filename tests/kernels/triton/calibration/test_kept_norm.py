"""Norms by kept statistics: the kernels against PyTorch in float64.

On a GPU they run compiled, elsewhere under Triton's interpreter; see `test_interpreter.py`.
"""

import copy
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bitdial.kernels.kept_norm import can_normalize, normalize

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SLACK = 1e-6 if DEVICE == "cuda" else 2e-5  # the interpreter adds numbers up one after the other
SHAPES = [(3, 5, 7, 9), (2, 70, 4, 4), (4, 6), (2, 3, 50), (1, 2, 67, 64)]


def some_norm(x: Tensor) -> Any:
    """A norm in eval mode with unequal numbers for each channel of `x`."""
    generator = torch.Generator().manual_seed(2)
    norm: Any = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d}[x.dim()](x.shape[1])
    for part in (norm.weight.data, norm.bias.data, norm.running_mean):
        part.copy_(torch.randn(part.shape, generator=generator) * 2)
    norm.running_var.copy_(torch.rand(x.shape[1], generator=generator) + 0.1)
    return norm.eval()


def reference(x: Tensor, norm: Any, relu_max: float | None) -> Tensor:
    found = norm(x)
    return found if relu_max is None else torch.relu(found) if relu_max == math.inf else F.hardtanh(found, 0, relu_max)


def results(call: Any, x: Tensor, norm: Any, relu_max: float | None) -> list[Tensor]:
    """The value and the gradients of x, weight and bias."""
    leaf = x.detach().clone().requires_grad_()
    out = call(leaf, norm, relu_max)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(9)).to(out)
    out.backward(grad)
    assert leaf.grad is not None
    return [t.detach().double().cpu() for t in (out, leaf.grad, norm.weight.grad, norm.bias.grad)]


@pytest.mark.interpreter(only=True)
@pytest.mark.parametrize("relu_max", [None, math.inf, 6.0])
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values_and_gradients(shape: tuple[int, ...], channels_last: bool, relu_max: float | None) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 3
    if channels_last and x.dim() == 4:
        x = x.contiguous(memory_format=torch.channels_last)
    norm = some_norm(x)
    exact = results(reference, x.double(), copy.deepcopy(norm).double(), relu_max)
    theirs = results(reference, x, copy.deepcopy(norm), relu_max)
    assert can_normalize(norm.to(DEVICE), x.to(DEVICE))
    found = results(normalize, x.to(DEVICE), norm, relu_max)
    for place, (got, wanted, other) in enumerate(zip(found, exact, theirs, strict=True)):
        size = float(wanted.abs().max())
        if place > 1:  # a sum of normal numbers over the rows, which may be far smaller than its parts were on the way
            size = max(size, math.sqrt(x.numel() / x.shape[1]))
        most = 2 * float((other - wanted).abs().max()) + SLACK * size
        assert float((got - wanted).abs().max()) <= most, place


@pytest.mark.interpreter(only=True)
def test_only_what_is_wanted_is_computed() -> None:
    x = torch.randn(2, 3, 4, 5, device=DEVICE)
    norm = some_norm(x).to(DEVICE)
    norm.requires_grad_(False)
    leaf = x.clone().requires_grad_()
    normalize(leaf, norm, 6.0).sum().backward()
    assert leaf.grad is not None
    assert norm.weight.grad is None
    norm.requires_grad_(True)
    normalize(x, norm, None).sum().backward()
    assert norm.bias.grad.tolist() == [40.0] * 3
    assert not normalize(x, norm.requires_grad_(False), None).requires_grad


@pytest.mark.interpreter(only=True)
def test_gradients_in_another_layout_and_nan() -> None:
    x = torch.randn(2, 3, 4, 4, device=DEVICE)
    norm, leaf = some_norm(x).to(DEVICE), x.clone().requires_grad_()
    normalize(leaf, norm, math.inf).mean().backward()  # its gradient is one number in memory
    expected = results(lambda *given: reference(*given) / 96, x, norm, math.inf)
    assert leaf.grad is not None
    assert leaf.grad.shape == expected[1].shape
    x[0, 0, 0, 0] = torch.nan
    assert int(normalize(x, norm, 6.0).isnan().sum()) == 1


@pytest.mark.interpreter(only=True)
def test_other_norms_are_left_alone() -> None:
    x = torch.randn(2, 3, 4, 4, device=DEVICE)
    assert can_normalize(nn.BatchNorm2d(3).to(DEVICE).eval(), x)
    assert not can_normalize(nn.BatchNorm2d(3).to(DEVICE), x), "statistics of the batch"
    assert not can_normalize(nn.BatchNorm2d(3, affine=False).to(DEVICE).eval(), x)
    assert not can_normalize(nn.BatchNorm2d(3, track_running_stats=False).to(DEVICE).eval(), x)
    assert not can_normalize(nn.BatchNorm2d(3).to(DEVICE).eval(), x.double())


@pytest.mark.slow
@pytest.mark.parametrize("relu_max", [None, 6.0])
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("size", [7, 14, 112])
def test_the_kernels_compile(compiled: Any, size: int, channels_last: bool, relu_max: float | None) -> None:
    x = torch.zeros(16, 32, size, size, requires_grad=True)
    if channels_last:
        x = x.detach().contiguous(memory_format=torch.channels_last).requires_grad_()
    normalize(x, some_norm(x), relu_max).sum().backward()
    assert [launch.name for launch in compiled] == ["_kept_norm_forward", "_kept_norm_backward", "_join_kept_norm"]
    assert [launch.spilled for launch in compiled] == [0, 0, 0]
    assert channels_last or size == 7 or compiled["_kept_norm_backward"].count(r"ld\.global\.v4") > 0
