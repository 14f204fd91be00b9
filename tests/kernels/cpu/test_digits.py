"""Fixed-point digits of tokens, and their products with integer weights, against whole numbers in float64."""

import math

import pytest
import torch
from torch import Tensor

from bitdial.kernels.cpu import digits as cpu_digits
from bitdial.kernels.cpu.digits import DIGITS, added_up, digit_sums, digits_of, planes_of, prepacked, products_are_exact


def value(x: Tensor) -> Tensor:
    """What the digits of x stand for, in float64."""
    made = digits_of(x)
    digits = made.digits.view(DIGITS, *x.shape).double() - 128
    unit = made.unit.double() if isinstance(made.unit, Tensor) else made.unit
    return (digits * 256.0 ** torch.arange(DIGITS).double()[:, None, None]).sum(0) * unit


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_token_is_its_digits_up_to_a_unit(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x = (torch.randn(6, 50, generator=generator) * torch.logspace(-3, 3, 6)[:, None]).to(dtype)
    x[2, 3], x[3, 4], x[4] = 1.0, -2.0, 0.0
    for tokens in (x, *x.split(1)):
        largest = tokens.double().abs().amax(1, keepdim=True).clamp_min(2.0**-96)
        error = (value(tokens) - tokens.double()).abs()
        assert bool((error < largest * 2.0**-29).all())
        exact = tokens.double().abs() >= largest * 2.0**-5  # all 24 bits are there
        assert bool((error[exact] == 0).all())
    together = digits_of(x).digits.view(DIGITS, 6, 50)
    for i, token in enumerate(x.split(1)):
        assert torch.equal(digits_of(token).digits.view(DIGITS, 1, 50)[:, 0], together[:, i]), "company changes nothing"


def test_numbers_at_the_ends_of_their_range() -> None:
    largest, least = torch.finfo(torch.float32).max, 2.0**-140
    x = torch.tensor([[largest, -largest], [least, 2.0**-96], [0.0, -0.0], [255 / 256, -1.0]])
    for tokens in (x, *x.split(1)):
        limit = tokens.double().abs().amax(1, keepdim=True).clamp_min(2.0**-96) * 2.0**-29
        assert bool(((value(tokens) - tokens.double()).abs() <= limit).all())
        assert digits_of(tokens).finite
    for bad in (math.inf, -math.inf, math.nan):
        assert not digits_of(torch.tensor([[1.0, bad]])).finite
        assert not digits_of(torch.tensor([[1.0, 2.0], [1.0, bad]])).finite


def test_integers_are_their_planes() -> None:
    for integers, planes in (
        (torch.tensor([[-128, 127]]), 1), (torch.tensor([[128, 0], [-129, 5]]), 2), (torch.tensor([[255 * 255]]), 3),
        (torch.arange(-3825, 3826)[None], 2), (torch.zeros(2, 3, dtype=torch.int64), 1),
    ):  # fmt: skip
        made = planes_of(integers.int())
        assert made.dtype == torch.int8
        assert len(made) == planes * len(integers)
        powers = 256 ** torch.arange(planes)[:, None, None]
        assert torch.equal((made.view(planes, *integers.shape) * powers).sum(0), integers)


@pytest.mark.skipif(not products_are_exact(), reason="this CPU has no exact products of bytes")
def test_sums_are_whole_numbers_at_any_size() -> None:
    generator = torch.Generator().manual_seed(0)
    for rows, columns in ((1, 1), (1, 7), (3, 33), (17, 100), (65, 577), (9, cpu_digits.MOST_COLUMNS)):
        weight = torch.randint(-128, 128, (rows, columns), generator=generator, dtype=torch.int8)
        weight[: rows // 2] = -128
        for tokens in (1, 4, 13):
            x = torch.randint(0, 256, (tokens, columns), generator=generator, dtype=torch.uint8)
            x[0] = 255
            exact = ((x.double() - 128) @ weight.double().T).float()
            assert torch.equal(digit_sums(x, prepacked(weight), torch.ones(rows)), exact), (rows, columns, tokens)


def test_parts_are_added_from_the_last_one_on() -> None:
    parts = torch.tensor([1.0, 2.0, -3.0]).view(3, 1, 1)
    assert added_up(parts).item() == 1 + 256 * 2 - 65536 * 3
    assert added_up(parts[:1]).item() == 1


def test_a_product_that_is_missing_or_wrong_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*args: object) -> Tensor:
        raise RuntimeError("no such operator")

    def saturating(digits: Tensor, weight: Tensor, step: Tensor) -> Tensor:
        pairs = (digits.short()[:, None] * weight.to_dense().short()).clamp(-32768, 32767)
        return pairs.sum(-1).float()

    for wrong in (missing, saturating):
        monkeypatch.setattr(cpu_digits, "digit_sums", wrong)
        assert not products_are_exact.__wrapped__()
