"""Decoding by recorded steps through `generate`: a recorder without a GPU runs a step again where a graph would."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bitdial import BitPlan, QuantConfig, decode_graphs, load, prepare, save, set_bits
from bitdial.errors import ConfigError
from bitdial.live.decode_graphs import DecodeGraphs

transformers = pytest.importorskip("transformers")
WIDTHS = (8, 4, 2)
IDS = torch.randint(3, 96, (2, 5), generator=torch.Generator().manual_seed(0))


class Again:
    """Records a step by keeping it: what it reads is in the recorded inputs, so a run of it is a replay."""

    def __init__(self) -> None:
        self.done: list[str] = []

    def first(self, step: Callable[[], Any]) -> Any:
        self.done.append("first")
        return step()

    def record(self, step: Callable[[], Any]) -> tuple[Callable[[], object], Any]:
        self.done.append("record")
        result = transformers.modeling_outputs.CausalLMOutputWithPast()

        def replay() -> None:
            self.done.append("replay")
            found = step()
            if "logits" in result:
                result["logits"].copy_(found.logits)  # a graph overwrites what it wrote before
            else:
                result["logits"], result["past_key_values"] = found.logits, found.past_key_values

        return replay, result


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, nn.Module]:
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 96, "num_attention_heads": 4}
    config = transformers.LlamaConfig(
        **sizes, vocab_size=96, num_key_value_heads=2, pad_token_id=0, bos_token_id=1, eos_token_id=2
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(config).eval()
    path = tmp_path_factory.mktemp("graphs") / "m.safetensors"
    settings = QuantConfig(scheme="nested", activations="float", start="3std", bit_choices=WIDTHS)
    save(prepare(model, settings, {"input_ids": IDS}), path)
    return path, model


def generate(model: Any, cache: Any = None, ids: Tensor = IDS, **settings: Any) -> Tensor:
    everywhere = transformers.CompileConfig()
    everywhere._compile_all_devices = True  # else transformers asks for the compiled call on GPUs alone
    given: dict[str, Any] = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, **settings}
    given.setdefault("attention_mask", torch.ones_like(ids))
    if cache is not None:
        given |= {"past_key_values": cache, "compile_config": everywhere}
    torch.manual_seed(3)
    return model.generate(input_ids=ids, **given)


@pytest.fixture
def live(file: tuple[Path, nn.Module]) -> nn.Module:
    return load(*file)


def static(live: Any) -> Any:
    return transformers.StaticCache(config=live.config, max_cache_len=16)


def taken(recorder: Again) -> dict[str, int]:
    found = {what: recorder.done.count(what) for what in ("first", "record", "replay")}
    recorder.done.clear()
    return found


def test_texts_are_those_of_plain_decoding_and_a_switch_picks_a_graph(live: nn.Module) -> None:
    recorder = Again()
    settings = (8, 2, BitPlan({"model.layers.0.mlp.up_proj": 4}, default=8))
    wanted = []
    for setting in settings:
        set_bits(live, setting)
        wanted.append(generate(live, cache_implementation="static", disable_compile=True))
    assert not torch.equal(wanted[0], wanted[1])
    graphs = decode_graphs(live, batch_size=2, max_length=16, recorder=recorder)
    assert isinstance(graphs, DecodeGraphs)
    for again in (False, True):
        for setting, text in zip(settings, wanted, strict=True):
            set_bits(live, setting)
            assert torch.equal(generate(live, graphs.cache()), text), (again, setting)
            made = {"first": 0, "record": 0, "replay": 5} if again else {"first": 1, "record": 1, "replay": 4}
            assert taken(recorder) == made, (again, setting)


def test_samples_and_padded_prompts(live: nn.Module) -> None:
    mask = torch.ones_like(IDS)
    mask[1, :2] = 0
    given: dict[str, Any] = {"do_sample": True, "attention_mask": mask, "output_logits": True}
    given["return_dict_in_generate"] = True
    wanted = generate(live, static(live), disable_compile=True, **given)
    recorder = Again()
    graphs = decode_graphs(live, batch_size=2, max_length=16, recorder=recorder)
    for _ in range(2):
        found = generate(live, graphs.cache(), **given)
        assert torch.equal(found.sequences, wanted.sequences)
        assert all(torch.equal(a, b) for a, b in zip(found.logits, wanted.logits, strict=True)), "none is overwritten"
    assert taken(recorder) == {"first": 1, "record": 1, "replay": 9}


def test_graphs_can_be_recorded_before_and_forgotten(live: nn.Module) -> None:
    recorder = Again()
    graphs = decode_graphs(live, batch_size=2, max_length=16, recorder=recorder)
    everywhere = transformers.CompileConfig()
    everywhere._compile_all_devices = True
    graphs.record(8, 2, compile_config=everywhere)
    assert taken(recorder) == {"first": 2, "record": 2, "replay": 4}
    for bits in (8, 2):
        set_bits(live, bits)
        generate(live, graphs.cache())
        assert taken(recorder) == {"first": 0, "record": 0, "replay": 5}, bits
    graphs.clear()
    generate(live, graphs.cache())
    assert taken(recorder) == {"first": 1, "record": 1, "replay": 4}
    live._apply(lambda tensor: tensor.clone())  # as a move does
    generate(live, graphs.cache())
    assert taken(recorder) == {"first": 1, "record": 1, "replay": 4}, "a graph knows where the model lay"


def test_what_does_not_fit_goes_through_the_model(live: nn.Module) -> None:
    recorder = Again()
    wanted = generate(live, cache_implementation="static", disable_compile=True)
    decode_graphs(live, batch_size=2, max_length=16, recorder=recorder)
    assert torch.equal(generate(live), wanted), "a cache that grows"
    assert torch.equal(generate(live, static(live)), wanted), "another one"
    assert taken(recorder) == {"first": 0, "record": 0, "replay": 0}


def test_models_without_a_gpu_are_refused(live: nn.Module) -> None:
    with pytest.raises(ConfigError, match="the model is on cpu, and CUDA graphs are for GPUs"):
        decode_graphs(live, batch_size=1, max_length=8)
    with pytest.raises(ConfigError, match="without a config"):
        decode_graphs(nn.Linear(2, 2), batch_size=1, max_length=8, recorder=Again())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("compiled", [False, True])
def test_on_a_gpu_graphs_give_the_texts_of_plain_decoding(file: tuple[Path, nn.Module], compiled: bool) -> None:
    live = load(*file, dtype=torch.bfloat16, device="cuda")
    ids, wanted = IDS.cuda(), {}
    for bits in (8, 2):
        set_bits(live, bits)
        settings = {"return_dict_in_generate": True, "output_logits": True}
        wanted[bits] = generate(live, ids=ids, cache_implementation="static", disable_compile=True, **settings)
    graphs = decode_graphs(live, batch_size=2, max_length=16, compiled=compiled)
    graphs.record(8, 2)
    for bits in (8, 2, 8):
        set_bits(live, bits)
        found = generate(live, graphs.cache(), ids=ids, return_dict_in_generate=True, output_logits=True)
        first = torch.stack(found.logits[:2]), torch.stack(wanted[bits].logits[:2])
        torch.testing.assert_close(*first, rtol=0.1, atol=0.1 if compiled else 0.05)
