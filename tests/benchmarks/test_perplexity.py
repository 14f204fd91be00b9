"""The benchmark of perplexity on a tiny language model with random weights."""

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from bitdial import CalibrateConfig, QuantConfig, rotate

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def perplexity(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("perplexity")


def test_widths_of_one_file_beside_float(perplexity: Any, monkeypatch: pytest.MonkeyPatch) -> None:
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
    monkeypatch.setattr(
        perplexity, "rotate", lambda model, **how: rotate(model, **how, down_block=32)
    )  # 96 is no multiple of 64
    rotated = perplexity.measure(model, rows, quant, "cpu", rotated="merged")
    assert rotated["ratio"]["8"] == pytest.approx(1, abs=1e-3)
    assert rotated["ratio"]["2"] != found["ratio"]["2"]
    settings = perplexity.Calibration(CalibrateConfig(), torch.randint(0, 64, (33, 8)), 16)
    calibrated = perplexity.measure(model, rows, quant, "cpu", calibration=settings)
    assert calibrated["ratio"]["8"] == pytest.approx(1, abs=1e-2)
    assert calibrated["ratio"]["2"] != found["ratio"]["2"]


def test_rows_of_the_same_settings_are_replaced(perplexity: Any, tmp_path: Path) -> None:
    config = QuantConfig(bit_choices=(8, 4), group_size=32, activations="float").to_dict()
    record = {
        "config": config, "model": "m", "rotated": False, "perplexity": {"float": 2.0, "8": 2.1, "4": 2.5},
        "seconds": 1.0, "device": "cpu", "versions": {}, "command": "c",
    }  # fmt: skip
    settings = {"importance": {"8": 0.5}, "scale_importance": {}, "tolerance": 1e-3}
    calibrated = {"calibrated": {"effort": "quick", "seed": 0, "tokens": 64, **settings}}
    path = tmp_path / "rows.json"
    for more in ({"calibrated": None}, calibrated, {**calibrated, "seconds": 3.0}):
        perplexity.add_rows(path, perplexity.rows_of({**record, **more}))
    rows = json.loads(path.read_text())
    found = [(row["method"], row["bits"], row["perplexity"], row["seconds"], row["tokens"]) for row in rows]
    assert found == [
        ("round to nearest", 8, 2.1, 1.0, 0),
        ("round to nearest", 4, 2.5, 1.0, 0),
        ("calibrated quick", 8, 2.1, 3.0, 64),
        ("calibrated quick", 4, 2.5, 3.0, 64),
    ]
    assert {(row["weights"], row["group_size"], row["activations"]) for row in rows} == {
        ("double_rounding", 32, "float")
    }
