"""An iteration of learning by kernels: the same errors and gradients as by PyTorch's operators.

On a GPU they run compiled, elsewhere under Triton's interpreter; see `test_interpreter.py`.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bitdial import CalibrateConfig, QuantConfig, prepare
from bitdial.calibrate import reconstruct
from bitdial.calibrate.reconstruct import Reconstruction, _Samples
from bitdial.calibrate.reference import float_copy
from bitdial.calibrate.walk import Walk
from bitdial.dial.plan import BitPlan
from bitdial.kernels.cuda_graph import StepGraphs

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BITS = (8, 3)


def learner(drop: float) -> tuple[Reconstruction, Callable[[Tensor], dict[str, Tensor]]]:
    """What learns a block with a depthwise convolution; and what gives its errors and gradients on some samples."""
    torch.manual_seed(0)
    x = torch.randn(4, 3, 6, 6).to(DEVICE)
    model = nn.Sequential(
        nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU()),
        nn.Sequential(nn.Conv2d(4, 4, 3, 2, 1, groups=4, bias=False), nn.BatchNorm2d(4), nn.ReLU6()),
        nn.Sequential(nn.Conv2d(4, 4, 1, bias=False), nn.BatchNorm2d(4), nn.AdaptiveAvgPool2d(1)),
        nn.Sequential(nn.Flatten(), nn.Linear(4, 4)),
    )
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.bias)
    model = prepare(model.to(DEVICE).eval(), QuantConfig(bit_choices=BITS), x)
    walk, settings = Walk(model, [x]), {bits: BitPlan(default=bits) for bits in BITS}
    before, after, block = walk.start(), walk.start(), walk.blocks[0]
    assert "1.0" in block.layers
    after.advance(float_copy(model), block, lambda name, x: None)
    generator = torch.Generator(DEVICE).manual_seed(3)
    learning = Reconstruction(model, block, settings, CalibrateConfig(effort="full", drop=drop), generator)
    samples = _Samples(block, before, dict.fromkeys(BITS, before), after)

    def step(chosen: Tensor) -> dict[str, Tensor]:
        errors = learning._gradients(samples, chosen)
        found = {f"error {bits}": error for bits, error in errors.items()}
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                found[name], parameter.grad = parameter.grad, None
        return found

    def dropping(chosen: Tensor) -> dict[str, Tensor]:
        with learning._dropping():
            return step(chosen)

    return learning, dropping


def close(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert set(found) == set(wanted)
    for name, value in found.items():
        largest = float(wanted[name].abs().max())
        torch.testing.assert_close(value, wanted[name], rtol=1e-3, atol=2e-3 * largest + 1e-7, msg=name)


@pytest.mark.interpreter(only=True)
def test_kernels_find_the_gradients_that_operators_do() -> None:
    chosen = torch.arange(4, device=DEVICE)
    learning, step = learner(drop=0.0)
    quick = step(chosen)
    assert len(quick) > 10
    learning.quick = {}
    close(quick, step(chosen))


@pytest.mark.interpreter(only=True)
def test_iterations_drop_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = torch.arange(4, device=DEVICE)
    step, again = learner(drop=0.5)[1], learner(drop=0.5)[1]
    first, second = step(chosen), step(chosen)
    close(again(chosen), first)
    assert not torch.equal(second["error 3"], first["error 3"])
    monkeypatch.setattr(reconstruct, "can_drop", lambda *given: False)
    assert not torch.equal(again(chosen)["error 3"], second["error 3"])


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_recorded_iteration_finds_what_an_eager_one_does() -> None:
    chosen = torch.arange(4, device=DEVICE)
    (learning, recorded), (_, eager) = learner(drop=0.5), learner(drop=0.5)
    graphs = StepGraphs(learning.generator)
    for _ in range(6):  # of which the last are replayed
        found: Any = graphs.run(recorded, chosen)
        close(found, eager(chosen))
