"""`bitdial calibrate`: what it prints and leaves, and how it takes bad input."""

import errno
import json
import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import bitdial
from bitdial.cli import main
from bitdial.files.lock import sole_writer

Image = pytest.importorskip("PIL.Image")
ARGUMENTS = {"blocks": 1, "width": 8, "num_classes": 3}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with images, labels and weights."""
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    for name in ("photos", "dev", "one", "flat", "empty"):
        (tmp_path / name).mkdir()
        for number in range({"photos": 8, "dev": 6, "one": 1, "flat": 2, "empty": 0}[name]):
            values = rng.integers(0, 256, (10, 12, 3), dtype=np.uint8)
            Image.fromarray(np.full_like(values, 9) if name == "flat" else values).save(f"{name}/{number}.png")
    Path("labels.json").write_text(json.dumps({"dev": {f"{number}.png": number % 3 for number in range(6)}}))
    images = bitdial.ImageSettings(resize=None, crop=8).to_dict()
    for name, channels in (("w", 3), ("grey", 1)):
        arguments = {**ARGUMENTS, "in_channels": channels}
        metadata = {"model": "cifar_resnet", "arguments": json.dumps(arguments), "images": json.dumps(images)}
        with torch.random.fork_rng():
            torch.manual_seed(0)
            state = bitdial.build_model("cifar_resnet", **arguments).state_dict()
        save_file(state, f"{name}.safetensors", metadata)
    return tmp_path


COMMAND = ["calibrate", "cifar_resnet", "--weights", "w.safetensors", "--images", "photos", "--bits", "8,4"]
COMMAND += ["--out", "net.safetensors"]
LEFT = {"net.safetensors", "net.json", "net.html"}


def files(place: Path) -> set[str]:
    return {path.name for path in place.iterdir() if path.name.startswith(("net", ".net"))}


def test_a_run_leaves_a_file_numbers_and_a_page(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [*COMMAND, "--eval-images", "dev", "--labels", "labels.json", "--effort", "full", "--first-last", "same"]
    words += ["--iterations", "2"]
    assert main([*words, "--group-size", "16", "--scheme", "nested", "--batch-size", "3"]) == 0
    out = capsys.readouterr().out
    assert files(place) == LEFT
    result = json.loads(Path("net.json").read_text())
    assert (result["quant"]["keep_first_last"], result["quant"]["group_size"]) == (False, 16)
    assert (result["quant"]["scheme"], result["calibration"]["effort"]) == ("nested", "full")
    assert result["evaluation"] == {"folder": "dev", "count": 6, "labels": True, "which": "those of dev", "seen": 0}
    assert re.search(r"^setting +accuracy +95 % interval +agrees with float$", out, re.M)
    for name in ("float", "8 bits", "4 bits"):
        assert re.search(rf"^{name} +[\d.]+ %", out, re.M)
    assert "Saved net.safetensors (" in out
    assert "<h1>cifar_resnet at every width</h1>" in Path("net.html").read_text()
    assert main(["eval", "net.safetensors", "--images", "dev", "--labels", "labels.json"]) == 0
    found = capsys.readouterr().out
    for bits, one in result["widths"].items():
        assert re.search(rf"^{bits} bits +{100 * one['top1']:.2f} %", found, re.M), "eval finds the same accuracy"
    assert main(["inspect", "net.safetensors"]) == 0
    found = capsys.readouterr().out
    assert "no resizing, centre 8 x 8, RGB" in found
    assert "the recipe calibrate, run cifar_resnet, effort full" in found
    assert "stored accuracy on: 6 images of dev, those of dev" in found


def test_weights_that_name_their_model_will_do(place: Path) -> None:
    words = ["calibrate", "w.safetensors", *COMMAND[4:], "--count", "5", "--order", "BGR", "--first-last", "8"]
    assert main(words) == 0
    result = json.loads(Path("net.json").read_text())
    assert (result["model"], result["images"]["count"], result["image_settings"]["order"]) == ("cifar_resnet", 5, "BGR")
    live = bitdial.load("net.safetensors")
    bitdial.set_bits(live, 4)
    assert bitdial.get_bits(live)["fc"] == (8, 8), "the last layer keeps its width"
    assert "<dt>First and last layers</dt><dd>8 bits</dd>" in Path("net.html").read_text()


def test_one_image_works_with_a_word(place: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert main([word.replace("photos", "one") for word in COMMAND]) == 0
    assert "1 images are few to calibrate on" in caplog.text
    assert files(place) == LEFT


def test_bad_input_is_answered_in_two_lines(place: Path, calibrations: Any, capsys: pytest.CaptureFixture[str]) -> None:
    Path("bad").mkdir()
    Path("bad/text.jpg").write_text("words")
    torch.save({}, "w.pth")
    Path("locked").mkdir(mode=0o500)
    for change, said in {
        ("photos", "empty"): "empty has no images",
        ("photos", "nowhere"): "nowhere does not exist; name a folder of images",
        ("photos", "bad"): "text.jpg cannot be read as an image",
        ("photos", "flat"): "every image of flat is one colour all over",
        ("w.safetensors", "grey.safetensors"): "(samples of shape (3, 8, 8)) does not fit the model",
        ("w.safetensors", "w.pth"): "w.pth is pickled",
        ("w.safetensors", "none.safetensors"): "cannot read none.safetensors",
        ("cifar_resnet", "resnet20"): "has weights of cifar_resnet, not of resnet20",
        ("cifar_resnet", "keras:net"): "model 'keras:net' is not known",
        ("net.safetensors", "none/net.safetensors"): "there is no folder none",
        ("net.safetensors", "net.pt"): "name a file that ends in .safetensors",
        ("net.safetensors", "photos"): "name a file that ends in .safetensors",
        **({} if os.geteuid() == 0 else {("net.safetensors", "locked/net.safetensors"): "you may not write in locked"}),
    }.items():
        words = [change[1] if word == change[0] else word for word in COMMAND]
        assert main(words) == 2, change
        error = capsys.readouterr().err
        last = error.strip().splitlines()[-2:]
        assert last[0].startswith("bitdial calibrate: "), change
        assert said in last[0], change
        assert last[1] == "For help: bitdial calibrate --help"
    for more, said in {
        ("--eval-count", "3"): "--eval-count needs --eval-images DIR",
        ("--labels", "labels.json"): "labels.json has no class for 2 of 8 images of photos",
        ("--eval-images", "dev", "--labels", "folders"): "lies in no folder that would say its class",
        ("--crop", "50"): "fewer than the crop of 50 x 50",
        ("--scheme", "lsq", "--group-size", "4"): "group_size is for schemes that narrow stored integers",
    }.items():
        assert main([*COMMAND, *more]) == 2, more
        assert said in capsys.readouterr().err, more
    assert main([word for word in COMMAND if word not in ("--weights", "w.safetensors")]) == 2
    assert "--weights is missing: without them cifar_resnet has random values" in capsys.readouterr().err
    assert calibrations.started == 0
    assert files(place) == set(), "nothing is left"


def test_a_model_without_a_layer_to_quantise_is_refused(
    place: Path, calibrations: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Bare(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.mean((2, 3))

    monkeypatch.setattr("bitdial.cli.calibrate.model_by_name", lambda *args, **options: (Bare().eval(), "bare"))
    assert main(COMMAND) == 2
    assert "no layer" in capsys.readouterr().err
    assert files(place) == set()


def test_a_run_that_was_stopped_goes_on_with_the_same_command(
    place: Path, calibrations: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    calibrations.stop = True
    assert main(COMMAND) == 130
    assert "run the same command again to go on from what was saved" in capsys.readouterr().err
    assert len(files(place)) == 1, "the checkpoint"
    assert main(COMMAND) == 0
    assert calibrations.reports[0].resumed == 1
    assert files(place) == LEFT
    assert main(COMMAND) == 2
    assert "is there already; choose another --out, or replace it with --replace" in capsys.readouterr().err
    assert main([*COMMAND, "--replace"]) == 0


def test_two_runs_do_not_write_one_file(place: Path, calibrations: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with sole_writer("net.safetensors", work="another"):
        assert main(COMMAND) == 2
    assert "is being written by process" in capsys.readouterr().err
    assert calibrations.started == 0


def test_a_full_disk_loses_nothing(
    place: Path, calibrations: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No work begins without room; if numbers or page cannot be written, the same command goes on later."""
    with monkeypatch.context() as full:
        full.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=1000))
        assert main(COMMAND) == 2
    assert "has 1,000 bytes left, and the run needs about " in capsys.readouterr().err
    assert calibrations.started == 0
    plain = os.replace
    for number, name in enumerate(("net.json", "net.html"), start=1):

        def fail(source: Any, target: Any, name: str = name) -> None:
            if Path(target).name == name:
                raise OSError(errno.ENOSPC, "No space left on device")
            plain(source, target)

        monkeypatch.setattr(os, "replace", fail)
        assert main(COMMAND) == 1
        assert f"cannot write {name}: [Errno 28] No space left on device" in capsys.readouterr().err
        assert "net.safetensors" in files(place)
        assert calibrations.started == 1, number
    monkeypatch.setattr(os, "replace", plain)
    assert main(COMMAND) == 0
    assert calibrations.started == 1, "what was calibrated was kept"
    assert files(place) == LEFT
