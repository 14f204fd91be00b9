"""A check of several tokens whose numbers are those of passes of one token each, bit for bit.

Sums of floats depend on their order, and that on how many tokens go through a model at once. Exact and integer sums do
not. So on a model of these, each Linear layer takes all tokens at once, and everything else takes them one by one:
attention (a query on its own, with the keys up to it) and norms, which are small. A Linear layer with an unquantised
input has a fixed-point scale for each sample, so tokens come to it as samples.
"""

from typing import Any

import torch
from torch import Tensor, nn

from bitdial.dial.dial import get_bits, unwrap
from bitdial.live.engines.exact import ExactEngine, ExactLayer
from bitdial.live.engines.integer.engine import IntegerEngine
from bitdial.live.engines.integer.float_layers import FixedPointLayer
from bitdial.live.layers import LiveLayer
from bitdial.live.views import view_at_bits

ATTENTION = "sdpa"  # the one implementation of transformers that can be called token by token
TOKEN_BY_TOKEN = "bitdial_token_by_token"


def view_token_by_token(model: nn.Module) -> nn.Module | None:
    """A view of `model` that checks several tokens as passes of one would; None if its sums depend on their order."""
    if not has_exact_sums(model) or not runs_sdpa(model):
        return None
    view: Any = unwrap(view_at_bits(model, get_bits(model)))
    _offer_attention()
    view.set_attn_implementation(TOKEN_BY_TOKEN)
    for module in view.modules():
        if _multiplies(module):
            module.register_forward_pre_hook(_tokens_as_samples)
            module.register_forward_hook(_samples_as_tokens)
        elif next(module.children(), None) is None and not isinstance(module, nn.Embedding):
            module.register_forward_hook(_one_by_one)
    return view


def has_exact_sums(model: nn.Module) -> bool:
    """Whether all products with weights are exact or integer sums."""
    for module in unwrap(model).modules():
        if isinstance(module, LiveLayer):
            if not isinstance(module.engine, ExactEngine | IntegerEngine):
                return False
        elif not isinstance(module, ExactLayer | FixedPointLayer | nn.Embedding) and any(
            parameter.dim() > 1 for parameter in module.parameters(recurse=False)
        ):
            return False
    return True


def runs_sdpa(model: nn.Module) -> bool:
    """Whether attention is PyTorch's, which transformers takes by default."""
    config: Any = model.config
    return getattr(config.get_text_config(decoder=True), "_attn_implementation", None) == ATTENTION


def _multiplies(module: nn.Module) -> bool:
    exact = isinstance(module, LiveLayer | ExactLayer | FixedPointLayer)
    return exact and not module.kind.gathers  # type: ignore[union-attr]


def _tokens_as_samples(module: nn.Module, args: tuple[Any, ...]) -> tuple[Tensor] | None:
    """(1, tokens, features) to (tokens, 1, features)."""
    return (args[0].transpose(0, 1),) if args[0].dim() == 3 and args[0].shape[0] == 1 else None


def _samples_as_tokens(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor | None:
    return output.transpose(0, 1) if output.dim() == 3 else None


def _one_by_one(module: nn.Module, args: tuple[Any, ...], output: Any) -> Tensor | None:
    """The output (1, tokens, ...) of a module, token by token: sums over many rows may go in another order."""
    several = len(args) == 1 and isinstance(args[0], Tensor) and args[0].dim() > 2 and args[0].shape[1] > 1
    if not several or not isinstance(output, Tensor) or output.shape[:2] != args[0].shape[:2]:
        return None
    return torch.cat([module.forward(args[0][:, i : i + 1].contiguous()) for i in range(args[0].shape[1])], dim=1)


def _offer_attention() -> None:
    """Tell transformers of an attention that takes queries one by one."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask

    def token_by_token(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **settings: Any
    ) -> tuple[Tensor, None]:
        """Attention as for one new token, for each in turn, with the keys and values up to it."""
        count, length = query.shape[2], key.shape[2]
        if count == 1:
            return sdpa_attention_forward(module, query, key, value, attention_mask, **settings)
        found, bias = [], settings.pop("position_bias", None)
        for i in range(count):
            end = length - count + 1 + i
            alone = [query[:, :, i : i + 1].contiguous(), key[:, :, :end].contiguous(), value[:, :, :end].contiguous()]
            mask = None if attention_mask is None else attention_mask[:, :, i : i + 1, :end].contiguous()
            if mask is not None and mask.dtype == torch.bool and bool(mask.all()):
                mask = None  # a token that sees all of the past has none
            if bias is not None:
                settings["position_bias"] = bias[:, :, i : i + 1, :end].contiguous()
            found.append(sdpa_attention_forward(module, *alone, mask, **settings)[0])
        return torch.cat(found, dim=1), None

    AttentionInterface.register(TOKEN_BY_TOKEN, token_by_token)
    AttentionMaskInterface.register(TOKEN_BY_TOKEN, sdpa_mask)
