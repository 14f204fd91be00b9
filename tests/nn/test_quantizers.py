"""The gradient of a shared weight scale, exact and as the paper prints it."""

import pytest
import torch

from bitdial import QuantConfig, build_model, prepare
from bitdial.nn import WeightQuantizer

BITS = (8, 6, 4, 2)
SHARED = ("double_rounding", "nested", "truncate")


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
