"""The tokenizer of a transformers folder in a GGUF file, where llama.cpp cuts text as it does.

Byte-level BPE is known by its steps in tokenizer.json: how it splits a text before it merges. llama.cpp has these rules
by name. Pieces with scores come from tokenizer.model. What is not known is refused: a wrong rule would cut some texts
otherwise, without a word.
"""

from pathlib import Path
from typing import Any

from bitdial.errors import BitdialError, ConfigError, ExportError, MissingDependencyError
from bitdial.files.atomic import read_json

FILE, PIECES, SETTINGS = "tokenizer.json", "tokenizer.model", "tokenizer_config.json"
WAY_OUT = "tokenizer=False (--no-tokenizer) leaves it out, for token ids only"
# How texts are split before merges, by llama.cpp's name: kinds of step, the patterns in them, and whether a word that
# is a token is taken whole (ignore_merges).
_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SPLITS: dict[tuple[Any, ...], str] = {
    (("bytes and words",), False): "gpt-2",
    (("digits", "bytes and words"), False): "smollm",
    ((_CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _REST, "bytes"), True): "llama-bpe",
    ((_CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _REST, "bytes"), False): "qwen2",
}


def add_tokenizer(writer: Any, folder: Path, count: int) -> None:
    """Put the tokenizer of `folder` into GGUF's `writer`, for a model of `count` tokens."""
    try:
        steps = read_json(folder / FILE) if (folder / FILE).is_file() else {"model": {"type": None}}
        if steps["model"]["type"] == "BPE" and not steps["model"].get("byte_fallback"):
            return _add_bpe(writer, folder, steps, count)
        if (folder / PIECES).is_file():
            return _add_pieces(writer, folder, count)
    except (BitdialError, OSError):
        raise
    except Exception as problem:  # whatever the library makes of a hostile folder
        raise ExportError(f"{folder}: its tokenizer cannot be read: {problem!r}; {WAY_OUT}") from problem
    lacks = f"neither {FILE} with byte-level BPE nor {PIECES}"
    raise ExportError(f"{folder} has {lacks}: no tokenizer that is known here; {WAY_OUT}")


def _add_bpe(writer: Any, folder: Path, steps: dict[str, Any], count: int) -> None:
    from gguf import SpecialVocab, TokenType

    named = _SPLITS.get((_steps(steps["pre_tokenizer"]), bool(steps["model"].get("ignore_merges"))))
    if named is None:
        raise ExportError(
            f"{folder / FILE}: llama.cpp's name for this pre_tokenizer is not known here; known are "
            f"{', '.join(_SPLITS.values())}; {WAY_OUT}"
        )
    if (steps.get("normalizer") or {"type": "NFC"})["type"] != "NFC":
        raise ExportError(f"{folder / FILE} has a normalizer, which llama.cpp has not; {WAY_OUT}")
    tokens = {number: (text, TokenType.NORMAL) for text, number in steps["model"]["vocab"].items()}
    for added in steps.get("added_tokens") or []:
        kind = TokenType.CONTROL if added["special"] else TokenType.USER_DEFINED
        tokens[added["id"]] = added["content"], kind
    _check_count(folder / FILE, tokens, count)
    filled = [tokens.get(number, (f"[PAD{number}]", TokenType.UNUSED)) for number in range(count)]
    special = SpecialVocab(folder, load_merges=True, n_vocab=count)
    special.add_special_token.setdefault("bos", False)  # llama.cpp would take its own default
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(named)
    writer.add_token_list([text for text, _ in filled])
    writer.add_token_types([kind for _, kind in filled])
    special.add_to_gguf(writer, quiet=True)


def _steps(pre_tokenizer: dict[str, Any]) -> tuple[str | None, ...]:
    """The steps of a pre_tokenizer by short names, or the pattern of one that splits; None for any other."""
    parts = pre_tokenizer["pretokenizers"] if pre_tokenizer["type"] == "Sequence" else [pre_tokenizer]
    return tuple(_step(part) for part in parts)


def _step(part: dict[str, Any]) -> str | None:
    match part:
        case {"type": "ByteLevel", "add_prefix_space": False}:
            return "bytes and words" if part.get("use_regex", True) else "bytes"
        case {"type": "Digits", "individual_digits": True}:
            return "digits"
        case {"type": "Split", "pattern": {"Regex": str(pattern)}, "behavior": "Isolated", "invert": False}:
            return pattern
    return None


def _add_pieces(writer: Any, folder: Path, count: int) -> None:
    from gguf import SpecialVocab, TokenType
    from gguf.vocab import SentencePieceProcessor, SentencePieceVocab

    if SentencePieceProcessor is None:
        raise MissingDependencyError.missing("gguf", "sentencepiece")
    known = SentencePieceVocab(folder)
    tokens: dict[int, tuple[Any, float, Any]] = dict(enumerate(known.all_tokens()))
    settings = read_json(folder / SETTINGS) if (folder / SETTINGS).is_file() else {}
    for number, added in settings.get("added_tokens_decoder", {}).items():
        kind = TokenType.CONTROL if added["special"] else TokenType.USER_DEFINED
        tokens[int(number)] = added["content"].encode(), -1000.0, kind
    _check_count(folder / PIECES, tokens, count)
    filled = [tokens.get(number, (f"[PAD{number}]".encode(), -1e4, TokenType.UNUSED)) for number in range(count)]
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_add_space_prefix(known.sentencepiece_tokenizer.encode("a", out_type=str)[0].startswith("\u2581"))
    writer.add_token_list([text for text, _, _ in filled])
    writer.add_token_scores([score for _, score, _ in filled])
    writer.add_token_types([kind for _, _, kind in filled])
    SpecialVocab(folder, n_vocab=count).add_to_gguf(writer, quiet=True)


def _check_count(path: Path, tokens: dict[int, Any], count: int) -> None:
    if not tokens or min(tokens) < 0 or max(tokens) >= count:
        raise ConfigError(f"{path} has tokens up to {max(tokens, default=-1)}, the model has {count}; is it another's?")
