from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from bitdial import ImageViews, calibrate, load, save, set_bits
from bitdial.calibrate.config import CalibrateConfig
from bitdial.calibrate.reference import float_copy
from bitdial.calibrate.tune import Tuning, own_parameters
from bitdial.calibrate.walk import Walk
from bitdial.dial.plan import BitPlan
from bitdial.errors import CheckpointError, ConfigError

from .conftest import BITS, images, mobile, prepared

SETTINGS = {bits: BitPlan(default=bits) for bits in BITS}


def outputs(model: nn.Module, x: Tensor) -> dict[int, Tensor]:
    found = {}
    for bits in BITS:
        set_bits(model, bits)
        with torch.no_grad():
            found[bits] = model(x)
    return found


def test_what_a_width_has_of_its_own() -> None:
    model = prepared(mobile(), keep_first_last=8)
    own = own_parameters(model, SETTINGS)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found = {bits: {names[id(p)] for p in parameters} for bits, parameters in own.items()}
    assert {"first.expand.1.sets.4.weight", "first.filter.1.sets.4.bias"} <= found[4]
    assert any(name.endswith("act_quantizer.scales.4") for name in found[4])
    ends = [name for name in names.values() if name.startswith(("stem.0.", "head.")) and "scales.8" in name]
    assert not any(name in each for name in ends for each in found.values()), "all widths use those of the ends"
    every = [name for each in found.values() for name in each]
    assert len(every) == len(set(every))
    shared = own_parameters(model, {bits: BitPlan(default=(bits, 8)) for bits in BITS})
    assert not any("scales" in names[id(p)] for p in shared[4]), "activations of 8 bits are of all widths"


def test_a_width_gains_and_no_other_changes() -> None:
    x, model = images(64), prepared(mobile(), keep_first_last=8)
    plain = float_copy(model)
    walk = Walk(model, list(x.split(16)))
    before, state = outputs(model, x), {n: v.clone() for n, v in model.state_dict().items()}
    wanted = plain(x).detach()
    errors = {b: float((before[b] - wanted).square().sum() / wanted.square().sum()) for b in BITS}
    config = CalibrateConfig(effort="medium", iterations=20, batch_size=16, tune_rate=1e-2)
    good = replace(config, tolerance=(errors[4] + errors[3]) / 2)  # all widths but the lowest are
    told: list[float] = []
    report = Tuning(model, walk, SETTINGS, good, walk.start(), plain).run(lambda share, errors: told.append(share))
    assert report.error_before == pytest.approx(errors, rel=1e-4)
    assert report.error[3] < 0.9 * report.error_before[3]
    assert told == sorted(told)
    assert told[-1] == 1
    now = outputs(model, x)
    assert all(torch.equal(now[bits], before[bits]) for bits in (8, 6, 4))
    changed = {n for n, v in model.state_dict().items() if not torch.equal(v, state[n])}
    assert all(".sets.3." in name or name.endswith("scales.3") for name in changed)
    assert all(p.requires_grad and p.grad is None for p in model.parameters())

    far = replace(config, iterations=2, tune_rate=1.0)
    state = {n: v.clone() for n, v in model.state_dict().items()}
    again = Tuning(model, walk, SETTINGS, far, walk.start(), plain).run(lambda share, errors: None)
    assert again.error == again.error_before
    assert all(torch.equal(v, state[n]) for n, v in model.state_dict().items()), "what does not help is taken back"


def test_it_is_the_last_step_of_a_calibration(tmp_path: Path) -> None:
    x, net = list(images(48).split(16)), mobile()
    config = CalibrateConfig(effort="medium", iterations=4, batch_size=8)
    reports = {}
    for tune in (True, False):
        model = prepared(net, keep_first_last=8)
        path = tmp_path / f"{tune}.ckpt"
        reports[tune] = calibrate(model, x, replace(config, tune=tune), checkpoint=path, progress=False)
        save(model, tmp_path / f"{tune}.safetensors")
    whole = reports[True].blocks[-1]
    assert len(reports[True].blocks) == len(reports[False].blocks) + 1
    assert whole.name == "the whole model"
    assert reports[True].error[3] <= whole.error_before[3]
    assert "learned through the whole model" in reports[True].steps[-1]
    again = prepared(net, keep_first_last=8)
    report = calibrate(again, x, config, checkpoint=tmp_path / "True.ckpt", progress=False)
    assert report.resumed == len(report.blocks)
    live = load(tmp_path / "True.safetensors", net, kernels="float")
    found, wanted = outputs(live, x[0]), outputs(again, x[0])
    assert all(torch.equal(found[bits], wanted[bits]) for bits in BITS)


def test_other_samples_for_the_last_step(tmp_path: Path) -> None:
    x, net = list(images(32).split(16)), mobile()
    config, path = CalibrateConfig(effort="medium", iterations=4, batch_size=8), tmp_path / "calibration.ckpt"
    reports, found = {}, {}
    for name, more in (("none", None), ("same", x), ("views", ImageViews(x, 3))):
        model = prepared(net, keep_first_last=8)
        reports[name] = calibrate(
            model, x, config, tune_on=more, checkpoint=path if more is not x else None, progress=False
        )
        found[name] = outputs(model, x[0])
        path.unlink(missing_ok=name == "same")
        if name == "none":
            with pytest.raises(ConfigError, match="no batch"):
                calibrate(prepared(net), x, config, tune_on=[], progress=False)
    assert all(torch.equal(found["none"][bits], found["same"][bits]) for bits in BITS)
    assert not torch.equal(found["none"][3], found["views"][3])
    quick = calibrate(prepared(net), x, tune_on=x, progress=False)
    assert "tune_on is not used: the last step is left out" in quick.warnings
    before = [[block.error for block in report.blocks[:-1]] for report in reports.values()]
    assert before[0] == before[1] == before[2], "blocks see the batches alone"


def test_a_checkpoint_knows_the_samples_of_the_last_step(tmp_path: Path) -> None:
    x, net = list(images(32).split(16)), mobile()
    config, path = CalibrateConfig(effort="medium", iterations=1, batch_size=8), tmp_path / "calibration.ckpt"
    calibrate(prepared(net), x, config, tune_on=ImageViews(x, 2), checkpoint=path, progress=False)
    for inputs, more in ((x, None), ([*x, *ImageViews(x, 2)], None), (x, x)):
        with pytest.raises(CheckpointError, match="inputs"):
            calibrate(prepared(net), inputs, config, tune_on=more, checkpoint=path, progress=False)


def test_samples_that_the_last_step_cannot_take_are_refused_before_any_work(tmp_path: Path) -> None:
    x, model = list(images(32).split(16)), prepared(mobile())
    config, path = CalibrateConfig(effort="medium", iterations=1, batch_size=8), tmp_path / "calibration.ckpt"
    state = {n: v.clone() for n, v in model.state_dict().items()}
    for more in ([x[0][:, :1]], [(x[0], x[0])], [{"pixels": x[0]}]):
        with pytest.raises(ConfigError, match="does not take the"):
            calibrate(model, x, config, tune_on=more, checkpoint=path, progress=False)
    assert not path.exists()
    assert all(torch.equal(v, state[n]) for n, v in model.state_dict().items())


def test_the_report_tells_what_learned_through_the_whole_model() -> None:
    x, net = list(images(32).split(16)), mobile()
    for effort, weights in (("medium", False), ("full", True)):
        config = CalibrateConfig(effort=effort, iterations=1, batch_size=8)
        steps = calibrate(prepared(net), x, config, progress=False).steps
        assert any(step.startswith("weights learned through the whole model") for step in steps) == weights
