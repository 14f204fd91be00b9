"""Detectors on the command line: evaluation at every width and plan, and what is refused."""

import re
from pathlib import Path

import pytest
import torch

from bitdial import BitPlan, QuantConfig, build_model, prepare, save
from bitdial.cli import main
from bitdial.images.made_up import write_made_up

pytest.importorskip("pycocotools")
pytest.importorskip("PIL.Image")
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of a detector that finds something everywhere, and made-up images."""
    place = tmp_path_factory.mktemp("detector")
    write_made_up(place / "discs", count=5)
    torch.manual_seed(0)
    detector = build_model("tiny_detector", num_classes=1, score_threshold=0.0, most_detections=4).eval()
    model = prepare(detector, QuantConfig(bit_choices=(8, 2)), [[torch.rand(3, 40, 48)]])
    save(model, place / "a.safetensors", plans={"mixed": BitPlan(default=8)})
    return place


def test_eval_shows_every_width_and_plan(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["eval", str(folder / "a.safetensors"), "--detection", str(folder / "discs")]
    assert main(words) == 0
    out = capsys.readouterr().out
    assert re.search(r"^setting +box AP +box AP50 +mask AP +mask AP50$", out, re.M)
    for setting in ("8 bits", "2 bits", "mixed"):
        assert re.search(rf"^{setting}( +[\d.]+){{4}}$", out, re.M), setting
    assert "on 2 images of" in out
    assert "up to 100 objects each" in out
    assert main([*words, "--split", "all", "--count", "1", "--bits", "2", "--max-detections", "7"]) == 0
    out = capsys.readouterr().out
    assert "on 1 images of" in out
    assert "up to 7 objects each" in out
    assert "8 bits" not in out


def test_what_does_not_go_together_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, discs = str(folder / "a.safetensors"), str(folder / "discs")
    for words, text in (
        (["eval", file, "--detection", discs, "--labels", "x"], "--labels is for classifiers"),
        (["eval", file, "--max-detections", "5"], "--max-detections is for detectors"),
        (["eval", file, "--detection", discs, "--split", "test"], "no images of the split 'test'"),
        (["train", "nuclei-maskrcnn", "--data", str(folder / "no"), "--out", str(folder)], "there is no folder"),
    ):
        assert main(words) in (1, 2)
        assert text in capsys.readouterr().err
