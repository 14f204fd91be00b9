"""The benchmark of speculative decoding on a tiny language model with random weights."""

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def test_rows_for_each_draft_width_and_length(
    tiny_language: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    speculate = importlib.import_module("speculate")
    monkeypatch.setattr(speculate, "PROMPTS", ("the cat sat", "a dog ran on a mat"))
    arguments = ["--model", str(tiny_language.model), "--group-size", "16", "--bit-choices", "8", "4", "2"]
    arguments += ["--draft-bits", "8", "2", "--lengths", "3", "--tokens", "9", "--out", str(tmp_path / "rows.json")]
    monkeypatch.setattr(sys, "argv", ["speculate.py", *arguments])
    speculate.main()
    same, low = json.loads((tmp_path / "rows.json").read_text())
    assert (same["acceptance"], same["draft_bits"], same["draft_length"]) == (1, 8, 3)
    assert same["tokens_per_pass"] > low["tokens_per_pass"] >= 1
    assert low["acceptance"] < 1
    for row in (same, low):
        assert (row["identical"], row["prompts"], row["first_difference"]) == (2, 2, [])
        assert row["tokens_per_pass"] == pytest.approx(row["tokens"] / row["passes"], abs=1e-3)
        assert row["acceptance"] == pytest.approx(row["accepted"] / row["judged"], abs=1e-4)
        assert row["ratio_range"][0] <= row["ratio"] <= row["ratio_range"][1]
        assert "DIR" in row["command"]
        assert str(tiny_language.model) not in row["command"]


def test_the_margin_where_texts_part(tiny_language: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip("transformers", minversion="5")
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    speculate = importlib.import_module("speculate")
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_language.model, dtype=torch.float32)
    text = torch.tensor([5, 6, 7, 8])
    logits = model(input_ids=text[None, :2]).logits[0, -1]
    first, second = logits.topk(2).values.tolist()
    assert speculate.margin(model, text, text) is None
    assert speculate.margin(model, text, torch.tensor([5, 6, 9, 8])) == pytest.approx(first - second)
    assert speculate.margin(model, text, text[:3]) != speculate.margin(model, text, text[:3]), "NaN: one ends early"
