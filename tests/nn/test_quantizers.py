"""The gradient of a shared weight scale, exact and as the paper prints it; scales of groups of inputs."""

from typing import Any

import numpy as np
import pytest
import torch

from bitdial import QuantConfig, build_model, prepare
from bitdial import functional as bf
from bitdial.nn import WeightQuantizer

BITS = (8, 6, 4, 2)
SHARED = ("double_rounding", "nested", "nested+8", "centred", "truncate")


def gradients(scheme: str, bits: int, scale_gradient: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Output, gradient of the weight and gradient of the scale, for a weight partly outside the range."""
    weight = torch.randn(3, 5, 3, 3, generator=torch.Generator().manual_seed(0)).requires_grad_()
    quantizer = WeightQuantizer(
        {8: torch.tensor([0.01, 0.02, 0.03])},
        bit_choices=BITS,
        scheme=scheme,
        ties="even",
        scale_shape=(3,),
        scale_gradient=scale_gradient,
    )
    output = quantizer(weight, bits)
    output.backward(torch.randn(output.shape, generator=torch.Generator().manual_seed(1)))
    assert weight.grad is not None
    assert quantizer.scale.grad is not None
    return output.detach(), weight.grad, quantizer.scale.grad


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("scheme", SHARED)
def test_the_printed_gradient_lacks_the_factor_and_nothing_else(scheme: str, bits: int) -> None:
    exact, printed = gradients(scheme, bits, "exact"), gradients(scheme, bits, "printed")
    assert torch.equal(printed[0], exact[0])
    assert torch.equal(printed[1], exact[1])
    assert bool((exact[2] != 0).all())
    assert torch.equal(printed[2] * 2 ** (8 - bits), exact[2])


def test_the_printed_gradient_is_the_papers() -> None:
    """Inside the range: (W_l - W / (s 2^shift)), summed over the channel; LSQ's 1 / sqrt(N Qp) besides."""
    scale, bits = 0.01, 4
    weight = torch.tensor([[0.31, -0.5, 0.77, 0.02]])
    quantizer = WeightQuantizer(
        {8: torch.tensor([scale])},
        bit_choices=BITS,
        scheme="double_rounding",
        ties="even",
        scale_shape=(1,),
        scale_gradient="printed",
    )
    quantizer(weight, bits).sum().backward()
    ratio = weight / (scale * 2**4)
    expected = (quantizer.codes(weight, bits) - ratio).sum() / (weight.numel() * 7) ** 0.5
    torch.testing.assert_close(quantizer.scale.grad, expected.reshape(1))


@pytest.mark.parametrize("scale_gradient", ["exact", "printed"])
def test_prepare_hands_it_on(scale_gradient: str) -> None:
    float_model = build_model("cifar_resnet", blocks=1, width=4, in_channels=1)
    model = prepare(float_model, QuantConfig(scale_gradient=scale_gradient), torch.rand(4, 1, 8, 8))
    found = {m.scale_gradient for m in model.modules() if isinstance(m, WeightQuantizer)}
    assert found == {scale_gradient}


# --- groups of inputs ---------------------------------------------------------------------------

NARROWING = ("double_rounding", "nested", "nested+8", "centred", "truncate", "adabits")
SHAPES = {(3, 12): (2, 3, 4, 6), (2, 6, 3): (2, 3), (4, 8, 2, 3): (1, 2, 4), (1, 64): (32,), (2, 4, 1, 2, 2): (2,)}


def grouped(
    shape: tuple[int, ...], size: int, scheme: str, *, group_scales: str = "integer", **settings: Any
) -> tuple[torch.Tensor, WeightQuantizer]:
    """A weight partly outside the range, and its quantizer with groups of `size`; the scales of a row differ widely."""
    generator = torch.Generator().manual_seed(size)
    weight = torch.randn(shape, generator=generator).requires_grad_()
    scale_shape = (shape[0], shape[1] // size)
    scale = 0.01 * 40 ** -torch.rand(scale_shape, generator=generator)
    quantizer = WeightQuantizer(
        {8: scale}, bit_choices=BITS, scheme=scheme, ties="even", scale_shape=scale_shape, group_scales=group_scales,
        **settings,
    )  # fmt: skip
    return weight, quantizer


def by_hand(scale: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rows' scales and multipliers in float32: the largest of a row is 15, the others the nearest of 1 to 15."""
    rows = (scale.max(axis=1) / np.float32(15)).astype(np.float32)
    multipliers = np.clip(np.rint((scale / rows[:, None]).astype(np.float32)), 1, 15)
    return rows, multipliers.astype(np.float32)


def test_the_scale_in_use_is_exactly_row_times_multiplier_and_what_is_stored_gives_it_back() -> None:
    for shape, sizes in SHAPES.items():
        for size in sizes:
            weight, quantizer = grouped(shape, size, "double_rounding")
            scale = quantizer.scale_of(weight, 8).detach()
            rows, multipliers = by_hand(quantizer.scale.detach().numpy())
            assert np.array_equal(scale.numpy(), rows[:, None] * multipliers)
            stored_rows, stored = bf.split_scale(scale)
            assert stored.dtype == torch.uint8
            assert np.array_equal(stored_rows.numpy(), rows)
            assert np.array_equal(stored.numpy(), multipliers)
            assert torch.equal(bf.join_scale(stored_rows, stored), scale)
            assert torch.equal(bf.two_level(scale), scale)
            _, floats = grouped(shape, size, "double_rounding", group_scales="float")
            assert torch.equal(floats.scale_of(weight, 8), floats.scale)


def test_two_levels_split_again_are_the_same_for_every_float_of_a_row() -> None:
    """row * 15 / 15 is the row, though row * 15 is rounded: all mantissas, with each multiplier beside the 15."""
    largest = (torch.arange(1 << 23, dtype=torch.int32) | 0x3F800000).view(torch.float32)
    for start in range(0, 1 << 23, 1 << 21):
        part = largest[start : start + (1 << 21)]
        for other in (1.0, 7.0, 14.0):
            scale = bf.two_level(torch.stack([part, part * other / 15], dim=1))
            assert torch.equal(bf.two_level(scale), scale)
            assert (bf.split_scale(scale)[1] == torch.tensor([15, int(other)])).all()


def test_a_scale_of_two_levels_above_is_never_below() -> None:
    scale = 40 ** -torch.rand(50, 16, generator=torch.Generator().manual_seed(0))
    above = bf.two_level_above(scale)
    assert (above >= scale * (1 - 2**-22)).all()
    assert torch.equal(bf.two_level(above), above)
    step = above.amax(dim=1, keepdim=True) / 15
    assert (above - scale <= step * (1 + 1e-5)).all()  # the least such


def test_codes_and_values_of_groups_at_every_width() -> None:
    """Codes by the definition, with the scale of each weight at its place; values are dequantised codes."""
    for shape, sizes in SHAPES.items():
        for size in sizes:
            for scheme in NARROWING:
                for group_scales in bf.GROUP_SCALES:
                    weight, quantizer = grouped(shape, size, scheme, group_scales=group_scales)
                    scale = quantizer.scale_of(weight, 8).detach()
                    assert scale.shape == (shape[0], shape[1] // size)
                    each = scale.repeat_interleave(size, dim=1).reshape(*shape[:2], *(1,) * (len(shape) - 2))
                    rule = bf.scheme_of(scheme)
                    ratio = rule.source(weight.detach()) / each
                    stored = (ratio.floor() if scheme in ("centred", "adabits") else ratio.round()) + rule.phase
                    stored = stored.clamp(-128 + rule.phase, 127).to(torch.int8)
                    assert torch.equal(quantizer.codes(weight, 8), stored)
                    for bits in BITS:
                        codes = bf.narrow(stored, high=8, low=bits, scheme=scheme)
                        assert torch.equal(quantizer.codes(weight, bits), codes)
                        values = (codes + rule.offset(8 - bits)) * (each * 2 ** (8 - bits))
                        assert torch.equal(quantizer(weight, bits), values), (shape, size, scheme, bits)


@pytest.mark.parametrize("scale_gradient", ["exact", "printed"])
def test_gradients_of_group_scales_are_sums_over_the_group(scale_gradient: str) -> None:
    """From the definition, in float64: straight through both roundings, LSQ's factor of the elements that share one."""
    for shape, sizes in SHAPES.items():
        for size in sizes:
            for bits in BITS:
                weight, quantizer = grouped(shape, size, "double_rounding", scale_gradient=scale_gradient)
                upstream = torch.randn(shape, generator=torch.Generator().manual_seed(bits))
                quantizer(weight, bits).backward(upstream)
                factor, most = 2 ** (8 - bits), 2 ** (bits - 1) - 1
                scale = quantizer.scale_of(weight, 8).detach().double()
                each = scale.repeat_interleave(size, dim=1).reshape(*shape[:2], *(1,) * (len(shape) - 2))
                reach = weight.detach().double() / (each * factor)
                inside = (reach > -most - 1) & (reach < most)
                codes = quantizer.codes(weight, bits).double()
                assert torch.equal(weight.grad, upstream * inside)
                slope = upstream * torch.where(inside, codes - reach, codes) * factor
                expected = slope.reshape(scale.numel(), -1).sum(dim=1).reshape(scale.shape)
                expected *= (weight.numel() / scale.numel() * most) ** -0.5
                if scale_gradient == "printed":
                    expected /= factor
                torch.testing.assert_close(quantizer.scale.grad.double(), expected, rtol=1e-4, atol=1e-4)


def test_a_scale_as_a_file_stores_it() -> None:
    assert grouped((3, 12), 4, "double_rounding")[1].scale_bytes == 3 * 4 + 9
    assert grouped((3, 12), 4, "double_rounding", group_scales="float")[1].scale_bytes == 9 * 4
    channels = WeightQuantizer({8: torch.ones(3)}, bit_choices=(8,), scheme="nested", ties="even", scale_shape=(3,))
    assert channels.scale_bytes == 3 * 4
    assert [q.learns_row_scales for q in (channels, grouped((3, 12), 4, "truncate")[1])] == [True, False]
