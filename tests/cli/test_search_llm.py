"""`bitdial search-llm`: a plan in the bytes of a width, and how it takes bad input."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

import bitdial
from bitdial.cli import main
from bitdial.language.folder import load_float

pytestmark = pytest.mark.usefixtures("one_thread")


def test_a_plan_in_the_bytes_of_a_width(
    tiny_language: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(tiny_language.model, "llama")
    shutil.copy(tiny_language.text, "text.txt")
    net = load_float(Path("llama"), dtype=None)
    config = bitdial.QuantConfig(bit_choices=(8, 4, 2), activations="float", group_size=16, start="balanced")
    model = bitdial.prepare(net, config, {"input_ids": net.dummy_inputs["input_ids"]})
    bitdial.calibrate(model, {"input_ids": net.dummy_inputs["input_ids"]}, progress=False)
    bitdial.save(model, "net.safetensors")
    words = ["search-llm", "net.safetensors", "--model", "llama", "--text", "text.txt", "--bytes-of", "4"]
    words += ["--rows", "2", "--length", "16"]
    assert main([*words, "--store", "--out", "plan.json"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"4\.0 bits +[\d,]+", out)
    plan = bitdial.read_artifact("net.safetensors").plans["4.0 bits"]
    widths = {name: bits for name, (bits, _) in plan.items()}
    assert len({widths[f"model.layers.0.self_attn.{part}_proj"] for part in "qkv"}) == 1
    found = json.loads(Path("plan.json").read_text())["plans"]["4.0 bits"]
    assert found["costs"]["bytes"] <= found["uniform_costs"]["bytes"]
    assert found["distance"] <= found["uniform_distance"]
    assert found["samples"] == 2
    assert main(["eval-llm", "net.safetensors", "--model", "llama", "--text", "text.txt", "--length", "16"]) == 0
    assert "4.0 bits" in capsys.readouterr().out
    for change, problem in {
        "--bytes-of 3": "the file has no 3 bits, whose bytes are the budget",
        "--rows 900": "text.txt has .* rows of 16 tokens; give more text, or fewer rows than 900",
        "--length 2": "rows of 2 tokens are too short",
        "--model nowhere": "nowhere has no tokenizer",
        "--text none.txt": "there is no text file none.txt",
    }.items():
        assert main([*words, *change.split()]) == 2, change
        error = capsys.readouterr().err
        assert re.match(f"bitdial search-llm: {problem}", error), error
        assert error.count("\n") == 2
