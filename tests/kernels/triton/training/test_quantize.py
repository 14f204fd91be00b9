"""The Triton kernels against the reference: codes bit for bit, gradients closely.

On a GPU they run compiled, elsewhere under Triton's interpreter; see `test_interpreter.py`.
"""

import os

import pytest
import torch
from torch import Tensor

from bitdial import functional as bf
from bitdial import kernels

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def awkward(count: int, scale: float, seed: int) -> Tensor:
    """Random values, exact ties between codes, and neighbours one ulp to either side."""
    generator = torch.Generator().manual_seed(seed)
    ties = (torch.randint(-140, 140, (count,), generator=generator) + 0.5) * scale
    spread = torch.randn(count, generator=generator) * 50 * scale
    up = torch.nextafter(ties, torch.full_like(ties, torch.inf))
    down = torch.nextafter(ties, torch.full_like(ties, -torch.inf))
    return torch.cat([ties, up, down, spread, torch.tensor([0.0, -0.0, 1e30, -1e30])])


def both(function, reference, tensors: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Output and gradients of the kernels and of the reference for the same random gradient."""
    results = []
    for call, device in ((function, DEVICE), (reference, "cpu")):
        inputs = [t.detach().to(device).clone(memory_format=torch.preserve_format).requires_grad_() for t in tensors]
        out = call(*inputs)
        grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(9)).to(device)
        out.backward(grad.to(out.dtype))
        results.append([out.detach().cpu(), *(t.grad.cpu() for t in inputs)])
    return results[0], results[1]


def check(mine: list[Tensor], theirs: list[Tensor], size: int) -> None:
    """Values and input gradients equal; sums within float32's rounding of so many terms."""
    assert torch.equal(mine[0], theirs[0])
    assert torch.equal(mine[1], theirs[1])
    for got, expected in zip(mine[2:], theirs[2:], strict=True):
        torch.testing.assert_close(got, expected, rtol=2e-4, atol=1e-5 * size**0.5 * float(expected.abs().max() + 1))


@pytest.mark.interpreter(only=True)
@pytest.mark.parametrize("kind", bf.ACTIVATION_KINDS)
@pytest.mark.parametrize("bits", [8, 5, 4, 2])
def test_activations(kind: str, bits: int) -> None:
    x = awkward(1500, 0.037, bits)
    tensors = [x, torch.tensor([0.037])]
    if kind == "asymmetric":
        tensors.append(torch.tensor([2.0 ** (bits - 1) + 0.3]))

    def mine(x, scale, zero=None):
        return kernels.fake_quantize_activation(x, scale, zero, bits=bits, kind=kind, gradient_scale=0.3)

    def reference(x, scale, zero=None):
        return bf.fake_quantize_activation(x, scale, zero, bits=bits, kind=kind, gradient_scale=0.3)

    check(*both(mine, reference, tensors), size=x.numel())


@pytest.mark.interpreter(only=True)
@pytest.mark.parametrize("shape", [(1,), (3, 5, 7, 9), (2, 8, 4, 4)])
@pytest.mark.parametrize("layout", ["contiguous", "channels_last", "transposed", "sliced"])
def test_activation_layouts(shape: tuple[int, ...], layout: str) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    if layout == "channels_last" and x.dim() == 4:
        x = x.contiguous(memory_format=torch.channels_last)
    elif layout == "transposed" and x.dim() == 4:
        x = x.transpose(1, 3)
    elif layout == "sliced":
        x = torch.cat([x, x])[::2]
    results = []
    for call, device in ((kernels.fake_quantize_activation, DEVICE), (bf.fake_quantize_activation, "cpu")):
        leaf, scale = x.to(device).requires_grad_(), torch.tensor([0.1], device=device, requires_grad=True)
        out = call(leaf, scale, bits=4, kind="signed")
        out.backward(torch.ones_like(out))
        results.append([t.cpu() for t in (out.detach(), leaf.grad, scale.grad)])
    check(results[0], results[1], size=x.numel())


@pytest.mark.interpreter(only=True)
@pytest.mark.parametrize("scheme", ["double_rounding", "nested", "nested+8", "centred", "truncate", "lsq"])
@pytest.mark.parametrize("low", [8, 7, 5, 4, 2])
@pytest.mark.parametrize("channels", [1, 6])
@pytest.mark.parametrize("ties", bf.TIE_RULES)
def test_weights(scheme: str, low: int, channels: int, ties: str) -> None:
    if ties == "up" and scheme != "double_rounding":
        pytest.skip("the tie rule is double rounding's alone")
    high = 8 if bf.scheme_of(scheme).narrows else low
    scale = torch.linspace(0.01, 0.03, channels)
    rows = [awkward(350, float(s) * 2 ** (high - low), low) for s in scale]
    weight = torch.stack(rows).reshape(channels * 2, -1) if channels == 1 else torch.stack(rows)

    def mine(weight, scale):
        return kernels.fake_quantize(weight, scale, high=high, low=low, scheme=scheme, ties=ties, gradient_scale=0.7)

    def reference(weight, scale):
        return bf.fake_quantize(weight, scale, high=high, low=low, scheme=scheme, ties=ties, gradient_scale=0.7)

    check(*both(mine, reference, [weight.clamp(-1e3, 1e3), scale]), size=weight.numel())


@pytest.mark.interpreter(only=True)
def test_nan_is_not_clipped_away() -> None:
    x = torch.tensor([1.0, float("nan")], device=DEVICE)
    out = kernels.fake_quantize_activation(x, torch.tensor([0.1], device=DEVICE), bits=4, kind="unsigned")
    assert out.isnan().tolist() == [False, True]
    weight = torch.tensor([[1.0, float("nan")]], device=DEVICE)
    out = kernels.fake_quantize(weight, torch.tensor([0.1], device=DEVICE), high=8, low=4)
    assert out.isnan().tolist() == [[False, True]]


@pytest.mark.interpreter(only=True)
def test_empty_input() -> None:
    x = torch.zeros(0, 3, device=DEVICE, requires_grad=True)
    scale = torch.ones(1, device=DEVICE, requires_grad=True)
    kernels.fake_quantize_activation(x, scale, bits=4, kind="unsigned").sum().backward()
    assert scale.grad.item() == 0


@pytest.mark.interpreter(only=True)
def test_values_come_in_the_type_of_autocast() -> None:
    x = torch.rand(64, device=DEVICE)
    scale = torch.tensor([0.1], device=DEVICE)
    with torch.autocast(DEVICE, torch.bfloat16):
        assert kernels.use_triton(x)
        out = kernels.fake_quantize_activation(x, scale, bits=4, kind="unsigned")
    assert out.dtype == torch.bfloat16
    full = kernels.fake_quantize_activation(x, scale, bits=4, kind="unsigned")
    if INTERPRETED:  # the interpreter cuts bits off where the GPU rounds
        torch.testing.assert_close(out.float(), full, rtol=2**-7, atol=0.0)
    else:
        assert torch.equal(out, full.bfloat16())
