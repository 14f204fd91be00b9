"""Rows without padding: the same logits, without a look at the rows; models that need the look keep it."""

from typing import Any

import pytest
import torch

from bitdial.recipes.whole_rows import WHOLE_ROWS, whole_rows
from bitdial.train.perplexity import token_logits

transformers = pytest.importorskip("transformers", minversion="5")
SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1,
}  # fmt: skip


def tiny(kind: str, **settings: Any) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = getattr(transformers, f"{kind}Config")(**SIZES, **settings)
        return getattr(transformers, f"{kind}ForCausalLM")(config).eval()


TOKENS = torch.randint(0, 64, (2, 9), generator=torch.Generator().manual_seed(1))


def test_nobody_looks_at_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a look waits for the GPU, and ends the recording of a CUDA graph or makes it another one."""
    from transformers import masking_utils

    model = tiny("Llama")
    with torch.no_grad():
        expected = token_logits(model, TOKENS)

    def look(*args: Any, **settings: Any) -> None:
        raise AssertionError("it looks")

    with whole_rows(model, tokens=TOKENS[:, :4]):
        assert model.config._attn_implementation == WHOLE_ROWS
        monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", look)
        with torch.no_grad():
            assert torch.equal(token_logits(model.train(), TOKENS), expected)
    assert model.config._attn_implementation == "sdpa"
    with pytest.raises(AssertionError, match="it looks"):
        model(TOKENS, use_cache=False)


def test_after_an_error_the_attention_is_what_it_was() -> None:
    models = tiny("Llama"), tiny("Qwen2")

    def fail() -> None:
        with whole_rows(*models, tokens=TOKENS):
            assert {model.config._attn_implementation for model in models} == {WHOLE_ROWS}
            raise RuntimeError("within")

    with pytest.raises(RuntimeError, match="within"):
        fail()
    assert {model.config._attn_implementation for model in models} == {"sdpa"}


@pytest.mark.parametrize(
    ("kind", "settings"), [("Mistral", {"sliding_window": 4}), ("Llama", {"attn_implementation": "eager"})], ids=str
)
def test_other_attention_stays(kind: str, settings: dict[str, Any]) -> None:
    model = tiny(kind, **settings)
    before = model.config._attn_implementation
    with whole_rows(model, torch.nn.Linear(2, 2), tokens=TOKENS):
        assert model.config._attn_implementation == before


def test_a_model_that_comes_to_other_logits_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that adds something to its masks, say."""
    from bitdial.recipes import whole_rows as module

    model = tiny("Llama")
    found = iter([torch.zeros(1), torch.ones(1)])
    monkeypatch.setattr(module, "token_logits", lambda model, tokens: next(found))
    with whole_rows(model, tokens=TOKENS):
        assert model.config._attn_implementation == "sdpa"
