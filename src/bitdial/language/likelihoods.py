"""Log-likelihoods of continuations of texts, as lm-eval takes them.

A continuation is judged token by token after its context. The two are tokenised together, since a tokenizer joins
letters across the seam; the context's own tokens then say where the continuation begins.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bitdial.errors import ConfigError, QuantizationError
from bitdial.planning.progress import tracked
from bitdial.prepare.model_call import evaluating
from bitdial.train.perplexity import token_logits

LENGTHS = ("max_position_embeddings", "n_positions", "n_ctx")  # what configs call the longest input
USUAL_LENGTH = 2048


@dataclass(frozen=True)
class Encoded:
    """The tokens of a context with its continuation; the last `judged` of them are the continuation's."""

    tokens: tuple[int, ...]
    judged: int


def encode(tokenizer: Any, pairs: Sequence[tuple[str, str]]) -> list[Encoded]:
    """The tokens of each (context, continuation). Spaces at the end of a context belong to the continuation."""
    texts: dict[str, list[int]] = {}
    cut = [(context.rstrip(), context + continuation) for context, continuation in pairs]
    for text in chain.from_iterable(cut):
        texts.setdefault(text, [])
    for text, tokens in zip(texts, tokenizer(list(texts))["input_ids"], strict=True):
        texts[text] = tokens
    found = []
    for context, whole in cut:
        before, after = texts[context], texts[whole][len(texts[context]) :]
        if not before or not after:
            raise ConfigError(f"the tokenizer leaves no token for {whole[len(context) :]!r:.60} after {context!r:.60}")
        found.append(Encoded((*before, *after), len(after)))
    return found


def log_likelihoods(
    model: nn.Module, encoded: Sequence[Encoded], *, batch_tokens: int = 2048, label: str | None = None
) -> list[float]:
    """The log-likelihood of each continuation, in order, at the model's present setting.

    Inputs of similar length go through the model together, at most `batch_tokens` tokens with their padding. Several
    continuations that need the same input, such as "yes" and "no", share it. A `label` shows a bar of that name.
    """
    check_tokens(model, max((max(one.tokens) for one in encoded), default=0))
    longest = longest_input(model)
    device = next(chain(model.parameters(), model.buffers())).device
    users: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for number, one in enumerate(encoded):
        if one.judged > longest:
            raise ConfigError(f"a continuation has {one.judged} tokens, the model takes {longest}")
        users[one.tokens[-longest - 1 : -1]].append(number)  # cut from the left; the last token is only judged
    found = [0.0] * len(encoded)
    with evaluating(model):
        batches = _batches(sorted(users, key=len, reverse=True), batch_tokens)
        for inputs in tracked(batches, label or "", show=label is not None):
            logits = token_logits(model, _padded(inputs).to(device))
            for row, tokens in enumerate(inputs):
                for number in users[tokens]:
                    found[number] = _summed(logits[row, : len(tokens)], encoded[number])
    if not all(map(math.isfinite, found)):
        raise QuantizationError("the model's logits hold NaN or infinity; check the model at this setting")
    return found


def check_tokens(model: nn.Module, largest: int) -> None:
    """Raise ConfigError if the vocabulary of `model`, by its config, has no token of that number."""
    size = getattr(getattr(model, "config", None), "vocab_size", None)
    if isinstance(size, int) and largest >= size:
        raise ConfigError(f"token {largest} is not one of the model's {size}: the tokenizer is of another model")


def longest_input(model: nn.Module) -> int:
    """The most tokens that a model takes at once, by its config."""
    return _known_length(model) or USUAL_LENGTH


def check_length(model: nn.Module, length: int) -> None:
    """Raise ConfigError if rows of `length` tokens are more than the model takes, by its config."""
    longest = _known_length(model)
    if longest is not None and length > longest:
        raise ConfigError(f"rows of {length} tokens; the model takes {longest} at once: make them shorter")


def _known_length(model: nn.Module) -> int | None:
    config = getattr(model, "config", None)
    found = [getattr(config, name, None) for name in LENGTHS]
    return next((length for length in found if isinstance(length, int) and length > 0), None)


def _summed(logits: Tensor, one: Encoded) -> float:
    """The log-likelihood of the judged tokens, given the logits (length, vocabulary) of the input before each."""
    targets = torch.tensor(one.tokens[-one.judged :], device=logits.device)
    return -float(F.cross_entropy(logits[-one.judged :].float(), targets, reduction="sum"))


def _batches(inputs: list[tuple[int, ...]], batch_tokens: int) -> list[list[tuple[int, ...]]]:
    """`inputs`, longest first, in batches of at most `batch_tokens` tokens with padding, and one input at least."""
    batches: list[list[tuple[int, ...]]] = []
    for tokens in inputs:
        if not batches or (len(batches[-1]) + 1) * len(batches[-1][0]) > batch_tokens:
            batches.append([])
        batches[-1].append(tokens)
    return batches


def _padded(inputs: list[tuple[int, ...]]) -> Tensor:
    """Inputs (rows, longest), int64, with zeros on the right, which no token before them sees."""
    rows = torch.zeros(len(inputs), len(inputs[0]), dtype=torch.int64)
    for row, tokens in zip(rows, inputs, strict=True):
        row[: len(tokens)] = torch.tensor(tokens)
    return rows
