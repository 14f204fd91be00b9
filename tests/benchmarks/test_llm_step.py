"""The benchmark of joint steps of language models, on a tiny one."""

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
TINY = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1,
}  # fmt: skip


def test_a_joint_step_is_timed_beside_float_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers", minversion="5")
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    benchmark: Any = importlib.import_module("llm_step")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        found = benchmark.measure(benchmark.float_model(None, **TINY), torch.randint(0, 64, (2, 9)), (8, 2), rounds=1)
    assert found["ratio"] == found["joint"]["seconds"] / found["float"]["seconds"] / 2
    assert found["joint"]["seconds"] > 0
    assert found["tokens_a_second"] == 16 / found["joint"]["seconds"]
