"""`bitdial search --measure`: what it finds, prints, writes and stores, and clear words for wrong input."""

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import bitdial
from bitdial.cli import main
from bitdial.cli.arguments import resolve_setting

pytest.importorskip("highspy")


class Given:
    """A file of a tiny network, its float weights, and data."""

    def __init__(self, folder: Path) -> None:
        torch.manual_seed(0)
        self.net: nn.Module = bitdial.build_model("cifar_resnet", blocks=1, width=4, in_channels=1).eval()
        self.x, y = torch.rand(40, 1, 8, 8), np.zeros(40, dtype=np.int64)
        model = bitdial.prepare(self.net, bitdial.QuantConfig(bit_choices=(4, 3, 2)), self.x)
        self.file, self.data = folder / "net.safetensors", folder / "data.npz"
        self.weights = folder / "float.safetensors"
        bitdial.save(model, self.file)
        np.savez(self.data, x=self.x.numpy(), y=y)
        save_file(self.net.state_dict(), self.weights)
        self.pattern = "layer[12].*=3"  # fewer layers to choose for
        self.budget = 3.25

    def command(self, *more: str) -> list[str]:
        words = ["search", str(self.file), "--measure", "--data", str(self.data), "--average-bits", str(self.budget)]
        return [*words, "--pin", self.pattern, *more]

    def expected(self, samples: int, **settings: Any) -> Any:
        artifact = bitdial.read_artifact(self.file)
        order = torch.randperm(len(self.x), generator=torch.Generator().manual_seed(settings.pop("seed", 0)))
        x = self.x[order[:samples]]
        pinned = {name: 3 for name in artifact.layers if name.startswith(("layer1.", "layer2."))}
        costs = bitdial.measure_costs(bitdial.load_trainable(artifact), x[:1])
        budgets = {"average_bits": self.budget}
        batches = list(x.split(16))
        live = bitdial.load(artifact)
        return bitdial.measured_search(live, batches, costs, budgets, pinned=pinned, progress=False, **settings)


@pytest.fixture
def given(tmp_path: Path) -> Given:
    return Given(tmp_path)


def test_it_prints_writes_and_stores_what_the_library_finds(
    given: Given, tmp_path: Path, capsys: pytest.CaptureFixture[str], no_gpu: None
) -> None:
    out = tmp_path / "plans.json"
    more = ["--reference", str(given.weights), "--activation-bits", "4", "--samples", "36", "--seed", "3"]
    assert main(given.command(*more, "--store", "--out", str(out))) == 0
    text = capsys.readouterr().out
    found = given.expected(36, reference=given.net, activation_bits=4, seed=3)
    assert bitdial.read_artifact(given.file).plans == {"3.25 bits": found.plan}
    written = json.loads(out.read_text())["plans"]["3.25 bits"]
    assert (written["distance"], written["measured"]) == (found.distance, found.measured)
    assert resolve_setting(f"{out}:3.25 bits", bitdial.read_artifact(given.file)) == found.plan
    row = next(line for line in text.splitlines() if line.startswith("3.25 bits "))
    assert f" {found.distance:.4g} " in row
    beside = next(line for line in text.splitlines() if "everywhere" in line)
    assert f"{found.uniform_distance:.4g}" in beside
    assert "plans by their distance from the given model, on 36 samples" in text
    assert "since no step or swap helps" in text
    assert "--reference" not in text
    for layer, bits in found.plan.items():
        row = next(line for line in text.splitlines() if line.startswith(f"{layer} "))
        assert row.split()[-1] == (f"{bits[0]}:{bits[1]}" if bits[0] != bits[1] else f"{bits[0]}")
    assert {act for name, (_, act) in found.plan.items() if not name.startswith(("layer1.", "layer2."))} == {4}


def test_without_float_weights_it_says_what_it_compared_with(given: Given, capsys: pytest.CaptureFixture[str]) -> None:
    before = given.file.read_bytes()
    assert main(given.command("--samples", "8", "--name", "mine", "--seconds", "600")) == 0
    text = capsys.readouterr().out
    assert "distance from the model at its highest width, on 8 samples" in text
    assert "The file has no float model to compare with; --reference" in text
    assert given.file.read_bytes() == before


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--reference", "DATA"], "data.npz is not a safetensors file"),
        (["--reference", "FILE"], "is a bitdial artifact, whose layers are integers; give float weights"),
        (["--reference", "OTHER"], "is not for cifar_resnet: the file has no "),
        (["--reference", "nowhere"], "cannot read nowhere"),
        (["--sensitivity", "x.json"], "--sensitivity is for searches by sensitivities"),
        (["--objective", "bits"], "--objective is for searches by sensitivities"),
        (["--input", "1x8x8"], "--input is for searches without data"),
        (["--activation-bits", "5"], "bits=5 is not in bit_choices"),
        (["--bytes", "10"], "no plan meets bytes <= 10"),
        (["--data", "nowhere"], "--data nowhere: not digits, a folder or a file"),
        (["--images", "nowhere"], "--data and --images are different data"),
        (["--count", "8"], "--count is for folders of images; give --images DIR too"),
        (["--crop", "8"], "--crop is for folders of images; give --images DIR too"),
    ],
)
def test_wrong_input_is_named(given: Given, capsys: pytest.CaptureFixture[str], words: list[str], problem: str) -> None:
    places = {"DATA": str(given.data), "FILE": str(given.file), "OTHER": str(given.data.with_name("other"))}
    save_file({"a": torch.zeros(1)}, places["OTHER"])
    assert main(given.command(*(places.get(word, word) for word in words))) == 1
    assert problem in capsys.readouterr().err


def test_options_for_measuring_need_it(given: Given, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["--samples", "8"], ["--data", "x.npz"], ["--seconds", "2"], ["--reference", "x"], ["--seed", "1"],
                  ["--images", "x"], ["--count", "8"], ["--model", "x"], ["--order", "BGR"]):  # fmt: skip
        assert main(["search", str(given.file), "--average-bits", "3", *words]) == 1
        assert f"{words[0]} is for searches that measure; add --measure" in capsys.readouterr().err
    for words in (["--seconds", "0"], ["--seconds", "long"], ["--samples", "0"]):
        with pytest.raises(SystemExit):
            main(given.command(*words))
        assert f"argument {words[0]}" in capsys.readouterr().err


SETTINGS = bitdial.ImageSettings(resize=None, crop=8, mean=(100, 110, 120), std=(60, 50, 40))


class Images:
    """A file that says how images become inputs, as calibrated ones do; its float weights, and a folder of images."""

    def __init__(self, folder: Path, *, library: bool = False) -> None:
        image = pytest.importorskip("PIL.Image")
        (folder / "photos").mkdir()
        random = np.random.default_rng(0)
        for number in range(24):
            pixels = random.integers(0, 256, (9, 10, 3), dtype=np.uint8)
            image.fromarray(pixels).save(folder / "photos" / f"{number:02}.png")
        torch.manual_seed(0)
        self.net: nn.Module = bitdial.build_model("cifar_resnet", blocks=1, width=4).eval()
        if library:
            del self.net.architecture
        self.photos, self.file, self.weights = folder / "photos", folder / "net.safetensors", folder / "w.safetensors"
        model = bitdial.prepare(self.net, bitdial.QuantConfig(bit_choices=(4, 3, 2)), self.batches(24)[0])
        bitdial.save(model, self.file, metrics={"model": "timm:net", "image_settings": SETTINGS.to_dict()})
        save_file(self.net.state_dict(), self.weights)

    def batches(self, count: int) -> bitdial.ImageBatches:
        return bitdial.ImageBatches(self.photos, SETTINGS, batch_size=16, count=count)

    def command(self, *more: str) -> list[str]:
        words = ["search", str(self.file), "--measure", "--images", str(self.photos), "--average-bits", "3.25"]
        return [*words, "--pin", "layer[12].*=3", *more]

    def expected(self, count: int, **settings: Any) -> Any:
        artifact, batches = bitdial.read_artifact(self.file), list(self.batches(count))
        pinned = {name: 3 for name in artifact.layers if name.startswith(("layer1.", "layer2."))}
        costs = bitdial.measure_costs(bitdial.load_trainable(artifact, self.net), batches[0][:1])
        live = bitdial.load(artifact, self.net)
        return bitdial.measured_search(
            live, batches, costs, {"average_bits": 3.25}, pinned=pinned, progress=False, **settings
        )


def test_on_a_folder_of_images_as_the_file_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = Images(tmp_path)
    assert main(given.command("--count", "20", "--reference", str(given.weights), "--store")) == 0
    text = capsys.readouterr().out
    found = given.expected(20, reference=given.net)
    assert f"Images: {SETTINGS}\n" in text
    assert "distance from the given model, on 20 samples" in text
    assert bitdial.read_artifact(given.file).plans == {"3.25 bits": found.plan}
    row = next(line for line in text.splitlines() if line.startswith("3.25 bits "))
    assert f" {found.distance:.4g} " in row
    assert "--reference" not in text
    assert main(["eval", str(given.file), "--images", str(given.photos), "--bits", "3.25 bits"]) == 0
    assert "3.25 bits" in capsys.readouterr().out
    assert main(given.command("--order", "BGR", "--seconds", "0.001")) == 0
    text = capsys.readouterr().out
    assert "8 x 8, BGR, mean 100 110 120" in text
    assert "The file has no float model to compare with; --reference" in text
    assert "on 24 samples" in text


def test_a_file_of_a_library_needs_its_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    given = Images(tmp_path, library=True)
    timm: Any = ModuleType("timm")
    timm.is_model = lambda name: name == "net"
    timm.create_model = lambda name, **options: bitdial.build_model("cifar_resnet", blocks=1, width=4)
    monkeypatch.setitem(sys.modules, "timm", timm)
    assert main(given.command("--count", "8")) == 1
    assert "is of the model timm:net; pass --model timm:net" in capsys.readouterr().err
    assert main(given.command("--count", "8", "--model", "timm:net")) == 0
    assert "distance from the model at its highest width, on 8 samples" in capsys.readouterr().out
    assert main(given.command("--count", "8", "--model", "timm:net", "--reference", str(given.weights))) == 0
    text = capsys.readouterr().out
    assert f" {given.expected(8, reference=given.net).distance:.4g} " in text
    assert "distance from the given model, on 8 samples" in text


def test_wrong_folders_and_options_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = Images(tmp_path)
    (tmp_path / "empty").mkdir()
    for words, problem in {
        ("--images", str(tmp_path / "empty")): "has no images",
        ("--images", "nowhere"): "nowhere does not exist",
        ("--samples", "8"): "--samples is for --data; of a folder of images, --count N are taken",
        ("--seed", "0"): "--seed is for --data",
        ("--crop", "50"): "fewer than the crop of 50 x 50",
        ("--reference", str(given.photos / "00.png")): "00.png is not a safetensors file",
    }.items():
        assert main(given.command(*words)) == 1, words
        error = capsys.readouterr().err
        assert problem in error, words
        assert "Traceback" not in error
