"""A Linear gives the same bits with and without a gradient, however its input lies in memory."""

import torch
from torch import Tensor, nn

from bitdial.nn.linear import linear


def views(sizes: tuple[int, ...], features: int) -> list[Tensor]:
    """Inputs (..., features) of one shape or nearly so: contiguous, transposed, sliced, expanded, with a single row."""
    whole = torch.randn(*sizes, features)
    return [
        whole,
        whole.transpose(0, -2),
        torch.randn(*sizes[:-1], features, sizes[-1]).transpose(-1, -2),
        torch.randn(*sizes, features + 3)[..., 1 : features + 1],
        torch.randn(1, features).expand(*sizes, features),
        whole[:1].transpose(0, -2),
        whole[:0],
    ]


def test_the_bits_are_those_of_a_layer_in_training() -> None:
    torch.manual_seed(0)
    differing = 0
    for sizes in ((5,), (5, 3), (4, 5, 3)):
        for features, outputs, bias in ((24, 3, True), (24, 3, False), (17, 40, True), (17, 40, False)):
            layer = nn.Linear(features, outputs, bias=bias)
            for x in views(sizes, features):
                layer.requires_grad_(True)
                with torch.no_grad():
                    trained = layer(x)
                assert torch.equal(linear(x, layer.weight, layer.bias), trained)
                layer.requires_grad_(False)
                assert torch.equal(linear(x, layer.weight, layer.bias), trained)
                differing += not torch.equal(layer(x), trained)
    assert differing > 0  # if not, PyTorch has changed, and F.linear will do


def test_gradients_and_autocast_are_those_of_a_layer() -> None:
    torch.manual_seed(0)
    layer, x = nn.Linear(6, 4), torch.randn(3, 5, 6).transpose(0, 1)
    found = []
    for multiply in (layer, lambda x: linear(x, layer.weight, layer.bias)):
        layer.zero_grad()
        multiply(x).square().sum().backward()
        found.append([p.grad.clone() for p in layer.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    with torch.autocast("cpu", torch.bfloat16):
        assert linear(x, layer.weight, layer.bias).dtype == layer(x).dtype == torch.bfloat16
