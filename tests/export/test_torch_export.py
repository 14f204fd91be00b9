"""torch.export takes a live model, and the program gives the same bits."""

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from bitdial import BitPlan, build_model, set_bits

from .conftest import WIDTHS, images


def exported(live: nn.Module, x: Tensor, *, strict: bool = False) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, about its own parts
        program = torch.export.export(live, (x,), dynamic_shapes=({0: torch.export.Dim("batch")},), strict=strict)
        return program.module()


@pytest.mark.parametrize(
    ("scheme", "kind"),
    [("double_rounding", "auto"), ("nested", "asymmetric"), ("lsq", "auto"), ("nested", "float")],
)
def test_the_program_gives_the_same_bits(mixed: Callable[..., nn.Module], scheme: str, kind: str) -> None:
    live = mixed(scheme=scheme, activations=kind)
    widths = WIDTHS if scheme == "double_rounding" else (8, 2)
    for setting in (*widths, BitPlan({"conv": (2, 8), "hidden": 3}, default=6)):
        set_bits(live, setting)
        program = exported(live, images(2, channels=2, size=10))
        for count in (1, 2, 7):
            x = images(count, channels=2, size=10, count=count)
            assert torch.equal(program(x), live(x)), (setting, count)


@pytest.mark.parametrize("strict", [False, True])
def test_a_residual_network(make_live: Callable[..., nn.Module], strict: bool) -> None:
    x = images(1, channels=1, size=8)
    live = make_live(build_model("cifar_resnet", blocks=1, width=8, in_channels=1), x)
    set_bits(live, 4)
    program = exported(live, x, strict=strict)
    set_bits(live, 2)
    at_two = live(x)
    set_bits(live, 4)
    assert torch.equal(program(x), live(x)), "the program keeps the setting that it was made at"
    assert not torch.equal(program(x), at_two)


def test_the_program_refuses_what_the_model_refuses(mixed: Callable[..., nn.Module]) -> None:
    live = mixed()
    x = images(2, channels=2, size=10)
    program = exported(live, x)
    x[0, 0, 3, 3] = float("nan")
    with pytest.raises(RuntimeError, match="layer 'conv': its input holds NaN or infinity"):
        program(x)
