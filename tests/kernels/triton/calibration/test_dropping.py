"""Dropping: the kernels take each element from one of two tensors, and gradients go where it came from.

On a GPU they run compiled, elsewhere under Triton's interpreter; see `test_interpreter.py`.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from bitdial.kernels.dropping import Draws, can_drop, drop

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def draws(seed: int = 0) -> Draws:
    return Draws(torch.Generator(DEVICE).manual_seed(seed))


def mask(source: Draws, count: int = 20_000, most: int = 127) -> Tensor:
    """Which elements are dropped by the next draw."""
    zeros = torch.zeros(count, device=DEVICE)
    return drop(zeros, torch.ones_like(zeros), source, most) > 0


@pytest.mark.interpreter(only=True)
@pytest.mark.parametrize("most", [0, 127, 229, 255])
def test_the_share_that_is_dropped(most: int) -> None:
    found = mask(draws(), 100_003, most).float()
    assert abs(float(found.mean()) - (most + 1) / 256) < 5e-3
    for offset in (1, 4, 16, 128, 2048):  # neighbours, lanes, runs, programs
        both = (found[offset:] * found[:-offset]).mean()
        assert abs(float(both) - ((most + 1) / 256) ** 2) < 8e-3, offset


@pytest.mark.interpreter(only=True)
def test_draws_differ_by_seed_iteration_and_number() -> None:
    first, again, other, negative = draws(), draws(), draws(1), draws(-5)
    made = [mask(first), mask(first), mask(other), mask(negative)]
    first.next_iteration()
    made += [mask(first), mask(first)]
    for i, one in enumerate(made):
        for two in made[:i]:
            assert abs(float((one == two).float().mean()) - 0.5) < 0.03
    assert torch.equal(mask(again), made[0])


@pytest.mark.interpreter(only=True)
@pytest.mark.parametrize("shape", [(1,), (3, 5, 7, 9), (2, 8, 33, 31)])
@pytest.mark.parametrize("layout", ["contiguous", "channels_last", "mixed"])
def test_values_and_gradients(shape: tuple[int, ...], layout: str) -> None:
    generator = torch.Generator().manual_seed(1)
    value, plain, grad = (torch.randn(shape, generator=generator).to(DEVICE) for _ in range(3))
    if len(shape) == 4 and layout != "contiguous":
        value = value.contiguous(memory_format=torch.channels_last)
        plain = plain if layout == "mixed" else plain.contiguous(memory_format=torch.channels_last)
    value.requires_grad_()
    plain.requires_grad_()
    assert can_drop(value, plain)
    out = drop(value, plain, draws(), 127)
    out.backward(grad)
    dropped = out == plain
    assert torch.equal(out, torch.where(dropped, plain, value))
    assert value.grad is not None
    assert plain.grad is not None
    assert torch.equal(plain.grad, torch.where(dropped, grad, 0.0))
    assert torch.equal(value.grad, torch.where(dropped, 0.0, grad))
    assert value.grad.stride() == value.stride()


@pytest.mark.interpreter(only=True)
def test_a_gradient_must_come_before_the_next_iteration() -> None:
    value, source = torch.randn(5, device=DEVICE, requires_grad=True), draws()
    out = drop(value, torch.zeros(5, device=DEVICE), source, 127)
    source.next_iteration()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.interpreter(only=True)
def test_what_is_not_alike_is_left_alone() -> None:
    value = torch.zeros(2, 3, device=DEVICE)
    assert can_drop(value, value)
    assert not can_drop(value, value[:1])
    assert not can_drop(value, value.double())
    assert not can_drop(value.half(), value.half())
    assert not can_drop(value[:0], value[:0])


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_recording_draws_as_an_eager_run_does() -> None:
    eager, recorded = draws(), draws()
    wanted = []
    for _ in range(4):
        eager.next_iteration()
        wanted += [mask(eager), mask(eager)]
    mask(draws())  # compiled before the recording
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded.next_iteration()
        found = [mask(recorded), mask(recorded)]
    for iteration in range(4):
        graph.replay()
        assert torch.equal(found[0], wanted[2 * iteration])
        assert torch.equal(found[1], wanted[2 * iteration + 1])


@pytest.mark.slow
def test_the_kernels_compile(compiled: Any) -> None:
    value = torch.zeros(4096, requires_grad=True)
    drop(value, torch.ones(4096, requires_grad=True), draws(), 127).sum().backward()
    assert [launch.name for launch in compiled] == ["_drop_forward", "_drop_backward"]
    assert [launch.spilled for launch in compiled] == [0, 0]
    assert [launch.count(r"bar\.sync") for launch in compiled] == [0, 0], "words stay in their threads"
