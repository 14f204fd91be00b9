"""The benchmark of whole language models, on a tiny one."""

import argparse
import importlib
from pathlib import Path
from typing import Any

import pytest
import torch

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def test_decoding_and_prefill_are_timed_beside_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers", minversion="5")
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    benchmark: Any = importlib.import_module("llm_decode")
    options = argparse.Namespace(
        bits=[8], batches=[2], compiled=[], prompt=8, prefill=20, steps=2, rounds=1
    )  # fmt: skip
    with torch.random.fork_rng():
        rows = benchmark.measure("tiny", options, torch.device("cpu"))
    assert [(row["what"], row["bits"], row["batch"]) for row in rows] == [("decode", 8, 2), ("prefill", 8, 1)]
    for row in rows:
        assert row["tokens_per_s"] > 0
        assert abs(row["ratio"] - row["tokens_per_s"] / row["bf16_tokens_per_s"]) < 0.01 + row["ratio"] / 50


def test_a_step_of_decoding_gives_the_next_token_of_generate(monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip("transformers", minversion="5")
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    benchmark: Any = importlib.import_module("llm_decode")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**benchmark.SHAPES["tiny"])).eval()
    step, again = benchmark.decoding(model, False, 2, 8)
    ids = torch.cat([torch.arange(8), torch.zeros(1, dtype=torch.int64)]).expand(2, -1)
    again()
    wanted = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=1, do_sample=False)
    assert torch.equal(step(), wanted[:, 9:])
