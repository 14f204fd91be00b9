"""The soft loss against sums in plain Python, and in chunks against itself at once."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from bitdial.train import soft_loss as module
from bitdial.train.soft_loss import soft_loss

LOGITS = torch.tensor([[2.0, 0.0, -1.0], [0.5, 0.5, 3.0]])
OTHERS = torch.tensor([[0.0, 1.0, 0.0], [-2.0, 0.25, 1.0]])


def softmax(row: list[float], temperature: float) -> list[float]:
    powers = [math.exp(value / temperature) for value in row]
    return [power / sum(powers) for power in powers]


def divergence(student: Tensor, target: Tensor, temperature: float) -> float:
    """T^2 * KL(target || student), averaged over the rows, in plain Python."""
    total = 0.0
    for mine, wanted in zip(student.tolist(), target.tolist(), strict=True):
        pairs = zip(softmax(mine, temperature), softmax(wanted, temperature), strict=True)
        total += sum(p * math.log(p / q) for q, p in pairs)
    return temperature**2 * total / len(student)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 4.0])
def test_soft_loss_by_hand(temperature: float) -> None:
    expected = divergence(LOGITS, OTHERS, temperature)
    assert float(soft_loss(LOGITS, OTHERS, temperature)) == pytest.approx(expected, rel=1e-5)
    assert expected > 0.1


def test_soft_loss_is_zero_for_equal_predictions_and_blind_to_a_shift() -> None:
    assert float(soft_loss(LOGITS, LOGITS + 5.0, 2.0)) == pytest.approx(0.0, abs=1e-6)


def test_soft_loss_averages_over_all_dimensions_but_the_last() -> None:
    student, target = torch.randn(2, 4, 3), torch.randn(2, 4, 3)
    flat = divergence(student.reshape(8, 3), target.reshape(8, 3), 1.0)
    assert float(soft_loss(student, target, 1.0)) == pytest.approx(flat, rel=1e-5)


def test_soft_loss_gradient_is_the_difference_of_the_probabilities() -> None:
    """d/dz of T^2 KL(p || softmax(z / T)) = T (q - p), a mean over the batch."""
    student = LOGITS.clone().requires_grad_()
    soft_loss(student, OTHERS, 3.0).backward()
    expected = 3.0 * (F.softmax(LOGITS / 3, dim=1) - F.softmax(OTHERS / 3, dim=1)) / 2
    torch.testing.assert_close(student.grad, expected)


def test_soft_loss_is_taken_in_float32() -> None:
    assert soft_loss(LOGITS.bfloat16(), OTHERS.bfloat16(), 1.0).dtype == torch.float32


def both(
    logits: Tensor, targets: Tensor, temperature: float, largest: int, monkeypatch: pytest.MonkeyPatch
) -> tuple[Tensor, Tensor]:
    """The loss and the gradient of three times it, with no more than `largest` logits at once."""
    monkeypatch.setattr(module, "LARGEST", largest)
    student = logits.clone().requires_grad_()
    loss = soft_loss(student, targets, temperature)
    (loss * 3.0).backward()
    assert student.grad is not None
    return loss.detach(), student.grad


@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_in_chunks_it_is_the_same(temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of one row, of three (which do not divide the rows), of all."""
    generator = torch.Generator().manual_seed(0)
    logits, targets = (4 * torch.randn(2, 4, 50, generator=generator) for _ in range(2))
    whole, gradient = both(logits, targets, temperature, 1 << 24, monkeypatch)
    expected = divergence(logits.reshape(8, 50), targets.reshape(8, 50), temperature)
    assert float(whole) == pytest.approx(expected, rel=1e-5)
    for largest in (1, 3 * 50, 8 * 50 - 1):
        loss, found = both(logits, targets, temperature, largest, monkeypatch)
        assert float(loss) == pytest.approx(float(whole), rel=1e-6)
        torch.testing.assert_close(found, gradient, rtol=1e-5, atol=1e-7)


def test_chunks_keep_no_float32_copy_of_the_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the backward pass needs is the two tensors that were given, in their own dtype."""
    monkeypatch.setattr(module, "LARGEST", 10)
    logits, targets = torch.randn(6, 5, dtype=torch.bfloat16, requires_grad=True), torch.randn(6, 5).bfloat16()
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = soft_loss(logits, targets, 1.0)
    large = [tensor for tensor in kept if tensor.numel() >= logits.numel()]
    assert [tensor.dtype for tensor in large] == [torch.bfloat16, torch.bfloat16]
    loss.backward()
    assert logits.grad is not None
    assert logits.grad.dtype == torch.bfloat16
