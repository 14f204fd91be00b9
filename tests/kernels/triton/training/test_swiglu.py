"""silu(gate) * up: the kernels against the formula in float64.

On a GPU they run compiled, elsewhere under Triton's interpreter; see `test_interpreter.py`.
"""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from bitdial.kernels.swiglu import swiglu, takes_swiglu

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def some(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 4


@pytest.mark.interpreter(only=True)
@pytest.mark.parametrize("shape", [(1,), (3, 7), (2, 3, 1536)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_and_gradients(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    leaves = [some(shape, seed).to(DEVICE, dtype).requires_grad_() for seed in (1, 2)]
    exact = [x.detach().double().cpu().requires_grad_() for x in leaves]
    assert takes_swiglu(*leaves)
    found, expected = swiglu(*leaves), F.silu(exact[0]) * exact[1]
    assert found.dtype == dtype
    grad = some(shape, 3).to(dtype)
    found.backward(grad.to(DEVICE))
    expected.backward(grad.double())
    # in 16 bits the interpreter cuts off where the GPU rounds
    close = {"rtol": 2**-7, "atol": 1e-6} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(found.double().cpu(), expected, **close)
    for mine, one in zip(leaves, exact, strict=True):
        assert mine.grad is not None
        assert mine.grad.dtype == dtype
        torch.testing.assert_close(mine.grad.double().cpu(), one.grad, **close)


@pytest.mark.interpreter(only=True)
def test_other_layouts() -> None:
    gate, up = some((6, 5), 1).to(DEVICE).t(), some((5, 6), 2).to(DEVICE)
    torch.testing.assert_close(swiglu(gate, up), F.silu(gate) * up, rtol=1e-5, atol=1e-5)


@pytest.mark.interpreter(only=True)
def test_what_is_not_served() -> None:
    rows = torch.zeros(2, 3, device=DEVICE)
    assert takes_swiglu(rows, rows)
    for gate, up in ((rows, rows[:1]), (rows, rows.bfloat16()), (rows.double(), rows.double()), (rows[:0], rows[:0])):
        assert not takes_swiglu(gate, up)


@pytest.mark.slow
def test_the_kernels_compile(compiled: Any) -> None:
    gate, up = (torch.zeros(8, 1536, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
    swiglu(gate, up).sum().backward()
    assert {launch.name for launch in compiled} == {"_swiglu_forward", "_swiglu_backward"}
    assert [launch.spilled for launch in compiled] == [0, 0]
