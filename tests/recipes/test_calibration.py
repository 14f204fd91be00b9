"""A folder of images and a float model in, a file and its numbers out; nothing is lost on the way."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import bitdial
from bitdial import CalibrateConfig, ImageBatches, ImageSettings, QuantConfig
from bitdial.errors import ConfigError
from bitdial.recipes import calibration
from bitdial.recipes.calibration import CalibrationRun, check_out, run_calibration
from bitdial.recipes.classes import predict

Image = pytest.importorskip("PIL.Image")
SETTINGS = ImageSettings(resize=None, crop=8, mean=(128, 128, 128), std=(64, 64, 64))


@pytest.fixture
def run(tmp_path: Path) -> CalibrationRun:
    folder = tmp_path / "photos"
    folder.mkdir()
    rng = np.random.default_rng(0)
    for number in range(12):
        Image.fromarray(rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)).save(folder / f"{number:02}.png")
    (tmp_path / "labels.csv").write_text("".join(f"{number:02}.png,{number % 3}\n" for number in range(12)))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = bitdial.build_model("cifar_resnet", blocks=1, width=4, num_classes=3).eval()
    images = ImageBatches(folder, SETTINGS, batch_size=4, count=6)
    quant = QuantConfig(bit_choices=(8, 4))
    out = tmp_path / "net.safetensors"
    return CalibrationRun(
        name="cifar_resnet", model=model, images=images, evaluation=None, quant=quant, out=out,
        config=CalibrateConfig(), progress=False,
    )  # fmt: skip


def test_what_a_run_leaves(run: CalibrationRun, calibrations: Any, caplog: pytest.LogCaptureFixture) -> None:
    told: list[str] = []
    result = run_calibration(run, tell=told.append)
    assert json.loads(run.numbers.read_text()) == result
    assert [line.split()[0] for line in told] == ["Preparing", "Calibrating", "Measuring"]
    assert "6 images are few to calibrate on" in caplog.text
    artifact = bitdial.read_artifact(run.out)
    assert artifact.metrics["image_settings"] == SETTINGS.to_dict()
    assert artifact.metrics["model"] == "cifar_resnet"
    assert "top1" not in artifact.metrics
    assert result["evaluation"]["which"] == "the same that it was calibrated on", "the six others are too few"
    assert result["evaluation"]["seen"] == 6
    expected = predict(run.model, run.images).classes
    live = bitdial.load(run.out)
    for bits in (8, 4):
        bitdial.set_bits(live, bits)
        agreement = float((predict(live, run.images).classes == expected).float().mean())
        assert result["widths"][str(bits)] == {"top1": None, "agreement": pytest.approx(agreement)}
    assert artifact.metrics["agreement"] == {b: one["agreement"] for b, one in result["widths"].items()}
    assert result["bytes"]["artifact"] == run.out.stat().st_size
    blocks = result["calibration"]["blocks"]
    assert [block["name"] for block in blocks] == ["layer1.0", "layer2.0", "layer3.0", "fc"]
    assert all(0 < block["error"]["8"] < block["error"]["4"] < 1 for block in blocks)
    assert not run.checkpoint.exists()


def test_labels_give_accuracies_of_other_images(
    run: CalibrationRun, calibrations: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibration, "FEW", 5)
    labels = run.out.parent / "labels.csv"
    images = ImageBatches(run.images.folder, SETTINGS, batch_size=4, count=6, labels=labels)
    result = run_calibration(dataclasses.replace(run, images=images))
    assert result["evaluation"] == {
        "folder": "photos", "count": 6, "labels": True, "which": "others of the same folder, not calibrated on",
        "seen": 0,
    }  # fmt: skip
    others = images.others(99)
    assert others is not None
    assert not set(others.names) & set(images.names)
    assert result["float"]["top1"] == pytest.approx(bitdial.accuracy(run.model, others.labelled()))
    live = bitdial.load(run.out)
    for bits, top1 in bitdial.read_artifact(run.out).metrics["top1"].items():
        bitdial.set_bits(live, int(bits))
        assert top1 == pytest.approx(bitdial.accuracy(live, others.labelled()))


def test_images_that_were_calibrated_on_are_counted(run: CalibrationRun, calibrations: Any) -> None:
    """Also where the folder is given once more to measure on."""
    every = ImageBatches(run.images.folder, SETTINGS, batch_size=4)
    found = run_calibration(dataclasses.replace(run, evaluation=every))["evaluation"]
    assert (found["count"], found["seen"]) == (12, 6)


def test_labels_are_looked_at_before_the_work(
    run: CalibrationRun, calibrations: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibration, "FEW", 5)
    labels = run.out.parent / "some.csv"
    labels.write_text("".join(f"{name},0\n" for name in run.images.names))
    images = ImageBatches(run.images.folder, SETTINGS, batch_size=4, count=6, labels=labels)
    with pytest.raises(ConfigError, match="has no class for 6 of 6 images"):
        run_calibration(dataclasses.replace(run, images=images))
    assert calibrations.reports == []


def test_a_run_that_is_stopped_goes_on(run: CalibrationRun, calibrations: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """While it calibrates, from the checkpoint; while it measures, from its file."""
    calibrations.stop = True
    with pytest.raises(KeyboardInterrupt):
        run_calibration(run)
    assert run.checkpoint.exists()
    assert not run.out.exists()
    other = dataclasses.replace(run, config=CalibrateConfig(seed=1))
    assert other.checkpoint != run.checkpoint, "another calibration does not go on from it"
    plain = calibration._measure

    def stop(*args: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(calibration, "_measure", stop)
    with pytest.raises(KeyboardInterrupt):
        run_calibration(run)
    assert [report.resumed for report in calibrations.reports] == [1]
    assert run.out.exists()
    assert not run.checkpoint.exists()
    with pytest.raises(ConfigError, match="is there already; choose another --out, or replace it"):
        run_calibration(other)
    monkeypatch.setattr(calibration, "_measure", plain)
    result = run_calibration(run)
    assert len(calibrations.reports) == 1, "it is not calibrated again"
    assert set(result["widths"]) == {"8", "4"}
    assert result["calibration"]["seconds"] == calibrations.reports[0].seconds


def test_finished_files_are_kept_unless_they_may_go(run: CalibrationRun, calibrations: Any) -> None:
    run_calibration(run)
    run.page.write_text("a page")
    before = run.out.read_bytes()
    with pytest.raises(ConfigError, match=r"net\.safetensors is there already"):
        run_calibration(run)
    assert run.out.read_bytes() == before
    run_calibration(dataclasses.replace(run, replace=True))
    assert len(calibrations.reports) == 2
    for path in (run.out, run.numbers):
        path.unlink()
    with pytest.raises(ConfigError, match=r"net\.html is there already"):
        run_calibration(run)


def test_places_that_cannot_be_are_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "folder.safetensors").mkdir()
    for out, words in {
        tmp_path / "net.json": "name a file that ends in .safetensors",
        tmp_path / "none" / "net.safetensors": "there is no folder",
        tmp_path / "folder.safetensors": "this is a folder",
    }.items():
        with pytest.raises(ConfigError, match=words):
            check_out(out)
    check_out(tmp_path / "net.safetensors")
