"""Text files to a file of token numbers: read, tokenised and written piece by piece, so that no text is too long."""

import hashlib
import logging
import lzma
import os
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import IO, Any

import numpy as np

from bitdial.errors import ConfigError
from bitdial.files.atomic import replacing
from bitdial.train.tokens import Tokens

log = logging.getLogger(__name__)

PIECE = 1 << 16  # characters that are tokenised at a time
TOGETHER = 16  # pieces that a tokenizer is given at once: it may take them in parallel
STORED = np.int32


def tokenize_text(
    text: str | os.PathLike[str] | Sequence[str | os.PathLike[str]], tokenizer: Any, path: str | os.PathLike[str]
) -> Tokens:
    """The tokens of one or several text files, written to a file at `path` and mapped from it.

    A text is UTF-8, plain or packed (`.xz`). `tokenizer` is one of transformers'. Texts are cut at the ends of lines
    into pieces of about 64,000 characters, each tokenised by itself and without special tokens. Between two files
    stands the tokenizer's end of text, if it has one.
    """
    files = [Path(text)] if isinstance(text, str | os.PathLike) else [Path(one) for one in text]
    end: int | None = getattr(tokenizer, "eos_token_id", None)
    count = 0
    with replacing(Path(path), error=ConfigError) as temporary, temporary.open("wb") as out:
        for number, file in enumerate(files):
            if number and end is not None:
                out.write(np.array([end], dtype=STORED).tobytes())
            pieces = _pieces(file)
            while some := list(islice(pieces, TOGETHER)):
                found = tokenizer(some, add_special_tokens=False, return_attention_mask=False, verbose=False)
                for ids in found["input_ids"]:
                    out.write(np.array(ids, dtype=STORED).tobytes())
                    count += len(ids)
                log.info("%s: %s tokens", file.name, f"{count:,}")
    return map_tokens(path)


def map_tokens(path: str | os.PathLike[str]) -> Tokens:
    """The token numbers in a file that `tokenize_text` wrote, mapped: what is not looked at is not read."""
    path = Path(path)
    if path.stat().st_size < STORED().nbytes:  # nothing cannot be mapped
        return np.zeros(0, dtype=STORED)
    return np.memmap(path, dtype=STORED, mode="r")


def text_digest(files: Iterable[Path]) -> str:
    """What tells these files from others: a digest of what is in them."""
    total = hashlib.sha256()
    for file in files:
        _check_file(file)
        with file.open("rb") as opened:
            total.update(hashlib.file_digest(opened, "sha256").digest())
    return total.hexdigest()


def tokenizer_digest(tokenizer: Any) -> str:
    """What tells this tokenizer from others: all its rules, or where it does not give them, its vocabulary."""
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    rules = backend.to_str() if backend is not None else repr(sorted(tokenizer.get_vocab().items()))
    return hashlib.sha256(rules.encode()).hexdigest()


def _check_file(file: Path) -> None:
    if not file.is_file():
        raise ConfigError(f"there is no text file {file}")


def _pieces(file: Path) -> Iterator[str]:
    """The text of `file` in pieces that end where lines do, or words where a line is longer than a piece."""
    _check_file(file)
    left = ""
    try:
        with _opened(file) as opened:
            while more := opened.read(PIECE):
                left += more
                cut = max(left.rfind("\n"), left.rfind(" ") if len(left) > 2 * PIECE else -1) + 1
                if cut:
                    yield left[:cut]
                    left = left[cut:]
    except (lzma.LZMAError, EOFError, UnicodeDecodeError) as problem:
        raise ConfigError(f"{file} is not a text in UTF-8, plain or .xz: {problem}") from problem
    if left:
        yield left


def _opened(file: Path) -> IO[str]:
    if file.suffix == ".xz":
        return lzma.open(file, "rt", encoding="utf-8", newline="")
    return file.open(encoding="utf-8", newline="")
