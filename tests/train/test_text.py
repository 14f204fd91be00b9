"""Texts become token files: whole, in pieces, packed or plain, and what is no text is named."""

import lzma
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bitdial.errors import ConfigError
from bitdial.train import text as module
from bitdial.train.text import map_tokens, text_digest, tokenize_text, tokenizer_digest


class Letters:
    """A tokenizer with a token for each character, and one for the end."""

    eos_token_id: int | None = 0

    def __call__(self, texts: list[str], **settings: Any) -> dict[str, list[list[int]]]:
        assert settings["add_special_tokens"] is False
        return {"input_ids": [[ord(letter) for letter in text] for text in texts]}

    def get_vocab(self) -> dict[str, int]:
        return {"a": 97}


def tokens_of(text: str) -> list[int]:
    return [ord(letter) for letter in text]


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PIECE", 10)
    monkeypatch.setattr(module, "TOGETHER", 2)


LINES = "a short line\nanother one, longer than a piece\n\nthird\r\n" + "word " * 12 + "end"


@pytest.mark.parametrize("text", [LINES, "", "x", "no end of a line and no space".replace(" ", ""), "ä€𝄞\n" * 9])
def test_pieces_are_the_whole_text(text: str, small_pieces: None, tmp_path: Path) -> None:
    plain, packed = tmp_path / "plain.txt", tmp_path / "packed.txt.xz"
    plain.write_bytes(text.encode())
    packed.write_bytes(lzma.compress(text.encode()))
    for file in (plain, packed):
        found = tokenize_text(file, Letters(), tmp_path / "tokens")
        assert found.tolist() == tokens_of(text)
        assert found.dtype == np.int32
    pieces = list(module._pieces(plain))
    assert all(len(piece) <= 40 for piece in pieces)
    assert all(piece.endswith(("\n", " ")) for piece in pieces[:-1])


def test_between_files_stands_the_end_of_text(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("ab")
    (tmp_path / "b").write_text("c")
    files = [tmp_path / "a", tmp_path / "b"]
    assert tokenize_text(files, Letters(), tmp_path / "t").tolist() == [97, 98, 0, 99]
    endless = Letters()
    endless.eos_token_id = None
    assert tokenize_text(files, endless, tmp_path / "t").tolist() == [97, 98, 99]
    assert isinstance(map_tokens(tmp_path / "t"), np.memmap), "not read as a whole"


@pytest.mark.parametrize(
    ("name", "content"), [("latin.txt", b"caf\xe9\n"), ("torn.xz", lzma.compress(b"text" * 99)[:40]), ("bad.xz", b"no")]
)
def test_what_is_no_text_is_named_and_leaves_nothing(name: str, content: bytes, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=f"{name} is not a text in UTF-8"):
        tokenize_text(tmp_path / name, Letters(), tmp_path / "tokens")
    assert not (tmp_path / "tokens").exists()


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    for function in (lambda: tokenize_text(tmp_path / "x", Letters(), tmp_path / "t"), lambda: text_digest([tmp_path])):
        with pytest.raises(ConfigError, match="there is no text file"):
            function()


def test_digests_tell_texts_apart(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("ab")
    (tmp_path / "b").write_text("c")
    a, b = tmp_path / "a", tmp_path / "b"
    assert len({text_digest(files) for files in ([a], [b], [a, b], [b, a])}) == 4
    assert len(tokenizer_digest(Letters())) == 64
