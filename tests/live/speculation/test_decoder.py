"""Speculative texts, held to those of transformers' own loop at the same width."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from bitdial import at_bits, code_exact, get_bits, load, quantized_cache, set_bits, speculate, view_at_bits
from bitdial.live.speculation.draft_length import DraftLength

from .conftest import GREEDY, IDS, Decoders, both, same_bits

transformers = pytest.importorskip("transformers", minversion="5")
pytestmark = pytest.mark.usefixtures("one_thread")


def test_exact_and_integer_sums_give_the_same_bits(decoders: Decoders) -> None:
    """Logits, cache and text are those of plain decoding at that width; drafts are accepted, and refused."""
    cases: list[tuple[str, dict[str, Any], str]] = [
        ("Llama", {"activations": "dynamic"}, "exact"),
        ("Qwen2", {"activations": "auto"}, "integer"),
        ("Gemma", {"activations": "dynamic", "keep_first_last": True}, "integer"),  # with an unquantised head
        ("Qwen2", {"activations": "float", "group_size": 16}, "exact"),
    ]
    accepted = refused = 0
    for family, config, engine in cases:
        model, path = decoders(family, **config)
        live: Any = load(path, model, kernels="integer") if engine == "integer" else code_exact(load(path, model))
        fast = speculate(live, 4, draft_length=3)
        assert fast.bit_exact, (family, engine)
        assert same_bits(*both(live, fast, IDS[:1])), (family, engine)
        accepted += fast.statistics.accepted
        refused += fast.statistics.judged - fast.statistics.accepted
    assert min(accepted, refused) > 5


def test_float_kernels_give_the_same_text(decoders: Decoders) -> None:
    for family in ("Llama", "Qwen2", "Gemma"):
        model, path = decoders(family)
        live: Any = load(path, model)
        fast = speculate(live, 4, draft_length=4)
        assert not fast.bit_exact
        for ids in IDS[:3].split(1):
            plain, spec = both(live, fast, ids, max_new_tokens=10)
            assert torch.equal(plain.sequences, spec.sequences), family
            torch.testing.assert_close(spec.logits, plain.logits, rtol=0, atol=1e-4)


def test_the_cache_holds_the_width_of_the_model(decoders: Decoders) -> None:
    """Nothing of the draft's width is left in it, at any step: that would be far from the model's own."""
    model, path = decoders()
    live: Any = load(path, model)
    fast = speculate(live, 2, draft_length=3)
    plain, spec = both(live, fast, IDS[:1])
    assert spec.past_key_values.get_seq_length() == spec.sequences.shape[1] - 1
    keys = [torch.stack([layer.keys for layer in out.past_key_values.layers]) for out in (plain, spec)]
    torch.testing.assert_close(*keys, rtol=0, atol=1e-4)
    low = view_at_bits(live, 2)(input_ids=plain.sequences[:, :-1], use_cache=True).past_key_values
    assert float((torch.stack([layer.keys for layer in low.layers]) - keys[0]).abs().max()) > 0.1


def test_texts_end_as_plain_ones_do(decoders: Decoders) -> None:
    """By a length, an end token, a criterion of one's own; with processors that change what is likeliest."""
    model, path = decoders()
    live: Any = load(path, model)
    fast = speculate(live, 4, draft_length=5)
    text = live.generate(IDS[:1], max_new_tokens=12, **GREEDY)[0, 10:].tolist()

    class Sum(transformers.StoppingCriteria):  # type: ignore[misc]
        def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
            return input_ids[:, 10:].sum(dim=1) > sum(text[:5])

    cases: list[dict[str, Any]] = [
        *({"max_new_tokens": count} for count in (1, 2, 3, 7)),
        *({"eos_token_id": token} for token in text[:8]),
        {"eos_token_id": [text[2], text[6]], "min_new_tokens": 5},
        {"stopping_criteria": transformers.StoppingCriteriaList([Sum()])},
        {"repetition_penalty": 1.5},
        {"generation_config": transformers.GenerationConfig(max_new_tokens=5, do_sample=False, eos_token_id=text[1])},
    ]
    lengths = set()
    for case in cases:
        settings = {"max_new_tokens": 12, **GREEDY, **case} if "generation_config" not in case else case
        plain, spec = live.generate(IDS[:1], **settings), fast.generate(IDS[:1], **settings)
        assert torch.equal(plain, spec), case
        assert fast.statistics.tokens == plain.shape[1] - 10, case
        lengths.add(plain.shape[1])
    assert len(lengths) > 5


def test_processors_and_streamers_see_each_token_once_and_in_order(decoders: Decoders) -> None:
    model, path = decoders()
    live: Any = load(path, model)
    fast = speculate(live, 4, draft_length=3)

    class Notes(transformers.LogitsProcessor):  # type: ignore[misc]
        def __init__(self) -> None:
            self.seen: list[list[int]] = []

        def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
            self.seen.append(input_ids[0].tolist())
            return scores + 3 * (torch.arange(61) == len(self.seen))

    class Stream(transformers.generation.streamers.BaseStreamer):  # type: ignore[misc]
        def __init__(self) -> None:
            self.got: list[list[int]] = []

        def put(self, value: Tensor) -> None:
            self.got.append(value.flatten().tolist())

        def end(self) -> None:
            self.got.append([])

    found = []
    for which in (live, fast):
        notes, stream = Notes(), Stream()
        processors = transformers.LogitsProcessorList([notes])
        out = which.generate(IDS[:1], max_new_tokens=9, logits_processor=processors, streamer=stream, **GREEDY)
        found.append((out.tolist(), notes.seen, stream.got))
    assert found[0] == found[1]
    assert found[1][2][0] == IDS[0].tolist()


def test_padding_and_a_cache_that_has_begun(decoders: Decoders) -> None:
    """A prompt padded on the left, and a conversation that goes on: bit for bit too."""
    model, path = decoders("Llama", activations="dynamic")
    live: Any = code_exact(load(path, model))
    fast = speculate(live, 4, draft_length=3)
    mask = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1, 1, 1]])
    plain, spec = both(live, fast, IDS[:1], attention_mask=mask)
    assert same_bits(plain, spec)
    assert not torch.equal(plain.sequences, both(live, fast, IDS[:1])[0].sequences)
    plain, spec = both(live, fast, IDS[1:2], max_new_tokens=5)
    further = torch.cat([plain.sequences, IDS[2:3]], dim=1)
    caches = [out.past_key_values for out in (plain, spec)]
    how: dict[str, Any] = {"max_new_tokens": 8, **GREEDY, "return_dict_in_generate": True, "output_logits": True}
    outs = [w.generate(further, past_key_values=c, **how) for w, c in zip((live, fast), caches, strict=True)]
    assert same_bits(*outs)
    assert outs[1].past_key_values is caches[1]


def test_a_cache_of_8_bits(decoders: Decoders) -> None:
    model, path = decoders("Llama", activations="dynamic")
    live: Any = code_exact(load(path, model))
    fast = speculate(live, 4, draft_length=3)
    outs = [
        which.generate(
            IDS[:1], max_new_tokens=12, past_key_values=quantized_cache(live), return_dict_in_generate=True,
            output_logits=True, **GREEDY,
        )
        for which in (live, fast)
    ]  # fmt: skip
    assert same_bits(*outs)
    assert fast.statistics.accepted > 0
    assert outs[1].past_key_values.layers[0].keys.dtype == torch.int8


def test_the_model_keeps_its_setting_and_may_change_it(decoders: Decoders) -> None:
    """The width that checks is the one that the model has at the call; so also for the view that takes tokens alone."""
    model, path = decoders("Llama", activations="dynamic")
    for live in (load(path, model), code_exact(load(path, model))):
        fast = speculate(live, (2, 8), draft_length=2)
        texts = []
        for bits in (8, 4):
            set_bits(live, bits)
            before = get_bits(live)
            plain, spec = both(live, fast, IDS[:1])
            assert torch.equal(plain.sequences, spec.sequences)
            assert same_bits(plain, spec) == fast.bit_exact
            assert get_bits(live) == before
            texts.append(plain.sequences)
        assert not torch.equal(*texts)
        assert set(get_bits(fast.draft).values()) == {(2, 8)}


def test_one_buffer_on_packed_kernels(decoders: Decoders) -> None:
    model, path = decoders("Llama", scheme="nested")
    live: Any = load(path, model, kernels="packed")
    fast = speculate(live, 4, draft_length=3)
    held = {t.data_ptr() for t in (*live.parameters(), *live.buffers()) if t.numel()}
    assert {t.data_ptr() for t in (*fast.draft.parameters(), *fast.draft.buffers()) if t.numel()} <= held
    plain, spec = both(live, fast, IDS[:1], max_new_tokens=6)
    assert torch.equal(plain.sequences, spec.sequences)


def test_statistics_count_what_happened(decoders: Decoders) -> None:
    """A draft at the model's own width is always right; so the counts follow from the lengths."""
    model, path = decoders("Llama", activations="dynamic")
    live: Any = code_exact(load(path, model))
    fast = speculate(live, 8, draft_length=3)
    assert math.isnan(fast.statistics.acceptance)
    fast.generate(IDS[:1], max_new_tokens=11, **GREEDY)
    found = fast.statistics  # 1 by the prompt, then 4, 4, and a draft of 1 for the two that are left
    assert (found.tokens, found.passes, found.drafted, found.judged, found.accepted) == (11, 4, 7, 7, 7)
    assert (found.acceptance, found.tokens_per_pass) == (1, 11 / 4)
    with at_bits(live, 4):  # the drafts, at 8 bits, are now those of another model
        fast.generate(IDS[:1], max_new_tokens=11, **GREEDY)
    found = fast.statistics
    assert 0 < found.acceptance < 1
    assert found.tokens == found.accepted + found.passes
    assert found.judged <= found.drafted


def test_lengths_are_adapted_unless_fixed(decoders: Decoders, monkeypatch: pytest.MonkeyPatch) -> None:
    model, path = decoders()
    live: Any = load(path, model)
    fast, lengths = speculate(live, 4), []
    choose = DraftLength.choose
    monkeypatch.setattr(DraftLength, "choose", lambda self, most: lengths.append(choose(self, most)) or lengths[-1])
    plain, spec = both(live, fast, IDS[:1])
    assert torch.equal(plain.sequences, spec.sequences)
    assert lengths[:2] == [0, 2], "one plain pass and one short draft are measured first"


def test_transformers_own_assisted_generation_takes_a_view(decoders: Decoders) -> None:
    """With a cache for each of both models."""
    model, path = decoders("Llama", activations="dynamic")
    for live in (load(path, model), code_exact(load(path, model))):
        generate: Any = live.generate
        assistant: Any = view_at_bits(live, 4)
        assistant.generation_config.num_assistant_tokens = 3
        plain = generate(IDS[:1], max_new_tokens=8, **GREEDY)
        assert torch.equal(plain, generate(IDS[:1], max_new_tokens=8, assistant_model=assistant, **GREEDY))
