"""`bitdial calibrate-llm`: what it prints and leaves, and how it takes bad input."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import bitdial
from bitdial.cli import main

pytestmark = pytest.mark.usefixtures("one_thread")
SETTINGS = "--bits 8,3 --group-size 16 --rows 6 --held-out 3 --length 24"


@pytest.fixture
def words(tiny_language: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The command, in an empty folder, with a copy of the model."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(tiny_language.model, "llama")
    shutil.copy(tiny_language.text, "text.txt")
    return ["calibrate-llm", "llama", "--text", "text.txt", "--out", "net.safetensors", *SETTINGS.split()]


def test_a_run_shows_perplexities_and_leaves_a_file(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*words, "--importance", "3=2", "--scale-importance", "8=0.3", "--embedding-bits", "8"]) == 0
    out = capsys.readouterr().out
    for name in ("float", "8 bits", "3 bits"):
        assert re.search(rf"^{name} +[\d.]+", out, re.M)
    assert "On 3 rows of 24 tokens at the end of text.txt" in out
    result = json.loads(Path("net.json").read_text())
    assert (result["tokens"], result["calibration"]["effort"]) == (6 * 24, "quick")
    assert main(["export", "net.safetensors", "--hf", "folder", "--model", "llama"]) == 0
    live = bitdial.load_pretrained("folder", bits=3)
    assert bitdial.get_bits(live)["model.layers.0.mlp.up_proj"] == (3, 3)
    assert bitdial.get_bits(live)["lm_head"] == (8, 8)
    train = "train llm --model llama --text text.txt --out out --calibrated net.safetensors --length 16 --batch 2"
    assert main([*train.split(), "--steps", "1", "--evaluations", "1", "--held-out", "32"]) == 0


def test_activations_and_rotation(words: list[str]) -> None:
    assert main([*words, "--activations", "dynamic", "--rotate", "--effort", "medium", "--iterations", "2"]) == 0
    artifact = bitdial.read_artifact("net.safetensors")
    assert artifact.manifest["rotation"]
    assert {entry["activations"] for entry in artifact.layers.values()} >= {"dynamic"}


def test_bad_input_is_said_in_two_lines(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    Path("there.safetensors").write_text("mine")
    for change, problem in {
        "llama=nowhere": "nowhere has no tokenizer that transformers can read",
        "text.txt=nowhere.txt": "there is no text file nowhere.txt",
        "net.safetensors=net.bin": "--out net.bin: name a file that ends in .safetensors",
        "net.safetensors=there.safetensors": "there.safetensors is there already; choose another --out",
        "net.safetensors=none/net.safetensors": "--out none/net.safetensors: there is no folder none",
        "24=400": r"text.txt: its 7 rows of 400 tokens are fewer than 6 to calibrate on and 3 to measure on; give more",
        "24=5000": r"the text has \d+ tokens, less than 1 x 5000; give a longer text",
        "16=5": "layer .*: its 32 inputs are no multiple of group_size=5",
    }.items():
        old, new = change.split("=")
        assert main([new if word == old else word for word in words]) == 2, change
        check_two_lines(capsys.readouterr().err, problem)
    for more, problem in {
        "--activations odd": "activations='odd' is not known",
        "--tolerance 2": "tolerance=2.0 must be a number from 0 to 1",
        "--embedding-bits 5": "Rule.*bits=5",
        "--rows 1 --held-out 1 --length 65": "rows of 65 tokens; the model takes 64 at once",
    }.items():
        assert main([*words, *more.split()]) == 2, more
        check_two_lines(capsys.readouterr().err, problem)
    for more, problem in {
        "--bits 8,9": "argument --bits: ",
        "--importance 8": "argument --importance: '8' is not BITS=NUMBER, such as 2=0.1",
    }.items():
        with pytest.raises(SystemExit, match="2"):
            main([*words, *more.split()])
        check_two_lines(capsys.readouterr().err, problem)
    assert Path("there.safetensors").read_text() == "mine"
    assert not list(Path().glob("net*"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_said_before_any_work(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*["nowhere" if word == "llama" else word for word in words], "--device", "cuda"]) == 2
    check_two_lines(capsys.readouterr().err, "device cuda: PyTorch finds no GPU here")


def check_two_lines(error: str, problem: str) -> None:
    assert re.match(f"bitdial calibrate-llm: {problem}", error), error
    assert error.endswith("\nFor help: bitdial calibrate-llm --help\n")
    assert error.count("\n") == 2, error
