import pytest
import torch

from bitdial import calibrate, set_bits
from bitdial.calibrate.config import CalibrateConfig
from bitdial.calibrate.reconstruct import Reconstruction, step_of
from bitdial.calibrate.reference import float_copy
from bitdial.calibrate.walk import Walk
from bitdial.dial.plan import BitPlan
from bitdial.nn import QuantLayer

from .conftest import BITS, images, mobile, prepared

BITS_OF_SCALES = {str(bits) for bits in BITS}


@pytest.mark.parametrize(
    ("scheme", "effort"), [("double_rounding", "full"), ("nested", "medium"), ("nested", "full"), ("lsq", "full")]
)
def test_the_error_of_a_block_falls_and_weights_stay_near(scheme: str, effort: str) -> None:
    x, model = images(128), prepared(mobile(), scheme=scheme, keep_first_last=8)
    walk, plain = Walk(model, list(x.split(32))), float_copy(model)
    settings = {bits: BitPlan(default=bits) for bits in BITS}
    before, after = walk.start(), walk.start()
    values = {bits: walk.start() for bits in BITS}

    def errors() -> dict[int, float]:
        found = {}
        for bits in BITS:
            set_bits(model, bits)
            moved = values[bits].copy()
            moved.advance(model, walk.blocks[1], lambda name, x: None)
            found[bits] = moved.distance(after, walk.blocks[1])
        return found

    for block in walk.blocks[:2]:
        after.advance(plain, block, lambda name, x: None)
    before.advance(plain, walk.blocks[0], lambda name, x: None)
    for bits in BITS:
        set_bits(model, bits)
        values[bits].advance(model, walk.blocks[0], lambda name, x: None)
    start, state = errors(), {n: v.clone() for n, v in model.state_dict().items()}
    config = CalibrateConfig(effort=effort, iterations=60, batch_size=32, reach=0.5)
    learning = Reconstruction(model, walk.blocks[1], settings, config, torch.Generator().manual_seed(0))
    steps = {n: step_of(m, 3) for n, m in model.named_modules() if n in walk.blocks[1].layers}
    told: list[dict[int, float]] = []
    learning.learn(before, values, after, lambda iteration, found: told.append(found))
    end = errors()
    assert len(told) == 3  # each twentieth
    assert end[3] < start[3]
    assert end[4] < start[4]
    assert end[8] < 5e-3, "what is good stays so"
    changed = {n for n, v in model.state_dict().items() if not torch.equal(v, state[n])}
    assert changed
    assert all(name.startswith("first.") for name in changed), "other blocks stay as they are"
    kinds = {name.rpartition(".")[2] for name in changed}
    assert kinds == {"weight", "bias", *BITS_OF_SCALES}, "norms of each width, scales of activations, weights of layers"
    weights = {name for name in changed if name.removesuffix(".weight") in steps}
    assert weights == ({f"{name}.weight" for name in steps} if effort == "full" else set())
    assert all(parameter.requires_grad for parameter in model.parameters())
    for name, step in steps.items():
        layer = model.get_submodule(name)
        assert isinstance(layer, QuantLayer)
        moved = (layer.weight.detach() - state[f"{name}.weight"]).abs()
        assert bool((moved <= 0.5001 * step).all())
        assert layer.weight.grad is None


def test_a_layer_with_a_width_of_its_own_moves_by_its_own_steps() -> None:
    model = prepared(mobile(), keep_first_last=8)
    layer = model.get_submodule("stem.0")
    assert isinstance(layer, QuantLayer)
    blocks = Walk(model, [images(4)]).blocks
    settings = {bits: BitPlan(default=bits) for bits in BITS}
    learning = Reconstruction(model, blocks[0], settings, CalibrateConfig(effort="full"), torch.Generator())
    assert torch.equal(learning.weights[0].unit, step_of(layer, 8))
    assert torch.equal(step_of(layer, 4), 16 * step_of(layer, 8))


def test_the_share_that_is_dropped() -> None:
    model = prepared(mobile())
    block = Walk(model, [images(4)]).blocks[1]
    settings = {bits: BitPlan(default=bits) for bits in BITS}
    value, plain = torch.zeros(333, 31), torch.ones(333, 31)
    for drop, wanted in ((0.0, 0.0), (0.001, 1 / 256), (0.5, 0.5), (0.9, 230 / 256), (1.0, 1.0)):
        config = CalibrateConfig(drop=drop)
        learning = Reconstruction(model, block, settings, config, torch.Generator().manual_seed(0))
        found = learning._drop(value, plain)
        assert abs(float(found.mean()) - wanted) < 0.015, drop
        again = Reconstruction(model, block, settings, config, torch.Generator().manual_seed(0))
        assert torch.equal(again._drop(value, plain), found)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("drop", [0.0, 0.5])
def test_a_recorded_iteration_learns_what_an_eager_one_does(monkeypatch: pytest.MonkeyPatch, drop: float) -> None:
    config = CalibrateConfig(effort="full", iterations=100, batch_size=16, drop=drop)
    batches = [x.cuda() for x in images(64).split(16)]

    def errors() -> list[float]:
        report = calibrate(prepared(mobile()).cuda(), batches, config, progress=False)
        return [error for block in report.blocks for error in block.error.values()]

    recorded = errors()
    monkeypatch.setattr(Reconstruction, "_run", lambda self, step, chosen: step(chosen))
    for found, wanted in zip(recorded, errors(), strict=True):
        assert found == pytest.approx(wanted, rel=0.1)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_block_that_waits_for_the_gpu_learns_without_a_recording(caplog: pytest.LogCaptureFixture) -> None:
    model, seen = prepared(mobile()).cuda(), []
    layer = model.get_submodule("first.expand.0")
    layer.register_forward_pre_hook(lambda module, args: seen.append(float(args[0].detach().sum())))
    config = CalibrateConfig(effort="full", iterations=40, batch_size=16)
    report = calibrate(model, [x.cuda() for x in images(64).split(16)], config, progress=False)
    assert [r.message for r in caplog.records if "block 'first' learns without a CUDA graph" in r.message]
    block = next(block for block in report.blocks if block.name == "first")
    assert block.error[3] < block.error_before[3]
    assert report.blocks[-1].error[3] > 0, "blocks behind it go on"
