"""Weights whose groups of inputs have a scale: the kernels against the reference, codes and scales bit for bit.

On a GPU they run compiled, elsewhere under Triton's interpreter; see `test_interpreter.py`.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from bitdial import functional as bf
from bitdial import kernels
from bitdial.nn.quantizers import WeightQuantizer

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def some(shape: tuple[int, ...], groups: int, *, low: int) -> tuple[Tensor, Tensor]:
    """A weight with exact ties between the codes of its groups, and their scales, some of them very unequal."""
    generator = torch.Generator().manual_seed(low)
    scale = torch.rand(shape[0], groups, generator=generator) * 0.03 + 1e-4
    scale[0, 0] = 0.5
    used = bf.two_level(scale) * 2.0 ** (8 - low)
    length = torch.Size(shape).numel() // scale.numel()
    codes = torch.randint(-140, 140, (shape[0], groups, length), generator=generator)
    weight = (codes + torch.randint(0, 2, codes.shape, generator=generator) / 2) * used[:, :, None]
    return weight.reshape(shape), scale


def both(weight: Tensor, scale: Tensor, **settings: Any) -> list[list[Tensor]]:
    """Values and gradients, of the kernels and of the reference."""
    found = []
    for device, is_reference in ((DEVICE, False), ("cpu", True)):
        mine, scales = weight.to(device).requires_grad_(), scale.to(device).requires_grad_()
        if is_reference:
            kind = settings.pop("group_scales")
            used = scales if kind == "float" else bf.two_level(scales, half=kind == "half")
            out = bf.fake_quantize(mine, used, **settings)
        else:
            assert kernels.use_triton(mine)
            out = kernels.fake_quantize(mine, scales, **settings)
        out.backward(torch.randn(out.shape, generator=torch.Generator().manual_seed(9)).to(device))
        assert mine.grad is not None
        assert scales.grad is not None
        found.append([out.detach().cpu(), mine.grad.cpu(), scales.grad.cpu()])
        weight, scale = weight.detach().clone(), scale.detach().clone()
    return found


def check(found: list[list[Tensor]]) -> None:
    for got, expected in zip(found[0][:2], found[1][:2], strict=True):
        assert torch.equal(got, expected)
    largest = float(found[1][2].abs().max())
    torch.testing.assert_close(found[0][2], found[1][2], rtol=2e-4, atol=1e-5 * largest)


@pytest.mark.interpreter(only=True)
@pytest.mark.parametrize("scheme", ["double_rounding", "nested", "nested+8", "centred", "truncate", "lsq"])
@pytest.mark.parametrize("low", [8, 4, 3, 2])
@pytest.mark.parametrize("group_scales", bf.GROUP_SCALES)
def test_values_and_gradients(scheme: str, low: int, group_scales: str) -> None:
    high = 8 if bf.scheme_of(scheme).narrows else low
    weight, scale = some((6, 96), 3, low=low)
    check(both(weight, scale, high=high, low=low, scheme=scheme, gradient_scale=0.7, group_scales=group_scales))


@pytest.mark.interpreter(only=True)
@pytest.mark.parametrize(
    ("shape", "groups"), [((1, 4), 2), ((3, 30), 3), ((2, 48 * 32), 48), ((2, 6000), 2), ((4, 12, 3, 3), 4)], ids=str
)
def test_any_number_of_groups_of_any_length(shape: tuple[int, ...], groups: int) -> None:
    """More than a program takes at a time, sizes that are no powers of two, the filters of a convolution."""
    weight, scale = some(shape, groups, low=4)
    check(both(weight, scale, high=8, low=4, gradient_scale=0.7, group_scales="integer"))


@pytest.mark.interpreter(only=True)
def test_quantizers_hand_on_how_scales_are_used() -> None:
    """The parameter goes to the kernel as it is, and there it becomes what `scale_of` says."""
    weight, scale = some((4, 64), 2, low=4)
    for kind in bf.GROUP_SCALES:
        made = {"bit_choices": (8, 4), "scheme": "double_rounding", "ties": "even", "scale_shape": (4, 2)}
        quantizer = WeightQuantizer({8: scale}, **made, group_scales=kind).to(DEVICE)  # type: ignore[arg-type]
        for bits in (8, 4):
            values = quantizer(weight.to(DEVICE), bits)
            codes = quantizer.codes(weight.to(DEVICE), bits)
            used = quantizer.scale_of(weight.to(DEVICE), bits).detach()
            assert torch.equal(values, bf.dequantize(codes, used, shift=8 - bits))


@pytest.mark.interpreter(only=True)
def test_values_come_in_the_type_of_autocast() -> None:
    weight, scale = some((4, 64), 2, low=4)
    with torch.autocast(DEVICE, torch.bfloat16):
        out = kernels.fake_quantize(weight.to(DEVICE), scale.to(DEVICE), high=8, low=4, group_scales="integer")
    assert out.dtype == torch.bfloat16


@pytest.mark.slow
@pytest.mark.parametrize("group_scales", bf.GROUP_SCALES)
def test_the_kernels_compile(compiled: Any, group_scales: str) -> None:
    weight, scale = torch.zeros(8, 576, requires_grad=True), torch.ones(8, 18, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        kernels.fake_quantize(weight, scale, high=8, low=4, group_scales=group_scales).sum().backward()
    assert {launch.name for launch in compiled} == {"_group_forward", "_group_backward"}
    assert [launch.spilled for launch in compiled] == [0, 0]
