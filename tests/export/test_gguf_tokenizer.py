"""Tokenizers in GGUF files: tokens, kinds and rules as the folder has them; what has no name there is refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from bitdial.errors import BitdialError, ConfigError, ExportError, MissingDependencyError
from bitdial.export.gguf_tokenizer import add_tokenizer

gguf = pytest.importorskip("gguf")
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
DIGITS = {"type": "Digits", "individual_digits": True}
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def split(pattern: str) -> dict[str, Any]:
    rule = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return {"type": "Sequence", "pretokenizers": [rule, {**BYTES, "use_regex": False}]}


def folder(place: Path, pre_tokenizer: Any = BYTES, *, model: dict[str, Any] | None = None, **steps: Any) -> Path:
    """A folder with a tokenizer of seven tokens, two of them added."""
    place.mkdir(exist_ok=True)
    vocab = {"<s>": 0, "a": 1, "b": 2, "ab": 3, "Ġ": 4}
    added = [
        {"id": 0, "content": "<s>", "special": True},
        {"id": 5, "content": "<tool>", "special": False},
        {"id": 6, "content": "</s>", "special": True},
    ]
    bpe = {"type": "BPE", "vocab": vocab, "merges": [["a", "b"]], "ignore_merges": False, "byte_fallback": False}
    whole = {"pre_tokenizer": pre_tokenizer, "normalizer": None, "added_tokens": added, "model": bpe | (model or {})}
    (place / "tokenizer.json").write_text(json.dumps(whole | steps), encoding="utf-8")
    (place / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    (place / "config.json").write_text("{}")
    return place


def fields(place: Path, count: int = 8) -> dict[str, Any]:
    """What comes out of a file with that tokenizer."""
    writer = gguf.GGUFWriter(place / "out.gguf", "llama")
    add_tokenizer(writer, place, count)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = gguf.GGUFReader(place / "out.gguf").fields
    return {k.removeprefix("tokenizer.ggml."): v.contents() for k, v in found.items() if k.startswith("tokenizer.ggml")}


def test_byte_level_bpe(tmp_path: Path) -> None:
    kinds = gguf.TokenType
    assert fields(folder(tmp_path)) == {
        "model": "gpt2", "pre": "gpt-2", "merges": ["a b"],
        "tokens": ["<s>", "a", "b", "ab", "Ġ", "<tool>", "</s>", "[PAD7]"],
        "token_type": [kinds.CONTROL, *[kinds.NORMAL] * 4, kinds.USER_DEFINED, kinds.CONTROL, kinds.UNUSED],
        "bos_token_id": 0, "eos_token_id": 6, "add_bos_token": False,
    }  # fmt: skip


def test_the_rule_that_splits_a_text_is_named_by_its_steps(tmp_path: Path) -> None:
    sequence = {"type": "Sequence", "pretokenizers": [DIGITS, BYTES]}
    for rule, whole_words, name in (
        (BYTES, False, "gpt-2"), (sequence, False, "smollm"), (split(LLAMA3), True, "llama-bpe"),
        (split(LLAMA3.replace("{1,3}", "")), False, "qwen2"),
    ):  # fmt: skip
        place = folder(tmp_path, rule, model={"ignore_merges": whole_words})
        assert fields(place)["pre"] == name
        other = folder(tmp_path, rule, model={"ignore_merges": not whole_words})
        with pytest.raises(ExportError, match=r"llama\.cpp's name for this pre_tokenizer is not known here"):
            fields(other)
    first = {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<s>"}}, {"Sequence": {"id": "A"}}]}
    assert fields(folder(tmp_path, post_processor=first))["add_bos_token"] is True


def test_what_is_not_known_is_refused(tmp_path: Path) -> None:
    cases: list[tuple[dict[str, Any], type[BitdialError], str]] = [
        ({"pre_tokenizer": split(r"\p{N}|\s")}, ExportError, "pre_tokenizer is not known here"),
        ({"pre_tokenizer": {**BYTES, "add_prefix_space": True}}, ExportError, "pre_tokenizer is not known here"),
        ({"normalizer": {"type": "Lowercase"}}, ExportError, "has a normalizer"),
        ({"model": {"type": "Unigram"}}, ExportError, "no tokenizer that is known here; tokenizer=False"),
        ({"model": {"byte_fallback": True}}, ExportError, "neither tokenizer.json with byte-level BPE"),
        ({"model": {"vocab": {"a": 8}}}, ConfigError, "has tokens up to 8, the model has 8"),
        ({"model": {"merges": [1, 2]}}, ExportError, "its tokenizer cannot be read"),
        ({"pre_tokenizer": None}, ExportError, "its tokenizer cannot be read"),
        ({"added_tokens": [{"content": "x"}]}, ExportError, "its tokenizer cannot be read"),
    ]
    for settings, error, said in cases:
        with pytest.raises(error, match=said):
            fields(folder(tmp_path, **settings))
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match="is not a JSON file"):
        fields(tmp_path)


def test_pieces_need_their_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"")
    monkeypatch.setattr("gguf.vocab.SentencePieceProcessor", None)
    with pytest.raises(MissingDependencyError, match=r"sentencepiece is not installed.*bitdial\[gguf\]"):
        fields(tmp_path)


def test_pieces_with_scores(tmp_path: Path) -> None:
    pieces = pytest.importorskip("sentencepiece")
    text = tmp_path / "text"
    text.write_text("\n".join(["the cat sat on the mat", "a dog and a cat"] * 20))
    pieces.SentencePieceTrainer.train(
        input=str(text), model_prefix=str(tmp_path / "tokenizer"), vocab_size=40, model_type="bpe",
        character_coverage=1.0, minloglevel=2,
    )  # fmt: skip
    known = pieces.SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model"))
    added = {"40": {"content": "<tool>", "special": False}, "1": {"content": "<s>", "special": True}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": added, "bos_token": "<s>"}))
    found = fields(tmp_path, 42)
    assert found["model"] == "llama"
    assert found["tokens"] == [known.id_to_piece(i) for i in range(40)] + ["<tool>", "[PAD41]"]
    assert found["scores"][3:40] == pytest.approx([known.get_score(i) for i in range(3, 40)])
    kinds = gguf.TokenType
    assert found["token_type"][:4] == [kinds.UNKNOWN, kinds.CONTROL, kinds.CONTROL, kinds.NORMAL]
    assert found["token_type"][40:] == [kinds.USER_DEFINED, kinds.UNUSED]
    assert found["add_space_prefix"] is True
    (tmp_path / "tokenizer.model").write_bytes(b"not a model")
    with pytest.raises(ExportError, match="its tokenizer cannot be read"):
        fields(tmp_path, 42)
