import copy
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from bitdial import (
    CalibrateConfig,
    QuantConfig,
    build_model,
    calibrate,
    code_exact,
    get_bits,
    load,
    prepare,
    save,
    set_bits,
)
from bitdial.errors import ConfigError, QuantizationError
from bitdial.nn import SwitchableBatchNorm

from .conftest import BITS, images, mobile, prepared, resnet


def distance(model: nn.Module, plain: nn.Module, bits: int) -> float:
    x = images(64, seed=5)  # others than it was calibrated on
    set_bits(model, bits)
    with torch.no_grad():
        wanted = plain(x)
        return float((model(x) - wanted).square().sum() / wanted.square().sum())


def test_every_width_comes_nearer_to_the_float_model() -> None:
    for net in (mobile(), resnet()):
        for scheme in ("double_rounding", "nested"):
            model = prepared(net, scheme=scheme, start="mse", keep_first_last=8)
            before = {bits: distance(model, net, bits) for bits in BITS}
            settings = CalibrateConfig(equalize=scheme == "nested")
            report = calibrate(model, list(images(48).split(16)), settings, progress=False)
            after = {bits: distance(model, net, bits) for bits in BITS}
            assert after[8] < 2e-3
            assert after[8] < before[8]
            assert sum(after[b] < before[b] for b in BITS) >= 3, (scheme, before, after)
            assert report.samples == 48
            assert report.error[3] > report.error[8] > 0


@pytest.mark.parametrize("make, scheme", [(mobile, "double_rounding"), (resnet, "nested")])
def test_what_does_not_help_is_taken_back(make: Callable[[], nn.Module], scheme: str) -> None:
    full = prepared(make(), scheme=scheme, keep_first_last=8)
    settings = CalibrateConfig(effort="full", iterations=20, batch_size=16)
    report = calibrate(full, list(images(48).split(16)), settings, progress=False)
    *blocks, _, whole = report.blocks
    gains = [block.error_before[3] / block.error[3] for block in (*blocks[1:], whole)]
    assert min(gains) >= 1
    assert max(gains) > 1.02, gains


def test_what_is_calibrated_runs_as_it_was(tmp_path: Path) -> None:
    """The file, every engine: the same codes, and integer sums equal to their definition."""
    net, x = mobile(), images(8, seed=3)
    model = prepared(net, scheme="nested", keep_first_last=8)
    calibrate(model, images(32), CalibrateConfig(effort="full", iterations=5), progress=False)
    save(model, tmp_path / "m.safetensors")
    live, integer = (load(tmp_path / "m.safetensors", net, kernels=kernels) for kernels in ("float", "integer"))
    for bits in BITS:
        for each in (model, live, integer):
            set_bits(each, bits)
        with torch.no_grad():
            assert torch.equal(model(x), live(x))
            assert torch.equal(integer(x), code_exact(live)(x))


def test_mode_setting_and_wrappers_are_left_as_they_were() -> None:
    model = prepared(mobile()).train()
    set_bits(model, 4)
    before = get_bits(model)
    calibrate(nn.DataParallel(model), images(32), progress=False)
    assert get_bits(model) == before
    assert all(module.training for module in model.modules())
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_steps_can_be_left_out() -> None:
    norms = CalibrateConfig(equalize=False, choose_scales=False, round_jointly=False, correct_biases=False)
    off = replace(norms, correct_norms=False)
    model = prepared(mobile())
    state = copy.deepcopy(model.state_dict())
    report = calibrate(model, images(32), off, progress=False)
    assert report.steps == ()
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    report = calibrate(model, images(32), norms, progress=False)
    assert report.steps == ("norms corrected",)
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, state[name])}
    assert changed
    assert all(name.endswith(("running_mean", "running_var")) for name in changed)
    sets = next(m for m in model.modules() if isinstance(m, SwitchableBatchNorm)).sets
    assert not torch.equal(sets["8"].running_var, sets["3"].running_var)


def test_a_model_without_a_graph_is_calibrated_by_its_blocks_or_layers(caplog: pytest.LogCaptureFixture) -> None:
    """Of blocks that run twice, the layers are blocks."""
    ids = torch.randint(0, 8, (40, 6), generator=torch.Generator().manual_seed(0))
    for twice in (False, True):
        torch.manual_seed(0)
        net: Any = build_model("tiny_transformer").eval()
        if twice:
            net.blocks.append(net.blocks[0])
        model = prepare(net, QuantConfig(bit_choices=(8, 4), start="mse"), ids)
        caplog.clear()
        report = calibrate(model, list(ids.split(20)), CalibrateConfig(effort="full", iterations=3), progress=False)
        assert ("layer by layer" in caplog.text) == twice
        assert ("cannot be traced" in "".join(report.warnings)) == twice
        multiplying = {n for n, m in model.named_modules() if hasattr(m, "weight_quantizer") and m.kind.multiplies}
        assert {name for block in report.blocks for name in block.layers} == multiplying
        assert len(report.blocks) == (len(multiplying) if twice else 2)
        set_bits(model, 8)
        with torch.no_grad():
            wanted = net(ids)
            assert float((model(ids) - wanted).square().sum() / wanted.square().sum()) < 1e-2


def test_activations_can_have_one_width() -> None:
    """Norms then have the statistics of weights at each width with activations at 8 bits."""
    net, x = mobile(), list(images(48).split(16))
    model, other = prepared(net), prepared(net)
    nearest = CalibrateConfig(round_jointly=False)  # so that both have the same codes
    calibrate(model, x, replace(nearest, activation_bits=8), progress=False)
    calibrate(other, x, nearest, progress=False)
    sample = images(64, seed=5)

    def error(which: nn.Module) -> float:
        set_bits(which, (3, 8))
        with torch.no_grad():
            return float((which(sample) - net(sample)).square().mean())

    assert error(model) < error(other)
    with pytest.raises(ConfigError, match="activation_bits=5 is none of the model's widths"):
        calibrate(model, x, CalibrateConfig(activation_bits=5))


def test_bad_input_is_refused() -> None:
    model = prepared(mobile())
    with pytest.raises(ConfigError, match="no quantised layer"):
        calibrate(mobile(), images(4))
    with pytest.raises(ConfigError, match="must be a CalibrateConfig"):
        calibrate(model, images(4), {"effort": "quick"})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="no batch"):
        calibrate(model, [])
    with pytest.raises(QuantizationError, match="NaN"):
        calibrate(model, images(4) * float("nan"))
    with pytest.raises((ConfigError, RuntimeError), match=r"channels|shape|size"):
        calibrate(model, torch.randn(4, 5, 8, 8), progress=False)
    report = calibrate(model, images(1), progress=False)
    assert "there are 1 samples" in report.warnings[0]
    assert "one value" in calibrate(prepared(mobile()), torch.ones(32, 3, 8, 8), progress=False).warnings[0]


RUN = """
from bitdial import CalibrateConfig, calibrate, save

def run(checkpoint, artifact):
    model = prepared(mobile(), keep_first_last=8)
    config = CalibrateConfig(effort="full", iterations=4, batch_size=8)
    report = calibrate(model, list(images(24).split(8)), config, checkpoint=checkpoint, progress=False)
    return save(model, artifact), report.resumed
"""
KILLED = """
import sys, torch
sys.path.insert(0, {tests!r})
from conftest import images, mobile, prepared
from bitdial.calibrate.checkpoint import Checkpoint
torch.set_num_threads(1)
write = Checkpoint.write
def slowly(self, reports):
    write(self, reports)
    print(len(reports), flush=True)
    if len(reports) == 2:
        sys.stdin.read()  # until it is killed
Checkpoint.write = slowly
run(*sys.argv[1:])
"""


@pytest.mark.usefixtures("one_thread")
def test_a_killed_run_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    script, places = tmp_path / "run.py", [str(tmp_path / "a.ckpt"), str(tmp_path / "a.safetensors")]
    script.write_text(RUN + KILLED.format(tests=str(Path(__file__).parent)))
    killed = subprocess.Popen(
        [sys.executable, str(script), *places], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert killed.stdout is not None
    assert [killed.stdout.readline().strip() for _ in range(2)] == ["1", "2"]
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    here: dict[str, Any] = {"images": images, "mobile": mobile, "prepared": prepared}
    exec(RUN, here)
    digest, resumed = here["run"](*places)
    assert resumed == 2
    assert here["run"](str(tmp_path / "b.ckpt"), str(tmp_path / "b.safetensors")) == (digest, 0)
