"""What speculative decoding is for; the rest is refused, with the way out."""

from typing import Any

from torch import Tensor, nn

from bitdial.errors import ConfigError
from bitdial.live.kv_cache import check_full_attention
from bitdial.live.layers import LiveLayer

# What `generate` of transformers hands to a decoding method, besides what we name.
KNOWN = {"attention_mask", "position_ids", "past_key_values", "use_cache", "logits_to_keep", "cache_position"}


def check_model(model: nn.Module) -> None:
    """Refuse what is no live decoder, or keeps something else than the keys and values of all past tokens."""
    config: Any = getattr(model, "config", None)
    kind = type(model).__name__
    if not hasattr(model, "generate") or not hasattr(config, "get_text_config"):
        raise ConfigError(f"a {kind} has no `generate` of transformers; give a live decoder of transformers")
    if not any(isinstance(layer, LiveLayer) for layer in model.modules()):
        raise ConfigError("the model has no live layer to draft with: load_pretrained(folder), or load(path, model)")
    if getattr(config, "is_encoder_decoder", False):
        raise ConfigError(
            f"a {kind} has an encoder, and speculation is for decoders alone; use the model's own `generate`"
        )
    if getattr(model, "_is_stateful", False):
        raise ConfigError(
            f"a {kind} has a state that cannot go back to an earlier token; use the model's own `generate`"
        )
    check_full_attention(model, "drafts are taken back from a cache", "use the model's own `generate`")
    for rotary in _rotary_kinds(config.get_text_config(decoder=True)):
        if "dynamic" in rotary or rotary == "longrope":
            raise ConfigError(
                f"the rotary embedding is {rotary!r}, which depends on the longest text so far, drafts included; use "
                "the model's own `generate`"
            )


def _rotary_kinds(config: Any) -> list[str]:
    """The kinds of rotary embedding that a config names."""
    settings = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    each = [settings, *(value for value in settings.values() if isinstance(value, dict))]
    return [str(kind) for part in each if (kind := part.get("rope_type", part.get("type"))) is not None]


def check_settings(settings: dict[str, Any]) -> None:
    """Refuse arguments of `generate` that name another way of decoding, or that transformers would drop for ours."""
    for name in ("assistant_model", "custom_generate", "prompt_lookup_num_tokens"):
        if settings.get(name) is not None:
            raise ConfigError(f"{name} is another way to decode; leave it out, or use the model's own `generate`")
    if settings.get("synced_gpus"):
        raise ConfigError("synced_gpus=True is not offered with speculation; run a whole model on each GPU")
    config = settings.get("generation_config")
    if settings.get("stop_strings") or getattr(config, "stop_strings", None):
        raise ConfigError(
            "stop_strings do not reach a decoding loop of one's own; pass "
            "stopping_criteria=[StopStringCriteria(tokenizer, strings)] of transformers"
        )


def check_call(ids: Tensor, config: Any, extra: dict[str, Any]) -> None:
    """Refuse a call of `generate` that asks for more than one greedy text; `config` is its GenerationConfig."""
    mode = str(getattr(config.get_generation_mode(), "value", config.get_generation_mode()))
    if mode != "greedy_search" or config.num_return_sequences not in (None, 1):
        asked = "several texts" if mode == "greedy_search" else f"{mode!r} (do_sample={config.do_sample})"
        raise ConfigError(
            f"speculative decoding is greedy, and {asked} is asked for; pass do_sample=False, or use the model's own "
            "`generate`"
        )
    if ids.shape[0] != 1:
        raise ConfigError(
            f"speculative decoding takes one prompt at a time, not {ids.shape[0]}: call it for each of them"
        )
    for name in ("output_attentions", "output_hidden_states", "prefill_chunk_size"):
        if getattr(config, name, None):
            raise ConfigError(f"{name}={getattr(config, name)!r} is not offered with speculation; leave it out")
    if unknown := sorted(name for name in set(extra) - KNOWN if extra[name] is not None):
        raise ConfigError(f"generate got {unknown[0]!r}; speculative decoding takes `input_ids` and `attention_mask`")
    cache = extra.get("past_key_values")
    if not config.use_cache or cache is None:
        raise ConfigError("speculative decoding needs a cache of past tokens: use_cache=True")
    check_cache(cache)
    whole = [extra[name].shape for name in ("attention_mask", "position_ids") if extra.get(name) is not None]
    if cache.get_seq_length() >= ids.shape[1] or any(shape != ids.shape for shape in whole):
        raise ConfigError(
            f"input_ids {tuple(ids.shape)} must be the whole text, the part in past_key_values included, with an "
            "attention_mask of that shape"
        )


def check_cache(cache: Any) -> None:
    """Refuse a cache that cannot be cropped exactly: each layer must keep the rows of all past tokens."""
    from transformers.cache_utils import DynamicLayer

    for layer in getattr(cache, "layers", ()):
        if type(layer) is not DynamicLayer and not getattr(layer, "keeps_each_token", False):
            raise ConfigError(
                f"the cache has a {type(layer).__name__}, from which drafts cannot be taken back; leave out "
                "past_key_values and cache_implementation, or pass quantized_cache(model)"
            )
