"""Columns rounded one after the other: the reference by the definition, the kernel by the reference."""

import os
from typing import Any

import pytest
import torch
from torch import Tensor

from bitdial import functional as bf
from bitdial.calibrate.rounding import segments
from bitdial.kernels.reference import rounding as reference
from bitdial.kernels.rounding import Columns, Meanings, round_columns

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
COMPILED = os.environ.get("TRITON_INTERPRET") != "1" and DEVICE == "cuda"
WIDTHS = [((8, 6, 4, 3), "double_rounding"), ((8, 7, 6, 5, 4, 3, 2), "nested"), ((4, 2), "truncate"), ((8,), "centred")]
SHAPES = [(1, 5, 32), (3, 1, 9), (2, 11, 6), (1, 3, 1)]


def meanings(widths: tuple[int, ...], scheme: str, *, also_highest: bool = True) -> Meanings:
    """What the stored codes mean at `widths`; the highest is the fine one, which can be left out."""
    least, most = bf.scheme_of(scheme).stored_range(widths[0])
    codes = torch.arange(least, most + 1, dtype=torch.int8)
    values = [
        bf.dequantize(
            bf.narrow(codes, high=widths[0], low=b, scheme=scheme), torch.ones(1), shift=widths[0] - b, scheme=scheme
        )
        for b in widths
    ][0 if also_highest else 1 :]
    coarse = values[also_highest:] or [torch.zeros(len(codes))]
    return Meanings(torch.stack(values), segments(coarse), int(also_highest))


def columns(means: Meanings, shape: tuple[int, int, int]) -> Columns:
    """Random codes of a random weight, with correlated inputs."""
    generator, settings, count = torch.Generator().manual_seed(sum(shape)), len(means.values), shape[2]
    mix = torch.randn(count, count, generator=generator)
    x = torch.randn(settings, shape[0], 64, count, generator=generator) @ mix
    codes = torch.randint(0, means.values.shape[1], shape, generator=generator)
    steps = torch.rand(shape, generator=generator) * 0.02 + 0.01
    second = x.transpose(2, 3) @ x / 64
    apart = means.values[:, codes] * steps - torch.randn(shape, generator=generator)
    weights = torch.rand(settings, *shape[:2], generator=generator) + 0.1
    return Columns(codes, steps, apart @ second, second, weights)


def test_each_code_is_the_best_of_all_when_its_turn_comes() -> None:
    """By the error of all codes of one column, the columns before it being rounded already."""
    for widths, scheme in WIDTHS:
        means = meanings(widths, scheme)
        given = columns(means, (2, 4, 6))
        gradients = given.gradients.double()
        found = reference.round_columns(given._replace(gradients=gradients.clone()), means)
        curves = given.second.diagonal(dim1=2, dim2=3)
        for place in range(6):
            own, step = given.codes[:, :, place], given.steps[:, :, place]
            apart = (means.values[:, None, None] - means.values[:, own][..., None]) * step[..., None]
            cost = 2 * apart * gradients[..., place, None] + apart.square() * curves[:, :, None, place, None]
            cost = (cost * given.weights[..., None]).sum(dim=0)
            best = cost.gather(-1, found[:, :, place, None])[..., 0]
            torch.testing.assert_close(best, cost.amin(dim=-1), rtol=1e-4, atol=1e-4)
            change = (means.values[:, found[:, :, place]] - means.values[:, own]) * step
            gradients += change[..., None] * given.second[:, :, None, place]


@pytest.mark.interpreter(only=True)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("widths, scheme", WIDTHS)
@pytest.mark.parametrize("also_highest", [True, False])
def test_the_kernel_gives_the_codes_of_the_reference(
    widths: tuple[int, ...], scheme: str, shape: tuple[int, int, int], also_highest: bool
) -> None:
    """On a GPU a multiply-add rounds once: there, a code may be another where two are as good as each other."""
    if len(widths) == 1 and not also_highest:
        return
    means = meanings(widths, scheme, also_highest=also_highest)
    given = columns(means, shape)
    mine = Columns(*(tensor.to(DEVICE, copy=True) for tensor in given))
    theirs = given._replace(gradients=given.gradients.clone())
    found = round_columns(mine, Meanings(means.values.to(DEVICE), means.runs.to(DEVICE), means.fine))
    wanted = reference.round_columns(theirs, means)
    assert found.dtype == torch.int64
    if not COMPILED:
        assert torch.equal(found, wanted)
        assert torch.equal(mine.gradients, theirs.gradients)
        return
    same = (found.cpu() == wanted).all(dim=2)
    assert float(same.double().mean()) > 0.8
    scale = float(theirs.gradients.abs().max())
    torch.testing.assert_close(mine.gradients.cpu()[:, same], theirs.gradients[:, same], rtol=1e-3, atol=1e-4 * scale)


@pytest.mark.slow
def test_the_kernel_compiles(compiled: Any) -> None:
    """Also for many columns at once, as those of a group of inputs; what a program holds is in registers."""
    for widths, scheme in WIDTHS:
        for count in (9, 32, 128):
            means = meanings(widths, scheme)
            round_columns(columns(means, (1, 8, count)), means)
    assert len(compiled) == 12
    assert {launch.name for launch in compiled} == {"_round_columns"}
    assert max(launch.spilled for launch in compiled) <= 64


def test_what_the_kernel_cannot_take_is_the_references(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bitdial.kernels.rounding.use_triton", lambda tensor: True)
    means = meanings(*WIDTHS[0])

    def doubled(tensor: Tensor) -> Tensor:
        return tensor.double() if tensor.is_floating_point() else tensor

    given = Columns(*map(doubled, columns(means, (1, 3, 4))))
    again = given._replace(gradients=given.gradients.clone())
    means = means._replace(values=means.values.double())
    assert torch.equal(round_columns(given, means), reference.round_columns(again, means))
