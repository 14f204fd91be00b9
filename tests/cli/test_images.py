"""`bitdial eval FILE --images DIR`, and what a file says of its images."""

import json
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import bitdial
from bitdial.cli import main
from bitdial.recipes.classes import predict

Image = pytest.importorskip("PIL.Image")
ARGUMENTS = {"blocks": 1, "width": 8, "num_classes": 5}
SETTINGS = bitdial.ImageSettings(resize=None, crop=16, mean=(100, 110, 120), std=(60, 50, 40))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with images, labels, float weights, and an artifact with a plan that says how images become inputs."""
    place = tmp_path_factory.mktemp("images")
    (place / "dev").mkdir()
    rng = np.random.default_rng(0)
    for number in range(20):
        Image.fromarray(rng.integers(0, 256, (18, 20, 3), dtype=np.uint8)).save(place / "dev" / f"{number:02}.png")
    (place / "labels.json").write_text(json.dumps({"dev": {f"{number:02}.png": number % 5 for number in range(20)}}))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = bitdial.build_model("cifar_resnet", **ARGUMENTS).eval()
        images = bitdial.ImageBatches(place / "dev", SETTINGS)
        prepared = bitdial.prepare(model, bitdial.QuantConfig(bit_choices=(8, 4, 2)), images[0]).eval()
    metadata = {"model": "cifar_resnet", "arguments": json.dumps(ARGUMENTS), "images": json.dumps(SETTINGS.to_dict())}
    save_file(model.state_dict(), place / "w.safetensors", metadata)
    metrics, plans = {"image_settings": SETTINGS.to_dict()}, {"mixed": bitdial.BitPlan(default=(4, 8))}
    bitdial.save(prepared, place / "net.safetensors", metrics=metrics, plans=plans)
    return place


def rows(text: str) -> dict[str, list[str]]:
    """The cells of the table by setting."""
    lines = [re.split(r"\s{3,}", line) for line in text.splitlines()]
    return {cells[0]: cells[1:] for cells in lines if len(cells) > 1}


def test_eval_gives_accuracy_and_agreement_at_every_setting(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["eval", str(place / "net.safetensors"), "--images", str(place / "dev"), "--labels"]
    assert main([*words, str(place / "labels.json"), "--weights", str(place / "w.safetensors")]) == 0
    found = rows(text := capsys.readouterr().out)
    assert f"Images: {SETTINGS}\n" in text
    assert "On 20 images of " in text
    assert list(found) == ["setting", "float", "8 bits", "4 bits", "2 bits", "mixed"]
    assert found["setting"] == ["accuracy", "95 % interval", "agrees with float"]
    images = bitdial.ImageBatches(place / "dev", SETTINGS, labels=place / "labels.json")
    live, plain = bitdial.load(place / "net.safetensors"), bitdial.build_model("cifar_resnet", **ARGUMENTS)
    plain.load_state_dict(load_file(place / "w.safetensors"))
    expected = predict(plain, images).classes
    assert found["float"][0] == f"{100 * bitdial.accuracy(plain, images.labelled()):.2f} %"
    seen = set()
    for name, bits in (("8 bits", 8), ("4 bits", 4), ("2 bits", 2), ("mixed", (4, 8))):
        bitdial.set_bits(live, bits)
        agreement = float((predict(live, images).classes == expected).float().mean())
        top1 = bitdial.accuracy(live, images.labelled())
        assert [found[name][0], found[name][2]] == [f"{100 * top1:.2f} %", f"{100 * agreement:.2f} %"]
        seen.add(agreement)
    assert len(seen) > 1, "settings that all agree alike would show nothing"


def test_without_labels_and_weights_there_is_agreement_with_the_highest_width(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["eval", str(place / "net.safetensors"), "--images", str(place / "dev"), "--count", "7", "--bits", "8"]
    assert main([*words, "--bits", "4", "--kernels", "integer", "--batch-size", "3"]) == 0
    found = rows(text := capsys.readouterr().out)
    assert found["setting"] == ["agrees with 8 bits"]
    assert found["8 bits"] == ["100.00 %"]
    assert "On 7 images of " in text
    assert ", without labels" in text


def test_weights_without_metadata_are_of_the_model_of_the_file(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its arguments are not the usual ones, and only the file has them."""
    save_file(load_file(place / "w.safetensors"), tmp_path / "plain.safetensors")
    words = ["eval", str(place / "net.safetensors"), "--images", str(place / "dev"), "--weights"]
    found = []
    for weights in (place / "w.safetensors", tmp_path / "plain.safetensors"):
        assert main([*words, str(weights)]) == 0
        found.append(rows(capsys.readouterr().out))
    assert found[0]["setting"] == ["agrees with float"]
    assert found[0] == found[1]


def test_options_replace_what_the_file_says(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["eval", str(place / "net.safetensors"), "--images", str(place / "dev"), "--bits", "8", "--resize", "17"]
    assert main([*words, "--order", "BGR", "--mean", "7", "--std", "1,2,3", "--interpolation", "nearest"]) == 0
    out = capsys.readouterr().out
    assert "shorter side to 17 at most (nearest), centre 16 x 16, BGR, mean 7 7 7, std 1 2 3" in out


def test_a_model_of_a_library_is_named(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    timm: Any = ModuleType("timm")
    timm.is_model = lambda name: name == "net"
    timm.create_model = lambda name, **options: bitdial.build_model("cifar_resnet", **ARGUMENTS)
    monkeypatch.setitem(sys.modules, "timm", timm)
    model = timm.create_model("net")
    del model.architecture
    file = tmp_path / "net.safetensors"
    prepared = bitdial.prepare(model, bitdial.QuantConfig(), torch.rand(2, 3, 16, 16))
    bitdial.save(prepared, file, metrics={"model": "timm:net", "image_settings": SETTINGS.to_dict()})
    words = ["eval", str(file), "--images", str(place / "dev")]
    assert main(words) == 1
    assert "is of the model timm:net; pass --model timm:net" in capsys.readouterr().err
    assert main([*words, "--model", "timm:net"]) == 0
    assert "agrees with 8 bits" in capsys.readouterr().out
    assert main([*words, "--weights", str(place / "w.safetensors")]) == 0
    assert "agrees with float" in capsys.readouterr().out


def test_wrong_input_is_explained(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    grey = tmp_path / "grey.safetensors"
    model = bitdial.build_model("cifar_resnet", blocks=1, width=4, in_channels=1)
    bitdial.save(bitdial.prepare(model, bitdial.QuantConfig(), torch.rand(2, 1, 16, 16)), grey)
    (tmp_path / "empty").mkdir()
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "text.jpg").write_text("words")
    (tmp_path / "far.csv").write_text("".join(f"{number:02}.png,99\n" for number in range(20)))
    file, images = str(place / "net.safetensors"), ["--images", str(place / "dev")]
    for words, said in {
        (file, "--images", str(tmp_path / "empty")): "has no images",
        (file, "--images", str(tmp_path / "bad")): "text.jpg cannot be read as an image",
        (file, "--images", "nowhere"): "nowhere does not exist",
        (file, *images, "--data", "digits"): "--data and --images are different data",
        (file, "--labels", "x"): "--labels is for folders of images; give --images DIR too",
        (file, "--crop", "8"): "--crop is for folders of images; give --images DIR too",
        (file, *images, "--labels", str(tmp_path / "far.csv")): "is of class 99, and the model has classes 0 to 4",
        (file, *images, "--labels", "folders"): "lies in no folder that would say its class",
        (file, *images, "--crop", "50"): "fewer than the crop of 50 x 50",
        (file, *images, "--model", "resnet99"): "model 'resnet99' is not known",
        (str(grey), *images, "--crop", "16"): "(samples of shape (3, 16, 16)) does not fit the model",
    }.items():
        assert main(["eval", *words]) == 1, words
        error = capsys.readouterr().err
        assert said in error, words
        assert "Traceback" not in error


def test_inspect_shows_how_images_become_inputs(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(place / "net.safetensors")]) == 0
    assert f"images         {SETTINGS}\n" in capsys.readouterr().out


def test_inspect_survives_settings_that_are_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = bitdial.build_model("cifar_resnet", blocks=1, width=4)
    prepared = bitdial.prepare(model, bitdial.QuantConfig(), torch.rand(2, 3, 16, 16))
    for number, stored in enumerate((7, {"crop": "x"}, {"mean": [1]}, ["a"], {"nothing": 1})):
        path = tmp_path / f"{number}.safetensors"
        bitdial.save(prepared, path, metrics={"image_settings": stored})
        assert main(["inspect", str(path)]) == 0
        assert "images         not usable: " in capsys.readouterr().out
        assert main(["eval", str(path), "--images", str(tmp_path)]) == 1
        assert "Traceback" not in capsys.readouterr().err
