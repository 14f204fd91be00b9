"""The root-mean-square norm: the kernels against the formula in float64.

On a GPU they run compiled, elsewhere under Triton's interpreter; see `test_interpreter.py`.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from bitdial.kernels.rms_norm import MOST_COLUMNS, add_and_norm, takes_norm
from bitdial.kernels.triton.training import rms_norm as triton_norm

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EPS = 0.01


def formula(x: Tensor, added: Tensor | None, gain: Tensor) -> tuple[Tensor, Tensor]:
    total = x if added is None else x + added
    return total, total / (total.square().mean(dim=-1, keepdim=True) + EPS).sqrt() * gain


def gradients(outputs: tuple[Tensor, Tensor], leaves: list[Tensor], *, joined: bool) -> list[Tensor]:
    """Those of both outputs, or of the norm alone, for gradients that look random."""
    generator = torch.Generator().manual_seed(5)
    given = [torch.randn(y.shape, generator=generator).to(y.device, y.dtype) for y in outputs]
    used = slice(0, 2) if joined else slice(1, 2)
    return list(torch.autograd.grad(outputs[used], leaves, given[used]))


def some(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.interpreter(only=True)
@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (2, 5, 576), (4, 2100)], ids=str)
@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("joined", [False, True])
def test_values_and_gradients(shape: tuple[int, ...], adds: bool, joined: bool) -> None:
    numbers = [some(shape, 1), *([some(shape, 2)] if adds else []), some(shape[-1:], 3)]
    exact = [x.double().requires_grad_() for x in numbers]
    leaves = [x.to(DEVICE).requires_grad_() for x in numbers]
    assert takes_norm(leaves[0], leaves[-1])
    expected = formula(exact[0], exact[1] if adds else None, exact[-1])
    found = add_and_norm(leaves[0], leaves[1] if adds else None, leaves[-1], EPS, torch.float32)
    for mine, one in zip(found, expected, strict=True):
        torch.testing.assert_close(mine.detach().double().cpu(), one.detach(), rtol=1e-5, atol=1e-5)
    both = (gradients(found, leaves, joined=joined), gradients(expected, exact, joined=joined))
    for mine, one in zip(*both, strict=True):
        torch.testing.assert_close(mine.double().cpu(), one, rtol=1e-4, atol=1e-4)


@pytest.mark.interpreter(only=True)
def test_rows_are_shared_among_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few programs take several tiles each, and the last one less than the others."""
    monkeypatch.setattr(triton_norm, "PROGRAMS", 3)
    test_values_and_gradients((37, 300), adds=True, joined=True)


@pytest.mark.interpreter(only=True)
def test_types_of_a_training_step() -> None:
    """A float32 sum of what is float32 and bfloat16, its norm in bfloat16, gradients in the types of the inputs."""
    x, gain = some((6, 96), 1).to(DEVICE).requires_grad_(), some((96,), 3).to(DEVICE).requires_grad_()
    added = some((6, 96), 2).to(DEVICE, torch.bfloat16).requires_grad_()
    total, y = add_and_norm(x, added, gain, EPS, torch.bfloat16)
    assert (total.dtype, y.dtype) == (torch.float32, torch.bfloat16)
    torch.testing.assert_close(total, x + added, rtol=0.0, atol=0.0)
    exact = [t.detach().double().cpu().requires_grad_() for t in (x, added, gain)]
    expected = formula(*exact)  # type: ignore[arg-type]
    # the interpreter cuts bits off where the GPU rounds
    torch.testing.assert_close(y.double().cpu(), expected[1], rtol=2**-7, atol=1e-6)
    (total.sum() + (3 * y.float()).sum()).backward()
    (expected[0].sum() + (3 * expected[1]).sum()).backward()
    for mine, one in zip((x, added, gain), exact, strict=True):
        assert mine.grad is not None
        assert mine.grad.dtype == mine.dtype
        torch.testing.assert_close(mine.grad.double().cpu(), one.grad, rtol=2**-7, atol=1e-4)


@pytest.mark.interpreter(only=True)
def test_gradients_that_nobody_wants() -> None:
    """A gain that stays as it is has none; where only the sum is used, its gradient goes through."""
    x, gain = some((3, 8), 1).to(DEVICE).requires_grad_(), torch.ones(8, device=DEVICE)
    total, y = add_and_norm(x, None, gain, EPS, torch.float32)
    y.sum().backward(retain_graph=True)
    assert gain.grad is None
    x.grad = None
    (2 * total).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, torch.full_like(x, 2.0))


@pytest.mark.interpreter(only=True)
@pytest.mark.filterwarnings("ignore:invalid value encountered")
def test_what_is_not_finite_stays_in_its_row() -> None:
    x = some((3, 8), 1).to(DEVICE)
    x[1, 2] = float("nan")
    y = add_and_norm(x, None, torch.ones(8, device=DEVICE), EPS, torch.float32)[1]
    assert torch.isfinite(y).all(dim=1).tolist() == [True, False, True]


def test_what_is_not_served() -> None:
    rows = torch.zeros(2, 8)
    for x, gain in (
        (rows, torch.ones(7)),
        (rows.double(), torch.ones(8)),
        (rows, torch.ones(8).double()),
        (rows[:0], torch.ones(8)),
        (torch.zeros(1, MOST_COLUMNS + 1), torch.ones(MOST_COLUMNS + 1)),
    ):
        assert not takes_norm(x.to(DEVICE), gain.to(DEVICE))


@pytest.mark.slow
@pytest.mark.parametrize("columns", [576, MOST_COLUMNS])
def test_the_kernels_compile(compiled: Any, columns: int) -> None:
    gain = torch.ones(columns, requires_grad=True)
    x = torch.zeros(16, columns, requires_grad=True)
    added = torch.zeros(16, columns, dtype=torch.bfloat16, requires_grad=True)
    for given in (None, added):
        total, y = add_and_norm(x, given, gain, EPS, torch.bfloat16)
        (total.sum() + y.sum()).backward()
    assert [launch.name for launch in compiled] == 2 * ["_rms_forward", "_rms_backward"]
    assert [launch.spilled for launch in compiled] == [0, 0, 0, 0]
