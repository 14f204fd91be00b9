"""Several tokens in one pass with the bits of passes of one token, and where that is not offered."""

from typing import Any

import pytest
import torch
from torch import nn

from bitdial import code_exact, load
from bitdial.live.speculation.identical import has_exact_sums, view_token_by_token

from .conftest import IDS, Decoders

transformers = pytest.importorskip("transformers", minversion="5")
pytestmark = pytest.mark.usefixtures("one_thread")


@torch.no_grad()
def logits(prompt: nn.Module, model: nn.Module, *parts: Any) -> torch.Tensor:
    """What `model` says of the parts, one after the other, behind a prompt that `prompt` has read."""
    cache = transformers.DynamicCache()
    prompt(input_ids=IDS[:1, :6], past_key_values=cache, use_cache=True)
    return torch.cat([model(input_ids=p, past_key_values=cache, use_cache=True).logits for p in parts], dim=1)


def test_a_pass_of_several_tokens_has_the_bits_of_passes_of_one(decoders: Decoders) -> None:
    """While the model itself has others: this is what the view is for."""
    text, differs = IDS[1:2], 0
    for family, activations in (("Gemma", "dynamic"), ("Qwen2", "dynamic")):
        model, path = decoders(family, activations=activations)
        live = code_exact(load(path, model))
        view: Any = view_token_by_token(live)
        wanted = logits(live, live, *text.split(1, dim=1))
        for cuts in ((10,), (3, 7), (1, 4, 5)):
            assert torch.equal(logits(live, view, *text.split(cuts, dim=1)), wanted), (family, cuts)
        differs += not torch.equal(logits(live, live, text), wanted)
        assert live.config._attn_implementation == "sdpa", "the model's own attention stays"  # type: ignore[union-attr]
        assert not any(module._forward_hooks for module in live.modules())
    assert differs > 0


def test_where_sums_depend_on_their_order_there_is_none(decoders: Decoders) -> None:
    model, path = decoders()
    live: Any = load(path, model)
    assert not has_exact_sums(live)
    assert view_token_by_token(live) is None
    exact: Any = code_exact(live)
    assert has_exact_sums(exact)
    exact.set_attn_implementation("eager")
    assert view_token_by_token(exact) is None
    exact.set_attn_implementation("sdpa")
    assert view_token_by_token(exact) is not None
    exact.model.layers[0].mlp.gate = nn.Bilinear(2, 2, 2)  # a product of its own, in float
    assert not has_exact_sums(exact)
