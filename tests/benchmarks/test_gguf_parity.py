"""The comparison with llama.cpp: what does not need it, and the rows that a run with it left."""

import importlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def parity(monkeypatch: pytest.MonkeyPatch) -> Any:
    pytest.importorskip("gguf")
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("gguf_parity")


def test_where_texts_part_and_by_how_little(parity: Any) -> None:
    logits = np.array([0.0, 3.0, 2.5, -1.0])
    ours = [[(1, logits), (1, logits)], [(1, logits), (1, logits)]]
    found = parity.compare(ours, [[1, 1], [1, 2]])
    assert (found["prompts"], found["equal"]) == (2, 1)
    spread = round(float(logits.std()), 3)
    assert found["parted"] == [{"prompt": parity.PROMPTS[1], "after": 1, "gap": 0.5, "spread": spread}]


def test_greedy_text_goes_on_from_what_was_taken(parity: Any) -> None:
    def after(ids: list[int]) -> np.ndarray:
        return np.eye(50)[ids[-1] + 1]

    assert [token for token, _ in parity.greedy(after, [3, 7])] == list(range(8, 8 + parity.TOKENS))


def test_the_stored_rows() -> None:
    record = json.loads((ROOT / "results" / "gguf-parity.json").read_text())
    assert {row["bits"] for row in record["rows"]} >= {8, 4}
    for row in record["rows"]:
        assert row["rounded"] is None, "scales are halves"
        assert row["packed"]["prompts"] == row["float32"]["prompts"] == row["prompts_cut_alike"] == 20
        assert row["float32"]["equal"] == 20, "with the same weights in float32 every text is ours"
        for parted in row["packed"]["parted"]:
            assert 0 <= parted["gap"] < parted["spread"], "llama.cpp takes another token where two are nearly as likely"
