"""The recipe for detectors on made-up images: what it leaves, that it goes on where it was stopped, and its numbers."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from bitdial import load, set_bits
from bitdial.artifact import read_artifact
from bitdial.errors import ConfigError
from bitdial.images import InstanceAugment, InstanceFolder
from bitdial.images.made_up import write_made_up
from bitdial.recipes.detection import DETECTOR, detection
from bitdial.recipes.detector_data import DetectionData, DetectionImages
from bitdial.recipes.detector_options import DetectorOptions
from bitdial.recipes.detector_parts import part_errors, parts_of
from bitdial.recipes.detectors import DetectorKind
from bitdial.recipes.run import FinishedRun
from bitdial.train.callbacks import Run

pytest.importorskip("pycocotools")
pytest.importorskip("PIL.Image")
pytestmark = pytest.mark.usefixtures("one_thread")

SETTINGS: dict[str, Any] = {
    "model": "tiny_detector", "bit_choices": (8, 2), "float_epochs": 30, "float_lr": 5e-3, "epochs": 2, "lr": 1e-3,
    "batch": 2, "crop": 64, "calibration": 4, "evaluate_every": 1, "pictures": 1, "progress": False, "name": "tiny",
}  # fmt: skip


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("discs")
    write_made_up(folder, count=8)
    return folder


@pytest.fixture(scope="module")
def floats(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a finished run, and the float detector that others start from."""
    out = tmp_path_factory.mktemp("out")
    detection(DetectorOptions(out=out, data=data, results=out / "rows.json", command="x", **SETTINGS))
    return out


def test_a_run_leaves_a_file_numbers_and_rows(floats: Path, data: Path) -> None:
    artifact = read_artifact(floats / "tiny.safetensors")
    result = json.loads((floats / "tiny.json").read_text())
    rows = json.loads((floats / "rows.json").read_text())
    assert [row["bits"] for row in rows] == [8, 2]
    wanted = {"model", "box_ap", "mask_ap", "box_ap50", "mask_ap50", "float_box_ap", "float_mask_ap", "seed", "command"}
    for row in rows:
        assert set(row) > wanted
        assert row["box_ap"] == round(100 * result["widths"][str(row["bits"])]["box_ap"], 2)
    assert result["float"]["box_ap50"] > 0.1, "it finds some discs"
    assert [entry["epoch"] for entry in result["course"]] == [0, 1]
    assert set(result["parts"]) == {"backbone and feature pyramid", "mask head", "head"}
    assert artifact.metrics["ap"] == result["widths"]
    assert artifact.metrics["images"]["count"] == 2
    kind = DetectorKind.from_dict(artifact.metrics[DETECTOR])
    assert (kind.name, kind.classes, kind.max_detections) == ("tiny_detector", 1, 400)
    live = load(artifact)
    set_bits(live, 2)
    images, _ = DetectionImages(InstanceFolder(data, "val"), "cpu")[0]
    with torch.no_grad():
        assert set(live(images)[0]) == {"boxes", "labels", "scores", "masks"}
    with pytest.raises(FinishedRun):
        detection(DetectorOptions(out=floats, data=data, **SETTINGS))


@pytest.mark.skipif(torch.cuda.is_available(), reason="gradients of crops add up in any order on a GPU")
def test_a_stopped_run_goes_on_and_ends_as_if_it_had_not(
    floats: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stopped(Exception):
        pass

    def stop(self: Any, run: Run) -> None:
        if run.step == 5:
            raise Stopped

    options = DetectorOptions(out=floats, data=data, checkpoint_every=1, **SETTINGS | {"name": "again"})
    told: list[str] = []
    with monkeypatch.context() as patch:
        patch.setattr("bitdial.recipes.detection._Watch.on_step", stop)
        with pytest.raises(Stopped):
            detection(options)
    outcome = detection(options, tell=told.append)
    assert "Going on from step 4 of 6" in told
    assert not any("in float" in line for line in told), "the float detector is that of the first run"
    whole, again = (read_artifact(floats / f"{name}.safetensors") for name in ("tiny", "again"))
    assert all(torch.equal(whole.tensors[name], again.tensors[name]) for name in whole.tensors)
    assert outcome.result["widths"] == whole.metrics["ap"]
    assert list(outcome.seen[0].found) == ["float", "8 bits", "2 bits"]


def test_errors_of_parts_are_their_own(data: Path) -> None:
    kind = DetectorKind(name="tiny_detector", classes=1)
    whole, changed = kind.build(seed=1), kind.build(seed=1)
    images = [DetectionImages(InstanceFolder(data, "val"), "cpu")[0][0]]
    assert parts_of(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())) == {"0": "0"}

    with torch.no_grad():
        changed.get_submodule("head.classes").bias.mul_(2)  # type: ignore[operator, union-attr]
    errors = part_errors(whole, changed, images, [])
    assert set(errors) == {"backbone and feature pyramid", "mask head", "head"}
    with pytest.raises(ConfigError, match="has no part 'nowhere'"):
        part_errors(whole, changed, images, [], parts={"x": "nowhere"})


def test_batches_go_by_seed_epoch_and_index_alone(data: Path) -> None:
    def batches(epoch: int, **options: int) -> list[Any]:
        augment = InstanceAugment(crop=40, turn=True)
        folder = InstanceFolder(data, "train")
        found = DetectionData(folder, augment, batch_size=4, seed=3, device=torch.device("cpu"), workers=2)
        return list(found.batches(epoch, **options))

    (sample,), (again,) = batches(5), batches(5)
    assert all(torch.equal(a, b) for a, b in zip(sample.inputs, again.inputs, strict=True))
    assert torch.equal(sample.index, again.index)
    (other,) = batches(6)
    assert any(a.shape != b.shape or not torch.equal(a, b) for a, b in zip(sample.inputs, other.inputs, strict=True))
    for image, target in zip(sample.inputs, sample.targets, strict=True):
        assert target["masks"].shape == (len(target["boxes"]), *image.shape[1:])
        assert target["masks"].flatten(1).any(1).all()
    shares = [batches(5, rank=rank, world=2)[0] for rank in range(2)]
    assert torch.equal(torch.cat([share.index for share in shares]), sample.index)
    assert torch.equal(shares[1].inputs[0], sample.inputs[2])
    assert batches(5, start=1) == []


def test_what_cannot_be_is_refused(data: Path, tmp_path: Path) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"batch": 0}, "--batch 0"),
        ({"lr": 0.0}, "--lr 0.0"),
        ({"data": tmp_path / "nowhere"}, "there is no folder"),
        ({"method": "guessed"}, "guessed"),
    ]
    for change, text in cases:
        with pytest.raises(ConfigError, match=text):
            DetectorOptions(**{"out": tmp_path, "data": data} | change)
    for name, text in (("resnet18", "is no detector"), ("timm:x", "is not known"), ("nothing", "is no detector")):
        with pytest.raises(ConfigError, match=text):
            DetectorKind(name=name, classes=1).build()
