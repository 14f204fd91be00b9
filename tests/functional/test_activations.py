"""Activations against references written from the formulas: Fractions, loops, float64."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from bitdial import functional as bf
from bitdial.errors import BitdialError, ConfigError

BITS = (8, 6, 4, 3, 2)
KINDS = ("unsigned", "signed", "asymmetric")


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def randn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=generator(seed))


def leaf(values: Tensor) -> Tensor:
    return values.clone().requires_grad_()


def grad_of(tensor: Tensor) -> Tensor:
    assert tensor.grad is not None
    return tensor.grad


# --- references ---------------------------------------------------------------------------------


def clip(value: int, bits: int, *, signed: bool) -> int:
    if signed:
        return max(-(2 ** (bits - 1)), min(2 ** (bits - 1) - 1, value))
    return max(0, min(2**bits - 1, value))


def whole_zero(zero_point: float | None, bits: int) -> int:
    if zero_point is None:
        return 0
    return clip(round(Fraction(float(np.float32(zero_point)))), bits, signed=False)


def activation_reference(
    x: Tensor, scale: float, zero_point: float | None, grad: Tensor, bits: int, kind: str
) -> tuple[list[int], list[float], list[float], float, float]:
    """Codes, values, d/dx, d/dscale and d/dzero_point in float64, element by element."""
    signed = kind == "signed"
    least, most = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if signed else (0, 2**bits - 1)
    z = whole_zero(zero_point, bits)
    codes, values, to_x, to_scale, to_zero = [], [], [], 0.0, 0.0
    s = np.float32(scale)
    for value, g in zip(x.reshape(-1).numpy(), grad.reshape(-1).tolist(), strict=True):
        ratio = value / s
        assert ratio.dtype == np.float32
        code = clip(round(Fraction(float(ratio))) + z, bits, signed=signed)
        inside = least < float(ratio) + z < most
        exact = float(value) / float(s)
        codes.append(code)
        values.append((code - z) * float(s))
        to_x.append(g if inside else 0.0)
        to_scale += g * ((code - z) - exact if inside else code - z)
        to_zero += 0.0 if inside else -float(s) * g
    return codes, values, to_x, to_scale, to_zero


ZERO_POINTS: dict[str, tuple[float | None, ...]] = {
    "unsigned": (None,),
    "signed": (None,),
    "asymmetric": (0.0, 0.4, 1.5, 1.2, 2.5, -7.0, 1000.0),
}


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("kind", KINDS)
def test_activations_are_the_derivation(kind: str, bits: int) -> None:
    for zero_point in ZERO_POINTS[kind]:
        x = randn(2, 3, 4, 5, seed=bits) * 2**bits * 0.05
        upstream = randn(2, 3, 4, 5, seed=100 + bits)
        codes, values, to_x, to_scale, to_zero = activation_reference(x, 0.07, zero_point, upstream, bits, kind)
        xs, s = leaf(x), leaf(torch.tensor([0.07]))
        z = None if zero_point is None else leaf(torch.tensor([zero_point]))
        out = bf.fake_quantize_activation(xs, s, z, bits=bits, kind=kind)
        out.backward(upstream)
        np.testing.assert_allclose(out.detach().reshape(-1).numpy(), values, rtol=1e-6)
        assert grad_of(xs).reshape(-1).tolist() == to_x
        size = float((upstream.abs() * out.detach().abs()).sum()) / 0.07 + 1
        assert grad_of(s).shape == (1,)
        assert grad_of(s).item() == pytest.approx(to_scale, abs=1e-5 * size)
        if z is not None:
            assert grad_of(z).shape == (1,)
            assert grad_of(z).item() == pytest.approx(to_zero, abs=1e-5)

        whole = bf.quantize_activation(x, s.detach(), z, bits=bits, kind=kind)
        assert whole.dtype == (torch.int8 if kind == "signed" else torch.uint8)
        assert whole.reshape(-1).tolist() == codes
        back = bf.dequantize_activation(whole, s.detach(), z, bits=bits)
        assert torch.equal(back, out.detach())


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("kind", KINDS)
def test_activation_gradients_exactly_at_the_edges(kind: str, bits: int) -> None:
    step, zero = np.float32(0.25), 1 if kind == "asymmetric" else 0
    least, most = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if kind == "signed" else (0, 2**bits - 1)
    for edge, outward in ((least, -np.inf), (most, np.inf)):
        exact = np.float32(edge - zero) * step
        far = np.float32(1e-3) * np.sign(np.float32(outward))  # beside 0 an ulp is lost in x/s + z
        inner = exact - far if zero else np.nextafter(exact, np.float32(-outward))
        outer = exact + far if zero else np.nextafter(exact, np.float32(outward))
        for value, inside in ((exact, False), (outer, False), (inner, True)):
            x, s = leaf(torch.tensor([value])), leaf(torch.tensor([step]))
            z = leaf(torch.tensor([1.0])) if zero else None
            out = bf.fake_quantize_activation(x, s, z, bits=bits, kind=kind)
            out.backward(torch.ones(1))
            assert out.item() == (edge - zero) * step
            assert grad_of(x).item() == float(inside)
            expected = (edge - zero) - float(value) / 0.25 if inside else edge - zero
            assert grad_of(s).item() == pytest.approx(expected, abs=1e-4)
            if z is not None:
                assert grad_of(z).item() == (0.0 if inside else -0.25)


@pytest.mark.parametrize("kind", KINDS)
def test_activation_moved_with_its_scale_scales_the_output(kind: str) -> None:
    x, upstream = randn(50, seed=13), randn(50, seed=14)
    for bits in BITS:
        xs, s = leaf(x), leaf(torch.tensor([0.05]))
        z = torch.tensor([1.0]) if kind == "asymmetric" else None
        out = bf.fake_quantize_activation(xs, s, z, bits=bits, kind=kind)
        out.backward(upstream)
        along = (grad_of(xs) * x).double().sum() + (grad_of(s) * 0.05).double().sum()
        expected = (upstream * out.detach()).double().sum()
        assert along.item() == pytest.approx(expected.item(), abs=1e-5)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    x=st.lists(st.floats(-1000, 1000, width=32), min_size=1, max_size=8),
    scale=st.floats(2**-10, 8, width=32),
    zero_point=st.floats(-300, 300, width=32),
    bits=st.sampled_from(BITS),
    kind=st.sampled_from(KINDS),
)
def test_activation_codes_and_training_agree_bit_for_bit(
    x: list[float], scale: float, zero_point: float, bits: int, kind: str
) -> None:
    values, s = torch.tensor(x), torch.tensor([scale])
    z = torch.tensor([zero_point]) if kind == "asymmetric" else None
    codes = bf.quantize_activation(values, s, z, bits=bits, kind=kind)
    fake = bf.fake_quantize_activation(values, s, z, bits=bits, kind=kind)
    assert torch.equal(fake, bf.dequantize_activation(codes, s, z, bits=bits))


@pytest.mark.parametrize("kind", KINDS)
def test_gradient_scale_multiplies_scale_and_zero_point(kind: str) -> None:
    x, upstream = randn(40, seed=15), randn(40, seed=16)
    grads = []
    for factor in (1.0, 0.25):
        xs, s = leaf(x), leaf(torch.tensor([0.1]))
        z = leaf(torch.tensor([1.0])) if kind == "asymmetric" else None
        out = bf.fake_quantize_activation(xs, s, z, bits=3, kind=kind, gradient_scale=factor)
        out.backward(upstream)
        grads.append([grad_of(t) for t in (xs, s, z) if t is not None])
    assert torch.equal(grads[0][0], grads[1][0])
    for full, scaled in zip(grads[0][1:], grads[1][1:], strict=True):
        assert full.item() != 0
        assert torch.equal(full * 0.25, scaled)


def layouts(x: Tensor) -> dict[str, Tensor]:
    """The same (N, C, H, W) values in other memory layouts."""
    wide = torch.full((*x.shape[:-1], 2 * x.shape[-1]), float("nan"))
    wide[..., ::2] = x
    return {
        "channels_last": x.to(memory_format=torch.channels_last),
        "strided": wide[..., ::2],
        "transposed": x.transpose(0, 3).contiguous().transpose(0, 3),
    }


@pytest.mark.parametrize("kind", KINDS)
def test_activation_layout_does_not_matter(kind: str) -> None:
    x, upstream = randn(4, 3, 2, 5, seed=17), randn(4, 3, 2, 5, seed=18)

    def run(values: Tensor, grad: Tensor) -> list[Tensor]:
        xs, s = values.detach().requires_grad_(), leaf(torch.tensor([0.2]))
        z = leaf(torch.tensor([2.0])) if kind == "asymmetric" else None
        out = bf.fake_quantize_activation(xs, s, z, bits=3, kind=kind)
        out.backward(grad)
        return [out.detach(), *(grad_of(t) for t in (xs, s, z) if t is not None)]

    expected = run(x, upstream)
    for name, view in layouts(x).items():
        for grad in (upstream, layouts(upstream)[name]):
            got = run(view, grad)
            assert torch.equal(got[0], expected[0]), name
            assert torch.equal(got[1], expected[1]), name
            for one, other in zip(got[2:], expected[2:], strict=True):
                torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    # A gradient that is one number read many times, as sum() sends it.
    got = run(x, torch.ones(1).expand(4, 3, 2, 5))
    assert torch.equal(got[1], run(x, torch.ones(4, 3, 2, 5))[1])


@pytest.mark.parametrize("kind", ["unsigned", "signed"])
def test_scale_gradient_of_a_large_activation_is_accurate(kind: str) -> None:
    """A million values near the top code, with gradients of one sign: the residuals are 300 times
    smaller than the values, so a difference of two float32 sums of values would drown them."""
    x = torch.rand(1 << 20, generator=generator(19)) * 0.1 + 0.85
    s = leaf(torch.tensor([1 / 255 if kind == "unsigned" else 1 / 127]))
    bf.fake_quantize_activation(x, s, bits=8, kind=kind).sum().backward()
    ratio = (x / s.detach()).double()
    residual = ratio.round() - x.double() / s.detach().double()
    size = residual.abs().sum().item()
    assert grad_of(s).item() == pytest.approx(residual.sum().item(), abs=1e-3 * size)


def test_nothing_changes_its_arguments() -> None:
    x, zero, codes = randn(4, seed=21), torch.ones(1), torch.tensor([1, 2])
    before = [t.clone() for t in (x, zero, codes)]
    bf.fake_quantize_activation(x, zero, zero, bits=4, kind="asymmetric")
    bf.quantize_activation(x, zero, zero, bits=4, kind="asymmetric")
    bf.dequantize_activation(codes, zero * 2, zero, bits=4)
    bf.dequantize_activation(x, zero * 2, bits=4)  # floats may be given too
    for tensor, copy in zip((x, zero, codes), before, strict=True):
        assert torch.equal(tensor, copy)


X, S = torch.ones(3), torch.ones(1)

WRONG: dict[str, tuple[Callable[[], object], type[BitdialError], str]] = {
    "act bits": (
        lambda: bf.fake_quantize_activation(X, S, bits=9, kind="signed"), ConfigError, "=9"),
    "act kind": (
        lambda: bf.fake_quantize_activation(X, S, bits=8, kind="abc"), ConfigError, "'abc'"),
    "act codes kind": (
        lambda: bf.quantize_activation(X, S, bits=8, kind="abc"), ConfigError, "'abc'"),
    "act codes bits": (
        lambda: bf.quantize_activation(X, S, bits=1, kind="signed"), ConfigError, "=1"),
    "act zero missing": (
        lambda: bf.fake_quantize_activation(X, S, bits=8, kind="asymmetric"), ConfigError,
        "zero_point"),
    "act zero extra": (
        lambda: bf.fake_quantize_activation(X, S, S, bits=8, kind="signed"), ConfigError,
        "'signed'"),
}  # fmt: skip


def test_wrong_input_is_named() -> None:
    for function, error, message in WRONG.values():
        with pytest.raises(error, match=message):
            function()
