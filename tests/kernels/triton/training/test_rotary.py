"""Rotary position embeddings: the kernel against the formula in float64.

On a GPU it runs compiled, elsewhere under Triton's interpreter; see `test_interpreter.py`.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from bitdial.kernels.rotary import MOST_VALUES, rotate, takes_rotary

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def formula(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos[:, None] + torch.cat((-second, first), dim=-1) * sin[:, None]


def some(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def given(rows: int, heads: int, keys: int, length: int, size: int, *, angles: int) -> list[Tensor]:
    """Queries and keys as projections leave them; `cos` and `sin` differ between the halves, which kernels allow."""
    q, k = (some((rows, length, count, size), seed).transpose(1, 2) for seed, count in ((1, heads), (2, keys)))
    return [q, k, some((angles, length, size), 3), some((angles, length, size), 4)]


@pytest.mark.interpreter(only=True)
@pytest.mark.parametrize(
    "sizes", [(2, 9, 3, 5, 64, 1), (2, 4, 4, 3, 16, 2), (1, 1, 1, 1, 2, 1), (3, 3, 1, 2, 20, 3)], ids=str
)
@pytest.mark.parametrize("layout", ["as projected", "contiguous", "gaps"])
def test_values_and_gradients(sizes: tuple[int, ...], layout: str) -> None:
    q, k, cos, sin = given(*sizes[:5], angles=sizes[5])
    exact = [x.double().requires_grad_() for x in (q, k)]
    leaves = [x.to(DEVICE).requires_grad_() for x in (q, k)]
    if layout == "contiguous":
        leaves = [x.detach().contiguous().requires_grad_() for x in leaves]
    used = [torch.stack((x, x), dim=-1)[..., 0] for x in leaves] if layout == "gaps" else leaves
    cos_there, sin_there = cos.to(DEVICE), sin.to(DEVICE)
    assert takes_rotary(*used, cos_there, sin_there)
    found = rotate(*used, cos_there, sin_there)
    expected = [formula(x, cos.double(), sin.double()) for x in exact]
    grads = [some(tuple(y.shape), 5) for y in expected]
    mine = torch.autograd.grad(found, leaves, [grad.to(DEVICE) for grad in grads])
    theirs = torch.autograd.grad(expected, exact, [grad.double() for grad in grads])
    for got, wanted in zip((*found, *mine), (*expected, *theirs), strict=True):
        torch.testing.assert_close(got.detach().double().cpu(), wanted.detach(), rtol=1e-5, atol=1e-5)


@pytest.mark.interpreter(only=True)
def test_types_of_a_training_step() -> None:
    """Under autocast results are in its type, and gradients in that of the inputs; without it in the angles' type."""
    q, k, cos, sin = (x.to(DEVICE) for x in given(1, 2, 1, 3, 16, angles=1))
    q, k = q.bfloat16().requires_grad_(), k.bfloat16().requires_grad_()
    with torch.autocast(DEVICE, torch.bfloat16):
        found = rotate(q, k, cos, sin)
    assert {x.dtype for x in found} == {torch.bfloat16}
    (found[0].sum() + found[1].sum()).backward()
    assert q.grad is not None
    assert q.grad.dtype == torch.bfloat16
    full = rotate(q, k, cos, sin)
    assert {x.dtype for x in full} == {torch.float32}
    # the interpreter cuts bits off where the GPU rounds
    torch.testing.assert_close(found[0].float(), full[0], rtol=2**-7, atol=1e-6)


@pytest.mark.interpreter(only=True)
def test_what_is_not_served() -> None:
    """A part of each head turned, angles by another rule, odd heads, 64-bit numbers, angles that learn."""
    q, k, cos, sin = (x.to(DEVICE) for x in given(2, 3, 1, 4, 16, angles=1))
    assert takes_rotary(q, k, cos, sin)
    odd = (x.to(DEVICE) for x in given(2, 3, 1, 4, 15, angles=1))
    large = (x.to(DEVICE) for x in given(1, MOST_VALUES // 16 + 1, 1, 1, 16, angles=1))
    for others in (
        (q, k, cos[..., :8], sin[..., :8]),
        (q, k, cos[0], sin[0]),
        (q, k, cos[:, :3], sin[:, :3]),
        (q, k[:1], cos, sin),
        (q.double(), k, cos, sin),
        (q[:0], k[:0], cos, sin),
        (q, k, cos.clone().requires_grad_(), sin),
        tuple(odd),
        tuple(large),
    ):
        assert not takes_rotary(*others)


@pytest.mark.slow
def test_the_kernel_compiles(compiled: Any) -> None:
    q, k = (torch.zeros(2, 8, n, 64, dtype=torch.bfloat16, requires_grad=True).transpose(1, 2) for n in (9, 3))
    with torch.autocast("cpu", torch.bfloat16):
        found = rotate(q, k, torch.zeros(1, 8, 64), torch.zeros(1, 8, 64))
    (found[0].sum() + found[1].sum()).backward()
    assert [launch.name for launch in compiled] == ["_rotate", "_rotate"]
    assert [launch.spilled for launch in compiled] == [0, 0]
