"""Rotations against matrices written out."""

import math

import pytest
import torch
from torch import Tensor

from bitdial.functional.rotation import across, half_power, largest_block, turn, turn_back, walsh_hadamard

WIDTHS = (1, 2, 3, 7, 8, 10, 48, 64, 96, 128, 576)


def hadamard(size: int) -> Tensor:
    """Sylvester's construction."""
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < size:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return matrix


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def test_hadamard_is_the_product_with_the_matrix() -> None:
    for size in (1, 2, 4, 8, 64, 128):
        x = random(3, 5, 2 * size)
        expected = (x.unflatten(-1, (2, size)) @ hadamard(size)).flatten(-2)
        torch.testing.assert_close(walsh_hadamard(x, size), expected, rtol=0, atol=1e-12)


def test_hadamard_of_whole_numbers_is_exact_in_float32() -> None:
    codes = torch.randint(-(1 << 17), 1 << 17, (40, 64), generator=torch.Generator().manual_seed(0))
    found = walsh_hadamard(codes.float(), 64) * half_power(64)
    assert torch.equal(found * 8, (codes.double() @ hadamard(64)).float())


def test_hadamard_does_not_depend_on_what_is_beside() -> None:
    x = random(9, 128).float()
    whole = walsh_hadamard(x, 64)
    for i in range(9):
        assert torch.equal(walsh_hadamard(x[i : i + 1], 64), whole[i : i + 1])
    assert torch.equal(walsh_hadamard(x.t().contiguous().t(), 64), whole), "laid out otherwise"


def test_powers_of_two() -> None:
    for size in (1, 2, 4, 8, 16, 32, 64, 128, 4096):
        assert math.frexp(half_power(size))[0] == 0.5
        assert half_power(size) ** 2 * size in (1.0, 2.0)
    assert [largest_block(width) for width in (1, 6, 64, 576, 11008)] == [1, 2, 64, 64, 256]


@pytest.mark.parametrize("width", WIDTHS)
def test_turns_are_rotations_that_spread(width: int) -> None:
    signs = random(width).sign()
    matrix = across(width)
    rotation = turn(torch.eye(width, dtype=torch.float64), signs, matrix)
    torch.testing.assert_close(rotation @ rotation.T, torch.eye(width, dtype=torch.float64), rtol=0, atol=1e-12)
    assert float(rotation.abs().max()) <= math.sqrt(2 / width) + 1e-12 or width <= 2, "no entry is large"
    x = random(4, 3, width)
    torch.testing.assert_close(turn(x, signs, matrix), x @ rotation, rtol=0, atol=1e-12)
    torch.testing.assert_close(turn_back(turn(x, signs, matrix), signs, matrix), x, rtol=0, atol=1e-12)
    size = largest_block(width)
    dense = torch.diag(signs) @ torch.kron(across(width) * half_power(size), hadamard(size))
    torch.testing.assert_close(rotation, dense, rtol=0, atol=1e-12)


def test_gradients_go_through() -> None:
    x, signs = random(2, 12).requires_grad_(), random(12).sign()
    assert torch.autograd.gradcheck(lambda value: turn(value, signs, across(12)), (x,))
