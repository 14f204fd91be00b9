"""A cache of int8 codes, held to the cache in float and to the formula."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bitdial import QuantConfig, load, prepare, quantized_cache, save, set_bits
from bitdial.errors import ConfigError
from bitdial.live.kv_cache import from_rows, to_rows

transformers = pytest.importorskip("transformers")

SIZES = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}


def decoder() -> Any:
    config = transformers.LlamaConfig(**SIZES, num_attention_heads=4, num_key_value_heads=2)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return transformers.LlamaForCausalLM(config).eval()


IDS = torch.randint(0, 50, (3, 12), generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True)
def no_gradients() -> Any:
    with torch.no_grad():
        yield


def logits(model: nn.Module, cache: Any, *parts: Tensor) -> Tensor:
    """What the model says of all tokens, given in parts."""
    return torch.cat([model(input_ids=part, past_key_values=cache, use_cache=True).logits for part in parts], dim=1)


def test_rows_are_codes_and_their_scale() -> None:
    states = torch.randn(2, 3, 5, 8, generator=torch.Generator().manual_seed(2)) * 10
    states[0, 1, 2] = 0
    rows = to_rows(states)
    assert rows.dtype == torch.int8
    assert rows.shape == (2, 3, 5, 12)
    largest = states.abs().amax(dim=-1, keepdim=True)
    assert bool((rows[..., :8].abs().amax(dim=-1, keepdim=True) == 127 * (largest > 0)).all())
    values = from_rows(rows, torch.float32)
    assert bool(((values - states).abs() <= largest / 127 / 2 * 1.0001).all())
    assert not values[0, 1, 2].any()
    assert from_rows(to_rows(states.bfloat16()), torch.bfloat16).dtype == torch.bfloat16
    states[1, 0, 0, 0] = float("nan")
    spoiled = from_rows(to_rows(states), torch.float32)
    assert bool(spoiled[1, 0, 0].isnan().all())
    assert int(spoiled.isnan().sum()) == 8


def test_a_text_in_parts_has_the_numbers_of_the_whole_text() -> None:
    model = decoder()
    whole = logits(model, quantized_cache(model), IDS)
    for cut in (1, 5, 11):
        torch.testing.assert_close(logits(model, quantized_cache(model), IDS[:, :cut], IDS[:, cut:]), whole)
    in_float = logits(model, None, IDS)
    assert not torch.equal(whole, in_float)
    torch.testing.assert_close(whole, in_float, rtol=0, atol=0.02 * float(in_float.abs().amax()))


def test_it_takes_a_byte_a_number_and_four_a_token_and_head() -> None:
    model = decoder()
    cache = quantized_cache(model)
    logits(model, cache, IDS)
    assert cache.get_seq_length() == 12
    held = sum(t.nbytes for layer in cache.layers for t in (layer.keys, layer.values))
    assert held == 2 * 2 * IDS.numel() * 2 * (8 + 4)  # layers, keys and values, tokens, heads, a head's size and scale


def test_a_live_model_generates_with_it_at_every_width(tmp_path: Any) -> None:
    model = decoder()
    config = QuantConfig(bit_choices=(8, 4), activations="dynamic", keep_first_last=False, group_size=16)
    save(prepare(model, config, {"input_ids": IDS}), tmp_path / "m")
    live = load(tmp_path / "m", model)
    for bits in (8, 4):
        set_bits(live, bits)
        texts = []
        for _ in range(2):
            cache = quantized_cache(live)
            how = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
            texts.append(live.generate(IDS, attention_mask=torch.ones_like(IDS), past_key_values=cache, **how))
            assert cache.get_seq_length() == 12 + 5
            step = texts[-1][:, :-1]
            expected = logits(live, quantized_cache(live), step)[:, 11:].argmax(dim=-1)
            assert torch.equal(expected, texts[-1][:, 12:]), "greedy: each token is the likeliest behind those before"
        assert torch.equal(*texts)


def test_beams_and_crops_move_codes_with_their_scales() -> None:
    model = decoder()
    cache = quantized_cache(model)
    logits(model, cache, IDS)
    before = [from_rows(layer.keys, torch.float32) for layer in cache.layers]
    order = torch.tensor([2, 0, 0])
    cache.reorder_cache(order)
    for layer, keys in zip(cache.layers, before, strict=True):
        assert torch.equal(from_rows(layer.keys, torch.float32), keys[order])
        layer.crop(-4)
        assert torch.equal(from_rows(layer.keys, torch.float32), keys[order][..., :8, :])
    how = {"num_beams": 3, "max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    out = model.generate(IDS, attention_mask=torch.ones_like(IDS), past_key_values=quantized_cache(model), **how)
    assert out.shape[1] <= 16
    cache.reset()
    assert cache.get_seq_length() == 0
    torch.testing.assert_close(logits(model, cache, IDS), logits(model, quantized_cache(model), IDS))


def test_other_attention_is_refused() -> None:
    sliding = transformers.MistralForCausalLM(
        transformers.MistralConfig(**SIZES, num_attention_heads=4, num_key_value_heads=2, sliding_window=8)
    )
    with pytest.raises(ConfigError, match=r"'sliding_attention'.*leave past_key_values out"):
        quantized_cache(sliding)
    with pytest.raises(ConfigError, match="a Linear without a config"):
        quantized_cache(nn.Linear(2, 2))
