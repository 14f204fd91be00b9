"""The comparison with lm-eval: what does not need lm-eval, and the rows that a run with it left."""

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

from bitdial.language.tasks import TASKS

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def parity(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("lm_eval_parity")


def test_a_passage_with_its_title_is_compared_with_the_plain_one(parity: Any) -> None:
    document = {"query": "Cats -- Cats purr.\nQuestion: do cats purr?\nAnswer:", "choices": ["yes", "no"], "gold": 0}
    plain = {"passage": "Cats purr.", "question": "do cats purr", "answer": True}
    found = parity.with_title(document, plain)
    assert found == {"passage": "Cats -- Cats purr.", "question": "do cats purr", "label": 1}
    with pytest.raises(AssertionError):
        parity.with_title(document, {**plain, "answer": False})


def test_the_stored_rows_show_equality() -> None:
    record = json.loads((ROOT / "results" / "lm-eval-parity.json").read_text())
    assert list(record["requests"]) == list(TASKS)
    assert all(found["different"] == 0 < found["questions"] for found in record["requests"].values())
    in_float = {row["task"]: row["questions"] for row in record["scores"] if row["model"] == "float"}
    assert len(in_float) >= 2
    assert min(in_float.values()) >= 200
    for row in record["scores"]:
        assert row["bitdial"] == row["lm_eval"]
        assert row["largest_difference"] < 1e-6 * row["largest_log_likelihood"] + 1e-4
