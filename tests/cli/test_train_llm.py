"""`bitdial train llm`: what it prints and leaves, how it is stopped, and how it takes bad input."""

import json
import os
import re
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

import bitdial
from bitdial.cli import main
from bitdial.recipes import llm as recipe
from bitdial.train.callbacks import Run

pytestmark = pytest.mark.usefixtures("one_thread")
SETTINGS = "--bits 8,2 --group-size 16 --length 16 --batch 4 --steps 4 --evaluations 2 --held-out 64 --name tiny"


@pytest.fixture
def words(tiny_language: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The command, in an empty folder, with a copy of the model."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(tiny_language.model, "llama")
    shutil.copy(tiny_language.text, "text.txt")
    return ["train", "llm", "--model", "llama", "--text", "text.txt", "--out", "out", *SETTINGS.split()]


def test_a_run_shows_perplexities_and_leaves_a_file(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 0
    out = capsys.readouterr().out
    assert re.search(r"^Step 4 of 4 \(256 tokens, \d+ s\): perplexity 8b [\d.]+  2b [\d.]+$", out, re.M)
    assert re.search(r"^2 bits +[\d.]+ +[\d.]+ +[\d.]+$", out, re.M)
    assert "On 4 rows of 16 tokens at the end of text.txt; trained on 256 tokens" in out
    assert bitdial.read_artifact("out/tiny.safetensors").bit_choices == (8, 2)
    rows = json.loads(Path("out/tiny.json").read_text())["rows"]
    assert rows[1]["command"] == " ".join(["bitdial", *words])
    assert main(words) == 0
    assert "this run is finished" in capsys.readouterr().out
    assert main(["export", "out/tiny.safetensors", "--hf", "folder", "--model", "llama"]) == 0
    live = bitdial.load_pretrained("folder", bits=2)
    assert set(bitdial.get_bits(live).values()) == {(2, 2)}


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 1), (signal.SIGINT, 130)])
def test_a_run_that_is_stopped_saves_itself(
    number: signal.Signals, code: int, words: list[str], monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    def on_step(self: Any, run: Run) -> None:
        if run.step == 3:
            os.kill(os.getpid(), number)

    with monkeypatch.context() as patch:
        patch.setattr(recipe._Watch, "on_step", on_step)
        assert main(words) == code
    assert "after step 3; run again to go on from out" in capsys.readouterr().err
    assert main(words) == 0
    assert "Going on from step 3 of 4" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        ("--model nowhere", "there is no folder nowhere"),
        ("--text nowhere.txt", "there is no text file nowhere.txt"),
        ("--length 5000", r"rows of 5000 tokens; the model takes 64 at once"),
        ("--length 1", "--length 1: a whole number of at least 2"),
        ("--batch 3 --accumulate 2", "--batch 3 does not go into 1 processes of --accumulate 2 equal parts"),
        ("--steps 4 --tokens 9", "--steps and --tokens say the same"),
        ("--activations odd", "activations='odd' is not known"),
        ("--lr 0", "lr=0.0 must be a positive number"),
        ("--calibrated x.safetensors", "--bits, --group-size: a run that starts from x.safetensors"),
    ],
)
def test_bad_input_is_said_in_two_lines(
    more: str, problem: str, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*words, *more.split()]) == 2
    check_two_lines(capsys.readouterr().err, problem)
    assert not Path("out/tiny.ckpt").exists()


def check_two_lines(error: str, problem: str) -> None:
    assert re.match(f"bitdial train llm: {problem}", error)
    assert error.endswith("\nFor help: bitdial train llm --help\n")
    assert error.count("\n") == 2


def test_a_folder_without_a_tokenizer(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    for path in Path("llama").glob("tokenizer*"):
        path.unlink()
    assert main(words) == 2
    check_two_lines(capsys.readouterr().err, "llama has no tokenizer that transformers can read")


def test_a_tokenizer_of_another_model(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    path = Path("llama/tokenizer.json")
    rules = json.loads(path.read_text())
    rules["model"]["vocab"]["zebra"] = 64
    path.write_text(json.dumps(rules))
    assert main(words) == 2
    check_two_lines(capsys.readouterr().err, "the tokenizer of llama has the token 'zebra' as number 64, and the model")


def test_a_folder_of_something_else(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    Path("llama/model.safetensors").write_bytes(b"nonsense")
    assert main(words) == 2
    check_two_lines(capsys.readouterr().err, "llama has no causal language model that transformers can read")
