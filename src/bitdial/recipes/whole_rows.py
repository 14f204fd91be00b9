"""Attention for rows of tokens that all have one length and are one text each.

transformers looks at every pass whether a row holds several texts, for which the host waits for the GPU; in a CUDA
graph, which cannot wait, it takes them for several, and attention becomes slow. Where there is nothing to look for, an
attention by another name has the same numbers without it.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from bitdial.errors import ConfigError
from bitdial.live.kv_cache import check_full_attention
from bitdial.live.speculation.identical import ATTENTION, runs_sdpa
from bitdial.prepare.model_call import evaluating
from bitdial.train.perplexity import token_logits

WHOLE_ROWS = "bitdial_whole_rows"


@contextmanager
def whole_rows(*models: nn.Module, tokens: Tensor) -> Iterator[None]:
    """Let `models` of transformers take what they are given inside the block for whole rows, in place.

    A model whose logits for `tokens` (rows, length) would be others, or whose attention has another kind, stays as it
    is.
    """
    with ExitStack() as stack:
        for model in models:
            stack.enter_context(_one(model, tokens))
        yield


@contextmanager
def _one(model: Any, tokens: Tensor) -> Iterator[None]:
    if not _attends_to_all(model):
        yield
        return
    _offer()
    try:
        with evaluating(model):
            before = token_logits(model, tokens)
            model.set_attn_implementation(WHOLE_ROWS)
            if not torch.equal(token_logits(model, tokens), before):
                model.set_attn_implementation(ATTENTION)
        yield
    finally:
        if not runs_sdpa(model):
            model.set_attn_implementation(ATTENTION)


def _attends_to_all(model: nn.Module) -> bool:
    """Whether each token sees all before it, by PyTorch's attention."""
    try:
        check_full_attention(model, "", "")
    except ConfigError:
        return False
    return runs_sdpa(model)


def _offer() -> None:
    """Tell transformers of the attention; it has no masks, so none are made for it."""
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    AttentionInterface.register(WHOLE_ROWS, sdpa_attention_forward)
