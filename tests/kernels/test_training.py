"""The fused kernels against PyTorch and the reference: values, gradients, statistics; and whole networks through them.

On a GPU they run compiled, elsewhere under Triton's interpreter; see `test_interpreter.py`.
"""

import contextlib
import copy
import math
import os

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bitdial import functional as bf
from bitdial.kernels import training as fused
from bitdial.kernels.fake_quantize import fake_quantize_activation
from bitdial.kernels.width_table import ActivationCodes, WeightCodes

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LAST = torch.channels_last


@pytest.fixture(autouse=True)
def float32_convolutions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Float32 makes differences visible that 16 bits would hide; TF32 would bring some in."""
    monkeypatch.setattr(fused, "CONVOLUTION_TYPES", (torch.float32,))
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


@pytest.fixture(autouse=True)
def fixed_weights() -> None:
    """Of weights drawn anew each time, the terms of a scale's gradient now and then cancel: only rounding is left."""
    torch.manual_seed(0)


def normal(*shape: int, seed: int) -> Tensor:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)
    return x.to(memory_format=LAST) if len(shape) == 4 else x


def close(got: Tensor, expected: Tensor, tolerance: float = 2e-5) -> None:
    size = float(expected.detach().abs().max()) + 1e-12
    torch.testing.assert_close(got, expected, rtol=0, atol=tolerance * size)


# --- convolution --------------------------------------------------------------------------------

CONVOLUTIONS = [  # images, channels, height, width, output channels, filter, stride, padding, groups
    (2, 16, 9, 7, 16, 3, 1, 1, 1),
    (1, 3, 8, 8, 16, 3, 1, 1, 1),
    (2, 16, 8, 8, 32, 3, 2, 1, 1),
    (3, 32, 5, 6, 32, 1, 1, 0, 1),
    (2, 16, 7, 7, 32, 1, 2, 0, 1),
    (1, 24, 5, 6, 40, 3, 1, 0, 1),
    (1, 20, 9, 9, 8, 5, 1, 2, 1),
    (2, 64, 8, 8, 64, 3, 1, 1, 1),
    (2, 16, 9, 7, 16, 3, 1, 1, 16),
    (1, 96, 8, 8, 96, 3, 2, 1, 96),
    (2, 33, 7, 9, 33, 5, 2, 2, 33),
    (3, 24, 8, 8, 24, 3, 1, 0, 24),
]


@pytest.mark.interpreter(only=True)
@pytest.mark.parametrize("sizes", CONVOLUTIONS)
def test_convolution_equals_pytorchs(sizes: tuple[int, ...]) -> None:
    n, c, h, w, k, r, stride, padding, groups = sizes
    conv = nn.Conv2d(c, k, r, stride=stride, padding=padding, groups=groups, bias=False).to(DEVICE, memory_format=LAST)
    x = normal(n, c, h, w, seed=1).requires_grad_()
    assert fused.can_convolve(conv, x)
    expected = conv(x)
    grad = normal(*expected.shape, seed=2)
    wanted = torch.autograd.grad(expected, (x, conv.weight), grad)
    y, moments = fused.convolve(x, conv, conv.weight, None)
    close(y, expected)
    for got, want in zip(torch.autograd.grad(y, (x, conv.weight), grad), wanted, strict=True):
        close(got, want)
    pixels = y.detach().permute(0, 2, 3, 1).reshape(-1, k)
    for tile in range(moments.parts.shape[2]):
        some = pixels[tile * moments.rows : (tile + 1) * moments.rows]
        close(moments.parts[0, :, tile], some.mean(dim=0))
        close(moments.parts[1, :, tile], (some - some.mean(dim=0)).square().sum(dim=0))


@pytest.mark.interpreter(only=True)
@pytest.mark.parametrize("scheme", ["double_rounding", "nested", "truncate", "lsq"])
@pytest.mark.parametrize("channels", [1, 12])
@pytest.mark.parametrize("groups", [1, 12])
def test_convolution_of_quantised_weights(scheme: str, channels: int, groups: int) -> None:
    inputs = 12 if groups > 1 else 16
    conv = nn.Conv2d(inputs, 12, 3, padding=1, groups=groups, bias=False).to(DEVICE, memory_format=LAST)
    x = normal(2, inputs, 6, 6, seed=3).requires_grad_()
    scale = torch.linspace(0.01, 0.04, channels).to(DEVICE).requires_grad_()
    high = 4 if scheme == "lsq" else 8
    settings = {"high": high, "low": 4, "scheme": scheme, "ties": "even", "gradient_scale": 0.3}
    expected = F.conv2d(x, bf.fake_quantize(conv.weight, scale, **settings), padding=1, groups=groups)
    grad = normal(*expected.shape, seed=4)
    wanted = torch.autograd.grad(expected, (x, conv.weight, scale), grad)
    y, _ = fused.convolve(x, conv, conv.weight, WeightCodes.of(scale, **settings))
    close(y, expected)
    for got, want in zip(torch.autograd.grad(y, (x, conv.weight, scale), grad), wanted, strict=True):
        close(got, want, tolerance=1e-4)


@pytest.mark.interpreter(only=True)
def test_a_scale_learns_although_its_weight_is_frozen() -> None:
    conv = nn.Conv2d(16, 16, 3, padding=1, bias=False).to(DEVICE, memory_format=LAST).requires_grad_(False)
    scale = torch.linspace(0.01, 0.04, 16).to(DEVICE).requires_grad_()
    settings = {"high": 8, "low": 4, "scheme": "double_rounding", "ties": "even", "gradient_scale": 1.0}
    x = normal(2, 16, 6, 6, seed=3)
    expected = F.conv2d(x, bf.fake_quantize(conv.weight, scale, **settings), padding=1)
    grad = normal(*expected.shape, seed=4)
    y, _ = fused.convolve(x, conv, conv.weight, WeightCodes.of(scale, **settings))
    close(torch.autograd.grad(y, scale, grad)[0], torch.autograd.grad(expected, scale, grad)[0], tolerance=1e-4)


@pytest.mark.interpreter(only=True)
def test_what_the_convolution_leaves_to_others() -> None:
    x = normal(2, 16, 6, 6, seed=5)
    good = nn.Conv2d(16, 16, 3, padding=1, bias=False).to(DEVICE, memory_format=LAST)
    assert fused.can_convolve(good, x)
    assert not fused.can_convolve(good, x.double())
    for changes in (
        {"bias": True}, {"groups": 2}, {"dilation": 2}, {"stride": (1, 2)}, {"padding": (0, 1)}, {"padding": "same"},
        {"padding_mode": "circular"}, {"kernel_size": (3, 1)}, {"out_channels": 80}, {"padding": 3},
    ):  # fmt: skip
        settings = {"in_channels": 16, "out_channels": 16, "kernel_size": 3, "padding": 1, "bias": False} | changes
        other = nn.Conv2d(**settings).to(DEVICE, memory_format=LAST)
        assert not fused.can_convolve(other, x), changes
    other = nn.Conv2d(16, 16, 3, padding=1, bias=False).to(DEVICE)  # not channels last
    assert not fused.can_convolve(other, x)


@pytest.mark.interpreter(only=True)
def test_many_channels_on_large_images_are_left_to_others() -> None:
    small, large = (torch.zeros(1, 64, size, size, device=DEVICE) for size in (256, 257))
    wide = nn.Conv2d(64, 64, 3, padding=1, bias=False).to(DEVICE, memory_format=LAST)
    assert fused.can_convolve(wide, small)
    assert not fused.can_convolve(wide, large)
    for changes in ({"kernel_size": 1, "padding": 0}, {"out_channels": 32}, {"groups": 64}):
        settings = {"in_channels": 64, "out_channels": 64, "kernel_size": 3, "padding": 1, "bias": False} | changes
        assert fused.can_convolve(nn.Conv2d(**settings).to(DEVICE, memory_format=LAST), large), changes


# --- norm ---------------------------------------------------------------------------------------


@pytest.mark.interpreter(only=True)
@pytest.mark.parametrize(
    "shape, residual", [((3, 16, 9, 7), True), ((1, 70, 4, 4), False), ((1, 70, 4, 4), True), ((4, 3, 17, 31), False)]
)
@pytest.mark.parametrize("relu_max, signed", [(None, None), (None, True), (math.inf, False), (1.0, None), (1.0, False)])
def test_norm_and_epilogue(shape: tuple[int, ...], residual: bool, relu_max: float | None, signed: bool | None) -> None:
    """Every way to go on, on tiles of each kind: of one block of channels, of two, of several blocks of rows.

    A residual is tried with and without on the widest only: what is computed inside a tile does not know which it is.
    """
    check_norm(shape, residual, relu_max, signed, use="both" if signed is not None else "value")


@pytest.mark.interpreter(only=True)
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("use", ["value", "quantized"])
def test_norm_when_only_one_output_is_used(residual: bool, use: str) -> None:
    check_norm((3, 16, 9, 7), residual, math.inf, signed=False, use=use)


def check_norm(
    shape: tuple[int, ...], has_residual: bool, relu_max: float | None, signed: bool | None, use: str
) -> None:
    norm = nn.BatchNorm2d(shape[1]).to(DEVICE)
    with torch.no_grad():
        norm.weight.copy_(normal(shape[1], seed=6)), norm.bias.copy_(normal(shape[1], seed=7))
    twin = copy.deepcopy(norm)
    x = (normal(*shape, seed=8) + 5).requires_grad_()  # a mean far from 0: moments must not cancel
    residual = normal(*shape, seed=9).requires_grad_() if has_residual else None
    scale = torch.tensor([0.11], device=DEVICE, requires_grad=True)
    kind = "signed" if signed else "unsigned"
    codes = None if signed is None else ActivationCodes.of(scale, bits=4, kind=kind, gradient_scale=0.3)
    settings = fused.NormSettings(norm, None, relu_max, codes, use in ("value", "both"))
    value, quantized = fused.normalize(x, residual, settings)

    expected = twin(x) if residual is None else twin(x) + residual
    expected = expected if relu_max is None else F.hardtanh(expected, 0.0, relu_max)
    # the codes of the value that the kernel has: where a value lies at the edge of a code, a rounding decides
    exact, _ = fused.normalize(x, residual, fused.NormSettings(copy.deepcopy(norm), None, relu_max, None, True))
    source = expected + (exact - expected).detach()
    expected_codes = bf.fake_quantize_activation(source, scale, bits=4, kind=kind, gradient_scale=0.3)
    grads = normal(*shape, seed=10), normal(*shape, seed=11)
    mine, theirs = x.new_zeros(()), x.new_zeros(())
    if use in ("value", "both"):
        assert value is not None
        close(value, expected)
        mine, theirs = mine + (value * grads[0]).sum(), theirs + (expected * grads[0]).sum()
    if use in ("quantized", "both"):
        assert quantized is not None
        assert torch.equal(quantized, expected_codes)
        mine, theirs = mine + (quantized * grads[1]).sum(), theirs + (expected_codes * grads[1]).sum()
    inputs = [x, *([] if residual is None else [residual]), *([scale] if use != "value" else [])]
    got = torch.autograd.grad(mine, [*inputs, norm.weight, norm.bias])
    wanted = torch.autograd.grad(theirs, [*inputs, twin.weight, twin.bias])
    for mine_grad, their_grad in zip(got, wanted, strict=True):
        close(mine_grad, their_grad, tolerance=1e-3)
    for name, buffer in norm.named_buffers():
        close(buffer.double(), twin.get_buffer(name).double(), tolerance=1e-5)


@pytest.mark.interpreter(only=True)
@pytest.mark.parametrize("channels, groups, size", [(16, 1, 9), (32, 1, 13), (32, 32, 9)])  # tiles of 128, 256, 128
def test_the_norm_joins_the_moments_of_a_convolution(channels: int, groups: int, size: int) -> None:
    conv = nn.Conv2d(channels, channels, 3, padding=1, groups=groups, bias=False).to(DEVICE, memory_format=LAST)
    norm = nn.BatchNorm2d(channels).to(DEVICE)
    twin = copy.deepcopy(norm)
    y, moments = fused.convolve(normal(3, channels, size, size, seed=12), conv, conv.weight, None)
    assert moments.parts.shape[2] > 1  # the last tile is a partial one
    value, _ = fused.normalize(y, None, fused.NormSettings(norm, moments, None, None, True))
    assert value is not None
    close(value, twin(y))
    close(norm.running_var, twin.running_var)  # type: ignore[arg-type]


@pytest.mark.interpreter(only=True)
@pytest.mark.skipif(INTERPRETED, reason="the interpreter cuts bfloat16 off instead of rounding it")
@pytest.mark.parametrize("signed", [False, True])
def test_codes_of_every_bfloat16(signed: bool) -> None:
    """The kernels' division is not the GPU's own: every value there is, against the reference on the CPU."""
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    every = every[torch.isfinite(every)]
    kind = "signed" if signed else "unsigned"
    for bits in (8, 4, 2):
        for scale in torch.logspace(-4, 1, 40).unsqueeze(1):
            expected = bf.fake_quantize_activation(every.float(), scale, bits=bits, kind=kind)
            got = fake_quantize_activation(every.to(DEVICE), scale.to(DEVICE), bits=bits, kind=kind)
            assert torch.equal(got.cpu(), expected)


# --- the stream beside the pass -------------------------------------------------------------------


def test_a_stream_without_work_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A recording breaks off if it waits for a stream that has no part in it: float32 leaves this one without work."""

    class Stream:
        def __init__(self) -> None:
            self.waited_for: list[Stream] = []

        def wait_stream(self, other: "Stream") -> None:
            self.waited_for.append(other)

        def record_event(self) -> str:
            return "event"

    passing = Stream()
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: passing)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    side = fused.SideStream()
    side.join()
    assert passing.waited_for == []
    parameter = torch.zeros(2, requires_grad=True)
    side.start((parameter,), lambda: (torch.ones(2),), ())
    side.join()
    assert passing.waited_for == [side.stream]
    assert parameter.grad is not None
    assert torch.equal(parameter.grad, torch.ones(2))
    side.join()
    assert len(passing.waited_for) == 1
