"""A live model on the Triton kernels: the op that reads its words, and the one that switches them."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from bitdial import load, set_bits

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.interpreter(only=True)
@pytest.mark.parametrize(
    ("scheme", "master", "bits"),
    [("nested", "device", 3), ("double_rounding", "device", 4), ("double_rounding", "host", 2)],
)
def test_switched_layers_give_the_values_of_float_kernels(
    saved: Callable[..., Path], decoder: nn.Module, scheme: str, master: str, bits: int
) -> None:
    packed = load(saved(scheme), decoder, kernels="packed", dtype=torch.float16, master=master, device=DEVICE)
    plain = load(saved(scheme), decoder)
    set_bits(packed, bits)
    set_bits(plain, bits)
    x = torch.randn(5, 40, generator=torch.Generator().manual_seed(3)).half()
    y, weight, bias = (
        packed.down(x.to(DEVICE)).cpu(),
        plain.down.engine.active.double(),
        packed.down.bias.double().cpu(),
    )
    exact = x.double() @ weight.T + bias
    bound = 2.0**-11 * exact.abs() + 40 * 2.0**-23 * (x.double().abs() @ weight.T.abs() + bias.abs())
    assert bool(((y.double() - exact).abs() <= bound).all())
