"""Log-likelihoods of continuations: against one text at a time, and where the seam of two texts lies."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bitdial.errors import ConfigError, QuantizationError
from bitdial.language.likelihoods import Encoded, check_length, encode, log_likelihoods, longest_input

VOCABULARY = 7


class Recurrent(nn.Module):
    """A causal language model: its logits depend on all tokens so far. It notes the shapes that it sees."""

    def __init__(self, longest: int = 64) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.table = nn.Parameter(torch.randn(VOCABULARY, VOCABULARY, generator=generator))
        self.config = SimpleNamespace(max_position_embeddings=longest, vocab_size=VOCABULARY)
        self.seen: list[tuple[int, ...]] = []

    def forward(self, input_ids: Tensor, use_cache: bool = True) -> SimpleNamespace:
        self.seen.append(tuple(input_ids.shape))
        weights = 0.5 ** torch.arange(input_ids.shape[1])
        mixed = torch.stack([(self.table[input_ids[:, : n + 1]] * weights[: n + 1].flip(0)[None, :, None]).sum(1)
                             for n in range(input_ids.shape[1])], dim=1)  # fmt: skip
        return SimpleNamespace(logits=mixed)


def one_by_one(model: nn.Module, one: Encoded) -> float:
    """From the definition: the tokens one after the other."""
    total = 0.0
    for place in range(len(one.tokens) - one.judged, len(one.tokens)):
        with torch.no_grad():
            chances = model(torch.tensor([one.tokens[:place]])).logits[0, -1].double().softmax(dim=0)
        total += float(chances[one.tokens[place]].log())
    return total


def some(count: int = 23) -> list[Encoded]:
    generator = torch.Generator().manual_seed(1)
    found = []
    for number in range(count):
        length = 3 + int(torch.randint(0, 9, (), generator=generator))
        tokens = tuple(torch.randint(0, VOCABULARY, (length,), generator=generator).tolist())
        found.append(Encoded(tokens, 1 + number % (length - 1)))
    return found


@pytest.mark.parametrize("batch_tokens", [1, 30, 10_000])
def test_batches_give_what_single_texts_give(batch_tokens: int) -> None:
    model, encoded = Recurrent().train(), some()
    expected = [one_by_one(model, one) for one in encoded]
    model.seen.clear()
    found = log_likelihoods(model, encoded, batch_tokens=batch_tokens)
    assert found == pytest.approx(expected, rel=1e-5)
    assert all(rows * length <= batch_tokens or rows == 1 for rows, length in model.seen)
    assert len(model.seen) == (1 if batch_tokens == 10_000 else len(model.seen))
    assert model.training


def test_one_input_serves_several_continuations() -> None:
    model = Recurrent()
    encoded = [Encoded((1, 2, 3, 4), 1), Encoded((1, 2, 3, 5), 1), Encoded((1, 2, 3, 5), 2)]
    found = log_likelihoods(model, encoded)
    assert model.seen == [(1, 3)]
    assert found == pytest.approx([one_by_one(model, one) for one in encoded], rel=1e-5)


def test_a_long_context_is_cut_from_the_left() -> None:
    model = Recurrent(longest=4)
    tokens = (1, 2, 3, 4, 5, 6, 0, 1)
    (found,) = log_likelihoods(model, [Encoded(tokens, 2)])
    assert model.seen == [(1, 4)]
    assert found == pytest.approx(one_by_one(model, Encoded(tokens[-5:], 2)), rel=1e-5)
    with pytest.raises(ConfigError, match="5 tokens, the model takes 4"):
        log_likelihoods(model, [Encoded(tokens, 5)])


def test_what_is_refused() -> None:
    model = Recurrent()
    with pytest.raises(ConfigError, match="token 7 is not one of the model's 7"):
        log_likelihoods(model, [Encoded((1, 7), 1)])
    model.table.data[2] = float("nan")
    with pytest.raises(QuantizationError, match="NaN"):
        log_likelihoods(model, [Encoded((2, 1), 1)])


def test_rows_may_be_as_long_as_the_config_says() -> None:
    check_length(Recurrent(longest=9), 9)
    check_length(nn.Linear(1, 1), 10**6)
    with pytest.raises(ConfigError, match="rows of 10 tokens; the model takes 9 at once"):
        check_length(Recurrent(longest=9), 10)


def test_the_longest_input_is_in_the_config() -> None:
    assert longest_input(Recurrent(longest=9)) == 9
    assert longest_input(nn.Linear(1, 1)) == 2048
    model = nn.Linear(1, 1)
    model.config = SimpleNamespace(n_positions=77)  # type: ignore[assignment]
    assert longest_input(model) == 77


def pairs_of_letters(texts: list[str]) -> dict[str, Any]:
    """A tokenizer that takes two letters at a time, so that it joins them across a seam; a space stands with both."""
    return {"input_ids": [[hash_of(text[i : i + 2]) for i in range(0, len(text), 2)] for text in texts]}


def hash_of(text: str) -> int:
    return sum(ord(letter) * 256**place for place, letter in enumerate(text))


def test_the_seam_lies_where_the_tokens_of_the_context_end() -> None:
    (one,) = encode(pairs_of_letters, [("abc", " def")])
    # "abc" is ab, c; "abc def" is ab, "c ", de, f: after the context's two tokens come the last two of the whole.
    assert one == Encoded((hash_of("ab"), hash_of("c"), hash_of("de"), hash_of("f")), 2)
    (one,) = encode(pairs_of_letters, [("ab  ", "cd")])  # spaces at the end of the context are judged
    assert one == Encoded((hash_of("ab"), hash_of("  "), hash_of("cd")), 2)


def test_a_continuation_without_a_token_is_refused() -> None:
    with pytest.raises(ConfigError, match="no token for 'd' after 'abc'"):
        encode(pairs_of_letters, [("abc", "d")])
    with pytest.raises(ConfigError, match="no token"):
        encode(pairs_of_letters, [("  ", "ab")])
