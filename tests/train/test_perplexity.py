"""Perplexity against its definition, and how a text is cut into rows."""

import lzma
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from bitdial import QuantConfig, evaluate, perplexity, prepare, token_rows
from bitdial.errors import ConfigError, QuantizationError
from bitdial.train.perplexity import read_text


class Bigrams(nn.Module):
    """A language model that looks at the last token alone; its logits are for that which comes next."""

    def __init__(self, vocabulary: int = 6) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.embedding = nn.Embedding(vocabulary, 8)
        self.head = nn.Linear(8, vocabulary)
        for part in self.parameters():
            part.data = torch.randn(part.shape, generator=generator)

    def forward(self, input_ids: Tensor, use_cache: bool = True) -> SimpleNamespace:
        return SimpleNamespace(logits=self.head(self.embedding(input_ids)))


ROWS = torch.randint(0, 6, (5, 7), generator=torch.Generator().manual_seed(1))


def letters(text: str) -> dict[str, list[int]]:
    return {"input_ids": [ord(letter) for letter in text]}


def test_it_is_the_geometric_mean_of_one_over_the_chances() -> None:
    model = Bigrams().train()
    with torch.no_grad():
        chances = model(ROWS).logits.double().softmax(dim=-1)
    product, count = 1.0, 0
    for row, chance in zip(ROWS.tolist(), chances.tolist(), strict=True):
        for place in range(1, len(row)):
            product *= chance[place - 1][row[place]]
            count += 1
    assert perplexity(model, ROWS) == pytest.approx(product ** (-1 / count), rel=1e-5)
    assert perplexity(model, ROWS, batch=2) == pytest.approx(perplexity(model, list(ROWS.split(3))), rel=1e-6)
    assert model.training


def test_it_is_a_measure_at_each_width() -> None:
    quant = QuantConfig(bit_choices=(8, 2), activations="float", keep_first_last=False)
    model = prepare(Bigrams(), quant, {"input_ids": ROWS})
    found = evaluate(model, ROWS.split(2), (8, 2), measure=perplexity)
    assert found[8] == pytest.approx(perplexity(Bigrams(), ROWS), rel=0.05)
    assert found[2] != pytest.approx(found[8], rel=1e-3)


def test_what_it_refuses() -> None:
    model = Bigrams()
    with pytest.raises(ConfigError, match=r"not \(35,\)"):
        perplexity(model, ROWS.flatten())
    with pytest.raises(ConfigError, match="no rows"):
        perplexity(model, [])
    with pytest.raises(ConfigError, match="Plain returns no logits"):
        perplexity(Plain(6, 6), ROWS)
    model.head.bias.data[0] = math.nan
    with pytest.raises(QuantizationError, match="NaN"):
        perplexity(model, ROWS)


class Plain(nn.Embedding):
    """A model that gives a tensor, not an output with logits."""

    def forward(self, input_ids: Tensor, use_cache: bool = True) -> Tensor:
        return super().forward(input_ids)


def test_one_that_is_far_off_is_finite() -> None:
    model = Bigrams()
    model.head.bias.data = torch.tensor([1e9, 0, 0, 0, 0, 0])
    assert 1e300 < perplexity(model, torch.ones(1, 4, dtype=torch.int64)) < math.inf


def test_rows_of_a_text() -> None:
    text = "".join(chr(97 + i % 26) for i in range(1000))
    whole = token_rows(text, letters, length=30)
    assert whole.shape == (33, 30)
    assert "".join(map(chr, whole.flatten().tolist())) == text[:990]
    last = token_rows(text, letters, length=5, rows=2)
    assert "".join(map(chr, last.flatten().tolist())) == text[-10:]
    with pytest.raises(ConfigError, match="1000 tokens, less than 1 x 2000"):
        token_rows(text, letters, length=2000)
    with pytest.raises(ConfigError, match="1000 tokens, less than 101 x 10"):
        token_rows(text, letters, length=10, rows=101)
    with pytest.raises(ConfigError, match="length=1"):
        token_rows(text, letters, length=1)


def test_texts_plain_and_packed(tmp_path: Path) -> None:
    text = "größer\nals nichts\r\n"
    (tmp_path / "a.txt").write_bytes(text.encode())
    (tmp_path / "a.txt.xz").write_bytes(lzma.compress(text.encode()))
    assert read_text(tmp_path / "a.txt") == read_text(tmp_path / "a.txt.xz") == text
    (tmp_path / "b.xz").write_bytes(b"no such thing")
    (tmp_path / "c.txt").write_bytes(b"\xff\xfe\x00")
    for name in ("b.xz", "c.txt"):
        with pytest.raises(ConfigError, match="UTF-8"):
            read_text(tmp_path / name)
    with pytest.raises(ConfigError, match="no text file"):
        read_text(tmp_path / "none.txt")
