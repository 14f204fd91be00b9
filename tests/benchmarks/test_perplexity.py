"""The benchmark of perplexity on a tiny language model with random weights."""

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch

from bitdial import QuantConfig

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def perplexity(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("perplexity")


def test_widths_of_one_file_beside_float(perplexity: Any) -> None:
    transformers = pytest.importorskip("transformers")
    settings = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(**settings, num_attention_heads=2, num_key_value_heads=1)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(config).eval()
        rows = torch.randint(0, 64, (3, 32))
    quant = QuantConfig(
        bit_choices=(8, 2), activations="float", keep_first_last=False, group_size=32, start="max"
    )  # fmt: skip
    found = perplexity.measure(model, rows, quant, "cpu")
    assert found["ratio"]["8"] == pytest.approx(1, abs=1e-3)
    assert abs(found["ratio"]["2"] - 1) > 1e-3
