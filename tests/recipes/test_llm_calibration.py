"""Language models calibrated from a text: better than nearest codes, resumed to the same file, never half written."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import bitdial
from bitdial.calibrate import CalibrateConfig
from bitdial.calibrate.checkpoint import Checkpoint
from bitdial.errors import ConfigError
from bitdial.prepare.config import QuantConfig
from bitdial.recipes.language_model import LanguageModel
from bitdial.recipes.llm_calibration import LlmCalibration, calibrate_llm, embedding_rules, read_rows

pytestmark = pytest.mark.usefixtures("one_thread")
WIDTHS = (8, 4, 3)


def run_of(tiny_language: Any, out: Path, **changes: Any) -> LlmCalibration:
    language = LanguageModel.read(tiny_language.model)
    rows, held_out = read_rows(tiny_language.text, language.tokenizer, rows=12, held_out=6, length=24)
    rules = embedding_rules(language.model, 8)
    quant = QuantConfig(bit_choices=WIDTHS, group_size=16, activations="float", start="balanced", rules=rules)
    given: dict[str, Any] = {"quant": quant, "config": CalibrateConfig(), "progress": False, **changes}
    return LlmCalibration(language=language, rows=rows, held_out=held_out, out=out, **given)


def test_what_comes_out_is_better_than_nearest_codes(tiny_language: Any, tmp_path: Path) -> None:
    told: list[str] = []
    run = run_of(tiny_language, tmp_path / "net.safetensors")
    result = calibrate_llm(run, tell=told.append)
    assert {path.name for path in tmp_path.iterdir()} == {"net.safetensors", "net.json"}
    assert json.loads(run.numbers.read_text()) == json.loads(json.dumps(result))
    assert len(told) == 2 + len(WIDTHS)

    live = bitdial.load(run.out, run.language.model)
    assert bitdial.get_bits(live)["lm_head"] == bitdial.get_bits(live)["model.embed_tokens"] == (8, 8)
    prepared = bitdial.prepare(run.language.model, run.quant, {"input_ids": run.rows[:4]})
    with torch.no_grad():
        wanted = run.language.model(run.held_out).logits
        for bits in WIDTHS:
            bitdial.set_bits(live, bits)
            bitdial.set_bits(prepared, bits)
            assert result["perplexity"][str(bits)] == pytest.approx(bitdial.perplexity(live, run.held_out), rel=1e-6)
            apart, nearest = ((each(run.held_out).logits - wanted).square().mean() for each in (live, prepared))
            if bits < 8:
                assert apart < 0.8 * nearest, bits
    artifact = bitdial.read_artifact(run.out)
    assert artifact.metrics["perplexity"] == result["perplexity"]


def test_a_run_that_was_stopped_goes_on_to_the_same_file(
    tiny_language: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, stopped = (run_of(tiny_language, tmp_path / name / "net.safetensors") for name in ("whole", "stopped"))
    for run in (whole, stopped):
        run.out.parent.mkdir()
    calibrate_llm(whole)
    write = Checkpoint.write

    def stop_after_one(self: Checkpoint, reports: list[Any]) -> None:
        write(self, reports)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Checkpoint, "write", stop_after_one)
        with pytest.raises(KeyboardInterrupt):
            calibrate_llm(stopped)
    assert [path.name for path in stopped.out.parent.iterdir()] == ["net.ckpt"]
    calibrate_llm(stopped)
    one, two = (bitdial.read_artifact(run.out).tensors for run in (whole, stopped))
    assert one.keys() == two.keys()
    assert [name for name in one if not torch.equal(one[name], two[name])] == []


def test_nothing_is_written_over(tiny_language: Any, tmp_path: Path) -> None:
    run = run_of(tiny_language, tmp_path / "net.safetensors")
    run.numbers.write_text("mine")
    with pytest.raises(ConfigError, match=r"net.json is there already; choose another --out"):
        calibrate_llm(run)
    assert run.numbers.read_text() == "mine"


def test_rows_to_measure_on_are_not_calibrated_on(tiny_language: Any) -> None:
    tokenizer = LanguageModel.read(tiny_language.model).tokenizer
    tokens = torch.tensor(tokenizer(tiny_language.text.read_text())["input_ids"])
    rows, held_out = read_rows(tiny_language.text, tokenizer, rows=3, held_out=2, length=10)
    assert torch.equal(rows.flatten(), tokens[:30])
    assert torch.equal(held_out.flatten(), tokens[-20:])
    most = len(tokens) // 10
    rows, held_out = read_rows(tiny_language.text, tokenizer, rows=most - 1, held_out=1, length=10)
    assert (len(rows), len(held_out)) == (most - 1, 1)
    with pytest.raises(ConfigError, match=rf"its {most} rows of 10 tokens are fewer than {most} to calibrate on and 1"):
        read_rows(tiny_language.text, tokenizer, rows=most, held_out=1, length=10)
