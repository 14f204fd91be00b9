"""What is refused, and what the errors say."""

from typing import Any

import pytest
import torch
from torch import nn

from bitdial import QuantConfig, load, prepare, save, speculate
from bitdial.errors import ConfigError, PlanError

from .conftest import GREEDY, IDS, Decoders, decoder

transformers = pytest.importorskip("transformers", minversion="5")


def test_calls_that_ask_for_something_else(decoders: Decoders) -> None:
    model, path = decoders()
    live: Any = load(path, model)
    fast = speculate(live, 4)
    static = transformers.StaticCache(config=live.config, max_cache_len=32)
    begun = live.generate(IDS[:1], max_new_tokens=4, return_dict_in_generate=True, **GREEDY).past_key_values
    cases: list[tuple[dict[str, Any], str]] = [
        ({"do_sample": True}, r"is greedy, and 'sample' \(do_sample=True\) is asked for; pass do_sample=False"),
        ({"num_beams": 2}, "is greedy, and 'beam_search'"),
        ({"num_return_sequences": 2, "num_beams": 2}, "is greedy"),
        ({"inputs": IDS[:3]}, "one prompt at a time, not 3"),
        ({"use_cache": False}, "needs a cache of past tokens: use_cache=True"),
        ({"past_key_values": static}, "the cache has a StaticLayer, from which drafts cannot be taken back"),
        ({"cache_implementation": "static"}, "the cache has a StaticLayer"),
        ({"past_key_values": begun}, r"input_ids \(1, 10\) must be the whole text"),
        ({"return_dict_in_generate": True, "output_hidden_states": True}, "output_hidden_states=True is not offered"),
        ({"prefill_chunk_size": 4}, "prefill_chunk_size=4 is not offered"),
        ({"assistant_model": live}, "assistant_model is another way to decode"),
        ({"prompt_lookup_num_tokens": 3}, "prompt_lookup_num_tokens is another way to decode"),
        ({"stop_strings": ["a"]}, "stopping_criteria=.StopStringCriteria"),
        ({"synced_gpus": True}, "synced_gpus=True is not offered"),
    ]
    for settings, message in cases:
        with pytest.raises(ConfigError, match=message) as caught:
            fast.generate(**{"inputs": IDS[:1], "max_new_tokens": 3, **GREEDY, **settings})
        assert str(caught.value).count("\n") == 0, settings


def test_models_that_cannot_take_tokens_back(tmp_path: Any) -> None:
    small: dict[str, Any] = {"num_attention_heads": 2, "num_hidden_layers": 1}
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    cases = [
        ("Mistral", {"sliding_window": 8}, "a layer of the model has 'sliding_attention', and drafts are taken back"),
        ("Llama", {"rope_parameters": rope}, "the rotary embedding is 'dynamic'"),
    ]
    for family, settings, message in cases:
        model = decoder(family, **small, **settings)
        config = QuantConfig(bit_choices=(8, 4), activations="float", keep_first_last=False, start="max")
        save(prepare(model, config, {"input_ids": IDS}), tmp_path / family)
        with pytest.raises(ConfigError, match=message):
            speculate(load(tmp_path / family, model), 4)


def test_what_is_no_live_decoder(decoders: Decoders) -> None:
    model, path = decoders()
    live = load(path, model)
    with pytest.raises(ConfigError, match="the model has no live layer to draft with"):
        speculate(model, 4)
    with pytest.raises(ConfigError, match="a Linear has no `generate` of transformers"):
        speculate(nn.Linear(2, 2), 4)
    with pytest.raises(PlanError, match="3"):
        speculate(live, 3)
    for length in (0, 33, True, 2.0):
        with pytest.raises(ConfigError, match=r"draft_length=.* must be a whole number from 1 to 32"):
            speculate(live, 4, draft_length=length)  # type: ignore[arg-type]
    encoder = transformers.T5ForConditionalGeneration(
        transformers.T5Config(vocab_size=20, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    )
    encoder.live = live.get_submodule("model.layers.0.mlp.up_proj")
    with pytest.raises(ConfigError, match="has an encoder, and speculation is for decoders alone"):
        speculate(encoder, 4)
    assert torch.is_tensor(live.generate(IDS[:1], max_new_tokens=1, **GREEDY))  # type: ignore[operator]
