"""Quantised layers against a float64 convolution or product of values quantised by hand."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from bitdial.nn import ActivationQuantizer, QuantConv2d, QuantLinear, WeightQuantizer

BITS = (8, 4, 2)


def randn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# --- references ---------------------------------------------------------------------------------


def weight_value(weight: Tensor, scale: Tensor, high: int, low: int, scheme: str) -> Tensor:
    """What the formulas make of a weight, in float64 (`scale` has one entry per channel)."""
    s = scale.double().numpy().reshape(-1, *(1,) * (weight.dim() - 1))
    ratio = weight.double().numpy() / s
    step, phase = 2 ** (high - low), int(scheme.partition("+")[2] or 0)
    code = np.floor(ratio) if scheme == "centred" else np.rint(ratio)
    code = np.clip(code, -(2 ** (high - 1)), 2 ** (high - 1) - 1 - phase) + phase
    code = np.rint(code / step) if scheme == "double_rounding" else np.floor(code / step)
    code = np.clip(code, -(2 ** (low - 1)), 2 ** (low - 1) - 1)
    below = scheme.startswith("nested") and high != low
    middle = step / 2 if scheme == "centred" or below else 0.0
    return torch.from_numpy((code * step + middle - phase) * s)


def act_value(x: Tensor, scale: float, zero: int, bits: int, kind: str) -> Tensor:
    signed = kind == "signed"
    least, most = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if signed else (0, 2**bits - 1)
    code = np.clip(np.rint(x.double().numpy() / scale) + zero, least, most)
    return torch.from_numpy((code - zero) * scale)


# Scales are whole multiples of powers of two and inputs are not near ties, so float32 agrees.
ACT_SCALES = {8: 1 / 64, 4: 1 / 4, 2: 1.0}
ZEROS = {8: 100, 4: 7, 2: 1}


def act_quantizer(kind: str) -> ActivationQuantizer:
    scales = {b: torch.tensor([s]) for b, s in ACT_SCALES.items()}
    zeros = {b: torch.tensor([float(z)]) for b, z in ZEROS.items()}
    return ActivationQuantizer(scales, zeros if kind == "asymmetric" else None, kind=kind)


def weight_quantizer(weight: Tensor, scheme: str = "double_rounding", per_channel: bool = True) -> WeightQuantizer:
    channels = weight.shape[0] if per_channel else 1
    largest = weight.detach().abs().reshape(channels, -1).amax(dim=1)
    if scheme == "lsq":
        scales = {b: largest / 2 ** (b - 1) for b in BITS}
    else:
        scales = {8: largest / 128}
    return WeightQuantizer(scales, bit_choices=BITS, scheme=scheme, ties="even", scale_shape=(channels,))


CONVS: dict[str, dict[str, Any]] = {
    "plain": {},
    "no bias": {"bias": False},
    "stride and padding": {"stride": (2, 1), "padding": (1, 2)},
    "dilation": {"dilation": 2, "padding": 2},
    "grouped": {"groups": 2, "padding": 1},
    "depthwise": {"groups": 4, "padding": 1, "out_channels": 8},
    "reflect": {"padding": 1, "padding_mode": "reflect"},
    "replicate": {"padding": (1, 2), "padding_mode": "replicate"},
    "circular": {"padding": 1, "padding_mode": "circular"},
    "same": {"padding": "same", "kernel_size": (3, 5)},
    "1x1": {"kernel_size": 1},
}


def make_conv(case: str, seed: int = 0) -> nn.Conv2d:
    torch.manual_seed(seed)
    arguments = {"in_channels": 4, "out_channels": 6, "kernel_size": 3, **CONVS[case]}
    return nn.Conv2d(**arguments)


@pytest.mark.parametrize("kind", ["unsigned", "signed", "asymmetric", "float"])
@pytest.mark.parametrize("case", CONVS)
def test_convolution_of_values_quantised_by_hand(case: str, kind: str) -> None:
    conv = make_conv(case)
    x = randn(2, 4, 7, 8, seed=1)
    quantizer = None if kind == "float" else act_quantizer(kind)
    layer = QuantConv2d.from_float(conv, weight_quantizer(conv.weight), quantizer)
    reference = copy.deepcopy(conv).double()
    scale = layer.weight_quantizer.scale.detach()
    for weight_bits, act_bits in ((8, 8), (4, 8), (2, 2), (8, 2)):
        layer.select_bits(weight_bits, act_bits)
        value = weight_value(conv.weight.detach(), scale, 8, weight_bits, "double_rounding")
        reference.weight.data.copy_(value)
        z = ZEROS[act_bits] if kind == "asymmetric" else 0
        quantised = x.double() if kind == "float" else act_value(x, ACT_SCALES[act_bits], z, act_bits, kind)
        # The float layer's own forward: it pads the quantised input, as zero is a value of it.
        expected = reference(quantised)
        torch.testing.assert_close(layer(x).double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("scheme", ["double_rounding", "nested", "nested+8", "centred", "truncate", "lsq"])
@pytest.mark.parametrize("per_channel", [True, False])
@pytest.mark.parametrize("shape", [(5,), (3, 5), (2, 3, 5)])
def test_product_of_values_quantised_by_hand(scheme: str, per_channel: bool, shape: tuple[int, ...]) -> None:
    torch.manual_seed(2)
    linear = nn.Linear(5, 4)
    x = randn(*shape, seed=3)
    quantizer = weight_quantizer(linear.weight, scheme, per_channel)
    layer = QuantLinear.from_float(linear, quantizer, act_quantizer("signed"))
    for weight_bits, act_bits in ((8, 8), (4, 8), (2, 2)):
        layer.select_bits(weight_bits, act_bits)
        high = weight_bits if scheme == "lsq" else 8
        scale = quantizer.scales[str(weight_bits)] if scheme == "lsq" else quantizer.scale
        value = weight_value(linear.weight.detach(), scale.detach(), high, weight_bits, scheme)
        quantised = act_value(x, ACT_SCALES[act_bits], 0, act_bits, "signed")
        expected = functional.linear(quantised, value, linear.bias.detach().double())
        torch.testing.assert_close(layer(x).double(), expected, rtol=1e-4, atol=1e-4)


def test_layers_share_the_parameters_of_the_float_layer() -> None:
    conv = make_conv("plain")
    layer = QuantConv2d.from_float(conv, weight_quantizer(conv.weight), None)
    assert layer.weight is conv.weight
    assert layer.bias is conv.bias
    assert (layer.weight_bits, layer.act_bits) == (8, 8)
    linear = nn.Linear(3, 2, bias=False).eval()
    quantised = QuantLinear.from_float(linear, weight_quantizer(linear.weight), None)
    assert quantised.bias is None
    assert not any(module.training for module in quantised.modules())
    assert not any(p.is_meta for p in (*layer.parameters(), *quantised.parameters()))


def test_weight_only_ignores_the_activation_bits() -> None:
    conv = make_conv("plain")
    layer = QuantConv2d.from_float(conv, weight_quantizer(conv.weight), None)
    x = randn(2, 4, 7, 8, seed=4)
    layer.select_bits(4, 8)
    at8 = layer(x)
    layer.select_bits(4, 2)
    assert torch.equal(layer(x), at8)
    layer.select_bits(2, 2)
    assert not torch.equal(layer(x), at8)


# --- gradients ----------------------------------------------------------------------------------


def test_gradients_reach_weight_scale_and_bias() -> None:
    """The layer's gradients are those of the float product, cut where the weight is clipped."""
    torch.manual_seed(5)
    linear = nn.Linear(6, 3)
    x, upstream = randn(4, 6, seed=6), randn(4, 3, seed=7)
    scale = torch.tensor([0.002, 0.003, 0.001])
    quantizer = WeightQuantizer({8: scale}, bit_choices=BITS, scheme="double_rounding", ties="even", scale_shape=(3,))
    layer = QuantLinear.from_float(linear, quantizer, None)
    layer.select_bits(4, 4)
    layer(x).backward(upstream)
    to_weight = upstream.double().T @ x.double()  # d loss / d (quantised weight)
    v = linear.weight.detach().double() / (scale.double()[:, None] * 16)
    inside = (v > -8) & (v < 7)
    assert 0 < inside.sum() < inside.numel()
    torch.testing.assert_close(linear.weight.grad.double(), to_weight * inside, rtol=1e-5, atol=1e-6)
    code = weight_value(linear.weight.detach(), scale, 8, 4, "double_rounding")
    code = code / (scale.double()[:, None] * 16)
    raw = (to_weight * 16 * torch.where(inside, code - v, code)).sum(dim=1)
    expected = raw / math.sqrt(6 * 7)  # LSQ: 6 weights share a scale, the top code is 7
    torch.testing.assert_close(quantizer.scale.grad.double(), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(linear.bias.grad, upstream.sum(dim=0))


@pytest.mark.parametrize("kind", ["unsigned", "signed", "asymmetric"])
def test_only_the_selected_width_gets_gradients(kind: str) -> None:
    torch.manual_seed(8)
    linear = nn.Linear(6, 3)
    layer = QuantLinear.from_float(linear, weight_quantizer(linear.weight, "lsq"), act_quantizer(kind))
    layer.select_bits(4, 2)
    layer(randn(4, 6, seed=9)).sum().backward()
    received = {name for name, p in layer.named_parameters() if p.grad is not None}
    expected = {"weight", "bias", "weight_quantizer.scales.4", "act_quantizer.scales.2"}
    if kind == "asymmetric":
        expected.add("act_quantizer.zero_points.2")
    assert received == expected


@pytest.mark.parametrize("kind", ["unsigned", "signed", "asymmetric"])
def test_splitting_a_batch_does_not_change_the_gradients(kind: str) -> None:
    """Gradient accumulation and data parallelism sum what the whole batch would have given."""
    x, upstream = randn(6, 3, 4, 4, seed=10), randn(6, 3, 4, 4, seed=11)
    grads = []
    for parts in (1, 3):
        quantizer = act_quantizer(kind)
        for piece, grad in zip(x.chunk(parts), upstream.chunk(parts), strict=True):
            quantizer(piece, 4).backward(grad)
        grads.append([p.grad for p in quantizer.parameters() if p.grad is not None])
    assert len(grads[0]) == (2 if kind == "asymmetric" else 1)
    for whole, summed in zip(*grads, strict=True):
        torch.testing.assert_close(whole, summed, rtol=1e-5, atol=1e-5)


def test_activation_scale_gradient_carries_the_lsq_factor() -> None:
    x = randn(5, 3, 4, 4, seed=12)
    quantizer = act_quantizer("signed")
    quantizer(x, 4).sum().backward()
    ratio = x.double() * 4
    inside = (ratio > -8) & (ratio < 7)
    code = ratio.round().clamp(-8, 7)
    raw = torch.where(inside, code - ratio, code).sum()
    expected = raw / math.sqrt(3 * 4 * 4 * 7)  # one sample's elements, the top code
    assert quantizer.scales["4"].grad.item() == pytest.approx(expected.item(), rel=1e-4)


# --- quantizers ---------------------------------------------------------------------------------

SCHEMES = ("double_rounding", "nested", "nested+8", "centred", "truncate", "adabits", "lsq", "dorefa")


@pytest.mark.parametrize("scheme", SCHEMES)
def test_weight_codes_are_integers_of_their_width(scheme: str) -> None:
    weight = randn(4, 50, seed=13)
    quantizer = weight_quantizer(weight, scheme)
    for bits in BITS:
        codes = quantizer.codes(weight, bits)
        assert codes.dtype == torch.int8
        assert codes.min() >= -(2 ** (bits - 1))
        assert codes.max() <= 2 ** (bits - 1) - 1
        # a code, one value: as many values as codes, and in the same order
        values = quantizer(weight, bits).detach()
        for row, coded in zip(values, codes, strict=True):
            assert len(row.unique()) == len(coded.unique())
            order = torch.argsort(coded.int(), stable=True)
            assert bool((row[order].diff() >= 0).all())


@pytest.mark.parametrize(
    ("scheme", "names"),
    [
        ("double_rounding", {"scale"}),
        ("nested", {"scale"}),
        ("nested+8", {"scale"}),
        ("centred", {"scale"}),
        ("truncate", {"scale"}),
        ("adabits", set()),
        ("lsq", {"scales.8", "scales.4", "scales.2"}),
        ("dorefa", set()),
    ],
)
def test_weight_quantizer_parameters(scheme: str, names: set[str]) -> None:
    quantizer = weight_quantizer(randn(4, 5, seed=14), scheme)
    assert {name for name, _ in quantizer.named_parameters()} == names
    assert all(p.shape == (4,) for p in quantizer.parameters())


def test_activation_codes_match_what_training_saw() -> None:
    x = randn(50, 3, seed=15)
    for kind in ("unsigned", "signed", "asymmetric"):
        quantizer = act_quantizer(kind)
        for bits in BITS:
            codes = quantizer.codes(x, bits).double()
            zero = ZEROS[bits] if kind == "asymmetric" else 0
            expected = quantizer(x, bits).detach().double()
            assert torch.equal((codes - zero) * ACT_SCALES[bits], expected)


def test_scales_do_not_alias_what_they_were_made_from() -> None:
    start = torch.ones(3)
    quantizer = WeightQuantizer({8: start}, bit_choices=BITS, scheme="nested", ties="even", scale_shape=(3,))
    activation = ActivationQuantizer({8: start[:1]}, None, kind="signed")
    start.zero_()
    assert quantizer.scale.tolist() == [1, 1, 1]
    assert activation.scales["8"].tolist() == [1]


def test_activations_are_quantised_in_float32_under_autocast() -> None:
    quantizer = act_quantizer("signed")
    x = randn(4, 8, seed=16)
    expected = quantizer(x, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = quantizer(x, 8)
        lowered = quantizer(x.bfloat16(), 8)
    assert got.dtype == lowered.dtype == torch.float32
    assert torch.equal(got, expected)


def test_layers_run_under_autocast() -> None:
    conv = make_conv("plain")
    layer = QuantConv2d.from_float(conv, weight_quantizer(conv.weight), act_quantizer("signed"))
    x = randn(2, 4, 7, 8, seed=17)
    expected = layer(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = layer(x)
    assert got.dtype == torch.bfloat16
    got.sum().backward()
    torch.testing.assert_close(got.float(), expected, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_layers_survive_deepcopy_and_state_dict(scheme: str) -> None:
    linear = nn.Linear(5, 4)
    layer = QuantLinear.from_float(linear, weight_quantizer(linear.weight, scheme), act_quantizer("asymmetric"))
    layer.select_bits(4, 2)
    twin = copy.deepcopy(layer)
    x = randn(3, 5, seed=18)
    assert (twin.weight_bits, twin.act_bits) == (4, 2)
    assert torch.equal(twin(x), layer(x))
    for parameter in twin.parameters():
        parameter.data.mul_(1.5)
    assert not torch.equal(twin(x), layer(x))
    twin.load_state_dict(layer.state_dict(), strict=True)
    assert torch.equal(twin(x), layer(x))
