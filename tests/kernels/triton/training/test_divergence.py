"""The kernels of the soft loss against plain PyTorch in float64.

On a GPU they run compiled, elsewhere under Triton's interpreter; see `test_interpreter.py`.
"""

import os
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from bitdial.kernels.divergence import divergence, takes_divergence
from bitdial.train import soft_loss as module

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def logits(rows: int, count: int, *, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Random rows; the largest is in another place, and of another size, in each."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, count, generator=generator) * torch.arange(1, rows + 1)[:, None] * 3 - 20).to(dtype)


def expected(student: Tensor, target: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """The loss and the gradient of three times it."""
    leaf = student.detach().cpu().double().requires_grad_()
    mine, wanted = (F.log_softmax(x / temperature, dim=1) for x in (leaf, target.double()))
    loss = F.kl_div(mine, wanted, reduction="none", log_target=True).sum(dim=1).mean() * temperature**2
    (3.0 * loss).backward()
    assert leaf.grad is not None
    return loss.detach(), leaf.grad


@pytest.mark.interpreter(only=True)
@pytest.mark.parametrize("count", [1, 7, 4096, 9001])
@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_loss_and_gradient(count: int, temperature: float) -> None:
    student, target = logits(3, count, seed=1), logits(3, count, seed=2)
    loss, gradient = expected(student, target, temperature)
    leaf = student.to(DEVICE).requires_grad_()
    assert takes_divergence(leaf, target.to(DEVICE))
    found = divergence(leaf, target.to(DEVICE), temperature)
    (3.0 * found).backward()
    assert found.dtype == torch.float32
    assert leaf.grad is not None
    torch.testing.assert_close(found.double().cpu(), loss, rtol=2e-5, atol=1e-6)
    torch.testing.assert_close(leaf.grad.double().cpu(), gradient, rtol=2e-4, atol=1e-6)


@pytest.mark.interpreter(only=True)
def test_a_language_models_logits_go_to_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """In 16 bits, the target in another dtype and layout, when there are more logits than are taken at once."""
    student, target = logits(4, 300, seed=3, dtype=torch.bfloat16), logits(4, 600, seed=4)[:, ::2]
    leaf = student.to(DEVICE).requires_grad_()
    monkeypatch.setattr(module, "LARGEST", 4 * 300 - 1)
    found = module.soft_loss(leaf, target.to(DEVICE), 1.0)
    (3.0 * found).backward()
    loss, gradient = expected(student, target, 1.0)
    assert leaf.grad is not None
    assert leaf.grad.dtype == torch.bfloat16
    assert found.grad_fn is not None
    assert "Chunks" not in found.grad_fn.name()
    torch.testing.assert_close(found.double().cpu(), loss, rtol=2e-5, atol=1e-6)
    # the interpreter cuts bits off where the GPU rounds
    torch.testing.assert_close(leaf.grad.double().cpu(), gradient, rtol=2**-7, atol=1e-6)


@pytest.mark.interpreter(only=True)
@pytest.mark.filterwarnings("ignore:invalid value encountered")  # numpy says so of inf - inf in the interpreter
@pytest.mark.parametrize("odd", [float("nan"), float("inf")])
@pytest.mark.parametrize("place", [0, 4999])
def test_what_is_not_finite_is_not_hidden(odd: float, place: int) -> None:
    student, target = logits(2, 5000, seed=5).to(DEVICE), logits(2, 5000, seed=6).to(DEVICE)
    student[1, place] = odd
    assert not bool(torch.isfinite(divergence(student, target, 1.0)))


@pytest.mark.slow
def test_the_kernels_compile(compiled: Any) -> None:
    leaf = torch.zeros(2, 49152, dtype=torch.bfloat16, requires_grad=True)
    divergence(leaf, torch.zeros(2, 49152, dtype=torch.bfloat16), 1.0).backward()
    assert {launch.name for launch in compiled} == {"_divergence_forward", "_divergence_backward"}
    assert [launch.spilled for launch in compiled] == [0, 0]
