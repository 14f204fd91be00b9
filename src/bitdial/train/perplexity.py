"""Perplexity of a language model: how many tokens it hesitates between, on rows cut from a text.

rows = token_rows(read_text("held-out.txt"), tokenizer, length=512, rows=24)
evaluate(live, rows.split(4), (8, 4, 2), measure=perplexity)
"""

import lzma
import math
import os
from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bitdial.errors import ConfigError, QuantizationError
from bitdial.prepare.model_call import evaluating

CHARACTERS_PER_TOKEN = 8  # more than any text needs on average, so that its end holds the rows that are asked for
MOST = 700.0  # exp of more is beyond a float


def read_text(path: str | os.PathLike[str]) -> str:
    """The text of a UTF-8 file, plain or packed (`.xz`)."""
    path = Path(path)
    if not path.is_file():
        raise ConfigError(f"there is no text file {path}")
    try:
        content = lzma.decompress(path.read_bytes()) if path.suffix == ".xz" else path.read_bytes()
        return content.decode("utf-8")
    except (lzma.LZMAError, UnicodeDecodeError) as problem:
        raise ConfigError(f"{path} is not a text in UTF-8, plain or .xz: {problem}") from problem


def token_rows(text: str, tokenizer: Any, *, length: int = 512, rows: int | None = None) -> Tensor:
    """The tokens of `text` as whole rows (rows, length), int64.

    All rows are cut from the beginning, and what is left at the end is dropped. A number of `rows` takes so many of
    the last tokens. `tokenizer` is a transformers tokenizer, or whatever returns `input_ids` of a text.
    """
    if length < 2 or (rows is not None and rows < 1):
        raise ConfigError(
            f"length={length} and rows={rows} must be at least 2 and 1: a token is judged by those before"
        )
    wanted = None if rows is None else rows * length
    tail = text if wanted is None else text[-CHARACTERS_PER_TOKEN * wanted :]
    tokens = torch.tensor(tokenizer(tail)["input_ids"], dtype=torch.int64)
    whole = len(tokens) // length if rows is None else rows
    if whole == 0 or len(tokens) < whole * length:
        raise ConfigError(
            f"the text has {len(tokens)} tokens, less than {max(whole, 1)} x {length}; give a longer text, or fewer "
            "or shorter rows"
        )
    cut = tokens[: whole * length] if wanted is None else tokens[-wanted:]
    return cut.reshape(whole, length)


def perplexity(model: nn.Module, rows: Tensor | Iterable[Tensor], *, batch: int = 4) -> float:
    """exp of the mean negative log-likelihood of each row's tokens but the first, at the model's present setting.

    `rows` (rows, length) are tokens as `token_rows` cuts them, or batches of such; they go through the model `batch` at
    a time, on its device. The model takes `input_ids` and returns logits, as transformers' models do.
    """
    total, counted = 0.0, 0
    device = next(chain(model.parameters(), model.buffers())).device
    with evaluating(model):
        for some in [rows] if isinstance(rows, Tensor) else rows:
            if some.dim() != 2 or some.shape[1] < 2:
                raise ConfigError(f"rows of tokens have the shape (rows, length), 2 or longer, not {tuple(some.shape)}")
            for part in some.to(device).split(batch):
                logits = token_logits(model, part)[:, :-1]
                total += float(F.cross_entropy(logits.flatten(0, 1).float(), part[:, 1:].flatten(), reduction="sum"))
                counted += part[:, 1:].numel()
    if counted == 0:
        raise ConfigError("there are no rows of tokens to evaluate on")
    if not math.isfinite(total):
        raise QuantizationError("the model's logits hold NaN or infinity; check the model at this setting")
    return math.exp(min(total / counted, MOST))


def token_logits(model: nn.Module, tokens: Tensor) -> Tensor:
    """The logits (rows, length, vocabulary) of `tokens` (rows, length)."""
    returned = model(input_ids=tokens, use_cache=False)
    logits = getattr(returned, "logits", None)
    if not isinstance(logits, Tensor) or logits.shape[:2] != tokens.shape:
        raise ConfigError(
            f"{type(model).__name__} returns no logits for each token; a causal language model of transformers does"
        )
    return logits
