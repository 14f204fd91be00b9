"""Depthwise convolutions with channels first: the kernels against PyTorch in float64.

On a GPU they run compiled, elsewhere under Triton's interpreter; see `test_interpreter.py`.
"""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bitdial.kernels import depthwise, dispatch
from bitdial.kernels.depthwise import can_convolve, convolve, fits

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SLACK = 1e-6 if DEVICE == "cuda" else 1e-5  # the interpreter adds numbers up one after the other


def layer(channels: int, taps: int, stride: int, padding: int) -> nn.Conv2d:
    torch.manual_seed(taps)
    return nn.Conv2d(channels, channels, taps, stride, padding, groups=channels, bias=False)


def results(call: Any, x: Tensor, weight: Tensor) -> list[Tensor]:
    """The value and the gradients of x and weight."""
    leaf, filters = x.detach().clone().requires_grad_(), weight.detach().clone().requires_grad_()
    out = call(leaf, filters)
    out.backward(torch.randn(out.shape, generator=torch.Generator().manual_seed(9)).to(out))
    assert leaf.grad is not None
    assert filters.grad is not None
    return [t.detach().double().cpu() for t in (out, leaf.grad, filters.grad)]


@pytest.mark.interpreter(only=True)
@pytest.mark.parametrize("shape", [(2, 3, 9, 7), (5, 4, 8, 8), (1, 2, 67, 61), (3, 2, 5, 6)], ids=str)
@pytest.mark.parametrize("taps", [3, 5])
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("padding", [0, 1, 2])
def test_values_and_gradients(shape: tuple[int, ...], taps: int, stride: int, padding: int) -> None:
    x, conv = torch.randn(shape, generator=torch.Generator().manual_seed(1)), layer(shape[1], taps, stride, padding)

    def reference(x: Tensor, weight: Tensor) -> Tensor:
        return nn.functional.conv2d(x, weight, None, stride, padding, 1, shape[1])

    weight = conv.weight.detach()
    exact, theirs = results(reference, x.double(), weight.double()), results(reference, x, weight)
    x, weight = x.to(DEVICE), weight.to(DEVICE)
    assert fits(conv)
    assert can_convolve(x, weight, conv)
    for got, wanted, other in zip(
        results(lambda *given: convolve(*given, conv), x, weight), exact, theirs, strict=True
    ):
        most = 2 * float((other - wanted).abs().max()) + SLACK * float(wanted.abs().max())
        assert got.shape == wanted.shape
        assert float((got - wanted).abs().max()) <= most


@pytest.mark.interpreter(only=True)
def test_only_what_is_wanted_is_computed() -> None:
    x, conv = torch.randn(2, 3, 5, 5, device=DEVICE), layer(3, 3, 1, 1).to(DEVICE)
    convolve(x, conv.weight, conv).sum().backward()
    assert conv.weight.grad is not None
    assert not convolve(x, conv.weight.detach(), conv).requires_grad


@pytest.mark.interpreter
def test_what_else_there_is_goes_to_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    usual: dict[str, Any] = {"in_channels": 4, "out_channels": 4, "kernel_size": 3, "groups": 4, "bias": False}
    assert fits(nn.Conv2d(**usual))
    for odd in (
        {"groups": 2}, {"out_channels": 8}, {"bias": True}, {"kernel_size": (3, 5)}, {"kernel_size": 4}, {"stride": 3},
        {"stride": (1, 2)}, {"padding": "same"}, {"padding": (0, 1)}, {"padding": 3}, {"dilation": 2},
        {"padding": 1, "padding_mode": "reflect"},
    ):  # fmt: skip
        assert not fits(nn.Conv2d(**usual | odd)), odd
    assert not fits(nn.Linear(4, 4))
    x, weight = torch.zeros(2, 4, 5, 5, device=DEVICE), torch.zeros(4, 1, 3, 3, device=DEVICE)
    conv = nn.Conv2d(**usual)
    assert not can_convolve(x.contiguous(memory_format=torch.channels_last), weight, conv)
    assert not can_convolve(x.double(), weight.double(), conv)
    with torch.autocast(DEVICE, torch.bfloat16):
        assert not can_convolve(x, weight, conv)
    monkeypatch.setattr(depthwise, "INDEXABLE", 2 * 4 * 7 * 7)
    assert can_convolve(x, weight, conv) == dispatch.triton_runs(x)
    assert not can_convolve(x, weight, nn.Conv2d(**usual, padding=1)), "more outputs than 32-bit numbers count"


@pytest.mark.slow
@pytest.mark.parametrize(("size", "taps", "stride"), [(112, 3, 1), (112, 3, 2), (14, 3, 1), (14, 5, 2), (7, 5, 1)])
def test_the_kernels_compile(compiled: Any, size: int, taps: int, stride: int) -> None:
    conv = layer(32, taps, stride, taps // 2)
    convolve(torch.zeros(32, 32, size, size, requires_grad=True), conv.weight, conv).sum().backward()
    names = ["_depthwise_forward", "_depthwise_input_gradient", "_depthwise_weight_gradient"]
    assert [launch.name for launch in compiled] == names
    assert [launch.spilled for launch in compiled] == [0, 0, 0]
