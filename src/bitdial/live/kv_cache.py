"""Keys and values of past tokens in 8 bits, for decoders of transformers.

live.generate(**inputs, past_key_values=quantized_cache(live))

Each token of each head has a scale of its own, its largest magnitude over 127, as dynamic activations have it
(`bitdial.functional.tokens`). A row of the cache is one token's codes and the four bytes of its float32 scale, so that
whatever transformers does to rows (crop, reorder, repeat, move) is done to both. Attention reads dequantised values,
also of the token that has just come: so the numbers are the same however a text is cut into calls.
"""

from typing import Any

import torch
from torch import Tensor, nn

from bitdial import functional as bf
from bitdial.errors import ConfigError, MissingDependencyError

BITS = 8
SCALE_BYTES = 4


def quantized_cache(model: nn.Module) -> Any:
    """An empty cache for `model`, a decoder of transformers, live or float: pass it as `past_key_values`."""
    try:
        from transformers.cache_utils import Cache, DynamicLayer
    except ImportError as problem:
        raise MissingDependencyError.missing("hf", "transformers") from problem
    check_full_attention(
        model,
        "a quantised cache is for attention to all past tokens",
        "leave past_key_values out, so that the model makes its own cache",
    )

    class QuantizedLayer(DynamicLayer):  # type: ignore[misc]  # it has no types
        """The keys and values of one layer as rows of int8."""

        keeps_each_token = True  # as it came: speculative decoding can take tokens back

        def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
            self.dtype, self.device = key_states.dtype, key_states.device
            self.keys: Tensor = torch.empty(0, dtype=torch.int8, device=self.device)
            self.values: Tensor = self.keys.clone()
            self.is_initialized = True

        def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
            if not self.is_initialized:
                self.lazy_initialization(key_states, value_states)
            self.keys = torch.cat([self.keys, to_rows(key_states)], dim=-2)
            self.values = torch.cat([self.values, to_rows(value_states)], dim=-2)
            return from_rows(self.keys, self.dtype), from_rows(self.values, self.dtype)

        def reset(self) -> None:
            """Forget all tokens; in older versions of transformers, such as 5.17, they only become zero."""
            self.keys = self.values = torch.empty(0, dtype=torch.int8)
            self.is_initialized = False

    return Cache(layer_class_to_replicate=QuantizedLayer)


def to_rows(states: Tensor) -> Tensor:
    """Keys or values (batch, heads, tokens, size) as rows (batch, heads, tokens, size + 4) of int8."""
    states = states.float()
    scale = bf.token_scale(states, bf.token_factor(states.new_ones(1), BITS))
    codes = bf.activation_codes(states, scale, None, bf.code_range(BITS)).to(torch.int8)
    return torch.cat([codes, scale.contiguous().view(torch.int8)], dim=-1)


def from_rows(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """The values that `rows` stand for, in `dtype`."""
    codes, scale = rows.split([rows.shape[-1] - SCALE_BYTES, SCALE_BYTES], dim=-1)
    return (codes.float() * scale.contiguous().view(torch.float32)).to(dtype)


def check_full_attention(model: nn.Module, why: str, way_out: str) -> None:
    """Refuse a model that keeps something else than all past tokens; the error says `why`, and the `way_out`."""
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "get_text_config"):
        raise ConfigError(f"the model is a {type(model).__name__} without a config; give a decoder of transformers")
    config = config.get_text_config(decoder=True)
    window = "sliding_attention" if getattr(config, "sliding_window", None) else "full_attention"
    kinds = getattr(config, "layer_types", None) or [window]
    if odd := [kind for kind in kinds if kind != "full_attention"]:
        raise ConfigError(f"a layer of the model has {odd[0]!r}, and {why}; {way_out}")
