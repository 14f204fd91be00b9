"""GGUF files: read back by the format's own library, every tensor is ours, in the names and the order of llama.cpp."""

import errno
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bitdial import QuantConfig, Rule, export_gguf, load, prepare, rotate, save, set_bits
from bitdial.cli import main
from bitdial.dial.plan import BitPlan
from bitdial.errors import ArtifactError, BitdialError, ExportError
from bitdial.live.layers import LiveLayer

transformers = pytest.importorskip("transformers", minversion="5")
gguf = pytest.importorskip("gguf")
pytestmark = pytest.mark.filterwarnings("ignore:.*stay in float:UserWarning")
TOKENS = torch.arange(12).reshape(2, 6)
SIZES = {"hidden_size": 64, "num_hidden_layers": 1, "intermediate_size": 256, "num_attention_heads": 4,
         "num_key_value_heads": 2, "vocab_size": 40, "pad_token_id": 0, "bos_token_id": 1,
         "eos_token_id": 2}  # fmt: skip
NAMES = {  # of transformers and of llama.cpp, written down from its documentation of tensor names
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip
HALF = {"group_size": 32, "group_scales": "half"}


def model_of(kind: str, **settings: Any) -> nn.Module:
    more = {"head_dim": 32} if kind == "Gemma" else {}
    config = getattr(transformers, f"{kind}Config")(**(SIZES | more | settings))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model: nn.Module = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
        for name, tensor in model.named_parameters():
            if name.endswith(("norm.weight", ".bias")):
                nn.init.normal_(tensor)
    return model


def written(place: Path, kind: str = "Llama", *, config: dict[str, Any] | None = None, **settings: Any) -> Path:
    """An artifact beside the folder of its float model."""
    model = model_of(kind, **(config or {}))
    model.save_pretrained(place / "float")  # type: ignore[operator]
    usual = {"bit_choices": (8, 6, 4, 3, 2), "activations": "float", "keep_first_last": False, "start": "max"}
    save(prepare(model, QuantConfig(**(usual | settings)), {"input_ids": TOKENS}), place / "model.safetensors")
    return place / "model.safetensors"


def read(path: Path) -> tuple[dict[str, Tensor], dict[str, Any], dict[str, str]]:
    """The tensors of a file as the library decodes them, its fields, and the types."""
    reader = gguf.GGUFReader(path)
    tensors = {
        t.name: torch.from_numpy(gguf.quants.dequantize(t.data, t.tensor_type).copy()).reshape(*t.shape.tolist()[::-1])
        for t in reader.tensors
    }
    fields = {name: field.contents() for name, field in reader.fields.items()}
    return tensors, fields, {t.name: t.tensor_type.name for t in reader.tensors}


def renamed(name: str) -> str:
    stem, _, end = name.rpartition(".")
    block = stem.split(".")[2] if stem.startswith("model.layers.") else None
    short = stem.split(".", 3)[3] if block else stem
    return f"blk.{block}.{NAMES[short]}.{end}" if block else f"{NAMES[short]}.{end}"


def in_pairs(rows: Tensor, heads: int) -> Tensor:
    """Coordinates i and i + half of a head, which turn together, side by side."""
    size = len(rows) // heads
    return torch.stack([rows[h * size + i // 2 + i % 2 * (size // 2)] for h in range(heads) for i in range(size)])


def expected(live: nn.Module, kind: str) -> dict[str, Tensor]:
    """Our weights at the present setting, as llama.cpp has them."""
    found = {
        f"{name}.weight": layer.codes.weight_values(layer.weight_bits)
        for name, layer in live.named_modules()
        if isinstance(layer, LiveLayer)
    }
    found |= {name: tensor for name, tensor in live.state_dict().items() if ".codes." not in name}
    if kind == "Llama":
        for name, tensor in found.items():
            if ".q_proj." in name or ".k_proj." in name:
                found[name] = in_pairs(tensor, 4 if ".q_proj." in name else 2)
    if kind == "Gemma":
        found = {name: tensor + 1 if "norm" in name else tensor for name, tensor in found.items()}
    return {renamed(name): tensor for name, tensor in found.items()}


@pytest.mark.parametrize("kind", ["Llama", "Qwen2", "Gemma"])
def test_every_tensor_is_ours_bit_for_bit(tmp_path: Path, kind: str) -> None:
    tied = kind != "Llama"
    config = {"tie_word_embeddings": tied, **({"attention_bias": True} if kind == "Llama" else {})}
    path = written(tmp_path, kind, config=config, **HALF)
    live = load(path, model_of(kind, **config))
    types: dict[int, set[str]] = {}
    for bits in (8, 6, 4, 3, 2) if kind == "Llama" else (8, 2):
        set_bits(live, bits)
        done = export_gguf(path, tmp_path / "out.gguf", tmp_path / "float", bits=bits, exact=True, tokenizer=False)
        assert done.rounded == {}
        assert done.bytes == (tmp_path / "out.gguf").stat().st_size
        tensors, fields, of = read(tmp_path / "out.gguf")
        ours = expected(live, kind)
        if tied:
            ours.pop("output.weight")
        assert tensors.keys() == ours.keys()
        for name, tensor in ours.items():
            assert torch.equal(tensors[name], tensor), (name, bits)
        types[bits] = set(done.types)
        assert {each for name, each in of.items() if "norm" in name or name.endswith("bias")} == {"F32"}
        assert fields["general.architecture"] == kind.lower()
    whole = {8: {"Q8_0"}, 6: {"Q8_0", "Q6_K"}, 4: {"Q4_0"}, 3: {"Q4_0", "Q3_K"}, 2: {"Q4_0", "Q2_K"}}
    assert types == {bits: whole[bits] for bits in types}


def test_the_fields_are_those_of_the_config(tmp_path: Path) -> None:
    path = written(tmp_path, **HALF)
    export_gguf(path, tmp_path / "out.gguf", tmp_path / "float", bits=2, tokenizer=False)
    _, fields, _ = read(tmp_path / "out.gguf")
    assert {name.removeprefix("llama."): fields[name] for name in fields if name.startswith("llama.")} == {
        "block_count": 1, "context_length": 2048, "embedding_length": 64, "feed_forward_length": 256,
        "attention.head_count": 4, "attention.head_count_kv": 2, "attention.key_length": 16,
        "attention.value_length": 16, "rope.dimension_count": 16, "rope.freq_base": 10000.0, "vocab_size": 40,
        "attention.layer_norm_rms_epsilon": pytest.approx(1e-6),
    }  # fmt: skip
    assert fields["tokenizer.ggml.model"] == "none"
    assert fields["general.file_type"] == gguf.LlamaFileType.MOSTLY_Q4_0


def test_schemes_between_the_integers(tmp_path: Path) -> None:
    """Values in the middle of a cell are whole numbers of half a step, or have minima."""
    for scheme, widths in (("nested", (8, 6, 4, 3, 2)), ("nested+8", (8, 3)), ("centred", (2,))):
        path = written(tmp_path / scheme, scheme=scheme, **HALF)
        live = load(path, model_of("Llama"))
        for bits in widths:
            set_bits(live, bits)
            done = export_gguf(path, tmp_path / "out.gguf", path.parent / "float", bits=bits, tokenizer=False)
            tensors, _, _ = read(done.path)
            for name, tensor in expected(live, "Llama").items():
                assert torch.equal(tensors[name], tensor), (scheme, bits, name)
    with pytest.raises(ExportError, match="values of scheme 'centred' at 8 bits need more than int8"):
        export_gguf(path, tmp_path / "out.gguf", path.parent / "float", bits=8, tokenizer=False)


def test_what_had_to_be_rounded_is_said_and_exact_refuses_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path, group_size=32)  # row scales of 24 bits
    done = export_gguf(path, tmp_path / "out.gguf", tmp_path / "float", bits=4, tokenizer=False)
    live = load(path, model_of("Llama"))
    set_bits(live, 4)
    ours, (theirs, _, _) = expected(live, "Llama"), read(done.path)
    assert len(done.rounded) == 8  # with the head
    for name, said in done.rounded.items():
        exact, rounded = (values[renamed(f"{name}.weight")].double() for values in (ours, theirs))
        off = (rounded - exact).abs()
        assert said.largest == pytest.approx(float((off / exact.abs()).nan_to_num().max()), rel=1e-5)
        assert said.rms == pytest.approx(float((off.square().sum() / exact.square().sum()).sqrt()), rel=1e-3)
        assert 0 < said.rms < said.largest <= 2**-11
    words = ["export", str(path), "--gguf", str(tmp_path / "cli.gguf"), "--model", str(tmp_path / "float")]
    assert main([*words, "--bits", "4", "--no-tokenizer"]) == 0
    said = capsys.readouterr().out
    assert "layers: 8 x Q4_0" in said
    assert "Rounded: scales of 8 of 8 layers" in said
    assert f"{max(each.rms for each in done.rounded.values()):.3%} (rms)" in said
    (tmp_path / "cli.gguf").unlink()
    assert main([*words, "--bits", "4", "--no-tokenizer", "--exact"]) == 1
    assert "has scales beyond 16 bits" in capsys.readouterr().err
    assert not (tmp_path / "cli.gguf").exists()


def test_a_plan_gives_each_layer_its_type(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path, **HALF)
    live = load(path, model_of("Llama"))
    names = [name for name, layer in live.named_modules() if isinstance(layer, LiveLayer)]
    plan = BitPlan(layers={name: 8 if "down_proj" in name else 4 for name in names})
    (tmp_path / "plan.json").write_text(json.dumps(plan.to_dict()))
    words = ["export", str(path), "--gguf", str(tmp_path / "out.gguf"), "--model", str(tmp_path / "float")]
    assert main([*words, "--no-tokenizer", "--bits", str(tmp_path / "plan.json")]) == 0
    assert "bit for bit ours" in capsys.readouterr().out
    _, _, types = read(tmp_path / "out.gguf")
    assert {types[renamed(f"{name}.weight")] for name in names if "down_proj" in name} == {"Q8_0"}
    assert {types[renamed(f"{name}.weight")] for name in names if "down_proj" not in name} == {"Q4_0"}


def test_embedding_and_head(tmp_path: Path) -> None:
    """Quantised they have blocks, a tied pair once; in float they have the smallest type with all their values."""
    rules = (Rule(type="Embedding", bits=8), Rule(pattern="lm_head", bits=8))
    tied = {"tie_word_embeddings": True}
    path = written(tmp_path / "q", config=tied, rules=rules, **HALF)
    done = export_gguf(path, tmp_path / "q.gguf", tmp_path / "q/float", bits=4, tokenizer=False)
    live = load(path, model_of("Llama", **tied))
    set_bits(live, 4)
    tensors, _, types = read(tmp_path / "q.gguf")
    assert done.types["Q8_0"] == ["model.embed_tokens"]
    assert types["token_embd.weight"] == "Q8_0"
    assert "output.weight" not in types
    assert torch.equal(tensors["token_embd.weight"], expected(live, "Llama")["token_embd.weight"])
    model = model_of("Llama", **tied).to(torch.bfloat16)
    with torch.no_grad():
        model.get_parameter("model.embed_tokens.weight")[3, 5] = 1e-30  # beyond halves
    model.save_pretrained(tmp_path / "b/float")  # type: ignore[operator]
    config = QuantConfig(bit_choices=(8, 4), activations="float", **HALF)  # type: ignore[arg-type]
    save(prepare(model, config, {"input_ids": TOKENS}), tmp_path / "b/model.safetensors")
    export_gguf(tmp_path / "b/model.safetensors", tmp_path / "b.gguf", tmp_path / "b/float", bits=4, tokenizer=False)
    tensors, _, types = read(tmp_path / "b.gguf")
    assert types["token_embd.weight"] == "BF16"
    assert torch.equal(tensors["token_embd.weight"].bfloat16(), model.get_parameter("model.embed_tokens.weight"))


def test_positions_that_are_scaled(tmp_path: Path) -> None:
    llama3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
              "original_max_position_embeddings": 64}  # fmt: skip
    path = written(tmp_path / "3", config={"rope_parameters": llama3}, **HALF)
    export_gguf(path, tmp_path / "out.gguf", tmp_path / "3/float", bits=4, tokenizer=False)
    tensors, fields, _ = read(tmp_path / "out.gguf")
    factors = tensors["rope_freqs.weight"]
    assert fields["llama.rope.freq_base"] == 5e5
    assert factors.shape == (8,)
    assert torch.equal(factors[:1], torch.ones(1)), "the fastest turn as they did"
    torch.testing.assert_close(factors[-1:], torch.tensor([8.0]))
    linear = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
    path = written(tmp_path / "l", config={"rope_parameters": linear}, **HALF)
    export_gguf(path, tmp_path / "out.gguf", tmp_path / "l/float", bits=4, tokenizer=False)
    _, fields, _ = read(tmp_path / "out.gguf")
    assert (fields["llama.rope.scaling.type"], fields["llama.rope.scaling.factor"]) == ("linear", 2.0)


def test_what_the_format_cannot_say_is_refused(tmp_path: Path) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"activations": "dynamic"}, "layer 'model.layers.0.self_attn.q_proj' quantises its input"),
        ({"group_size": 16}, "with one scale, its groups 16; group_size=32 or 64 fits"),
        ({"config": {"hidden_size": 48, "head_dim": 12}}, "they have 32 inputs, a row of it 48"),
        ({"config": {"hidden_act": "gelu"}}, "llama.cpp's llama has no hidden_act='gelu'"),
        ({"kind": "GPTNeoX"}, "model_type 'gpt_neox': how GGUF names its tensors"),
        ({"kind": "Qwen2", "config": {"use_sliding_window": True}}, "no use_sliding_window=True"),
    ]
    for number, (settings, said) in enumerate(cases):
        path = written(tmp_path / str(number), **settings)
        with pytest.raises(ExportError, match=said):
            export_gguf(path, tmp_path / "out.gguf", path.parent / "float", bits=4, tokenizer=False)
    turned = prepare(
        rotate(model_of("Llama")), QuantConfig(activations="float", keep_first_last=False), {"input_ids": TOKENS}
    )
    save(turned, tmp_path / "turned.safetensors")
    with pytest.raises(ExportError, match="the model is rotated, which GGUF cannot say"):
        export_gguf(tmp_path / "turned.safetensors", tmp_path / "out.gguf", tmp_path / "0/float", bits=4)
    assert not list(tmp_path.glob("*.gguf"))


def test_wrong_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, out = written(tmp_path, **HALF), tmp_path / "out.gguf"
    with pytest.raises(ExportError, match="is the artifact, which would be lost"):
        export_gguf(path, path, tmp_path / "float", bits=4)
    with pytest.raises(ExportError, match="is no transformers folder"):
        export_gguf(path, out, tmp_path / "nowhere", bits=4)
    other = written(tmp_path / "other", config={"num_hidden_layers": 2})
    with pytest.raises(ArtifactError, match="does not fit"):
        export_gguf(path, out, other.parent / "float", bits=4)
    with pytest.raises(BitdialError, match="5"):
        export_gguf(path, out, tmp_path / "float", bits=5)
    with pytest.raises(ExportError, match=r"no tokenizer that is known here; tokenizer=False"):
        export_gguf(path, out, tmp_path / "float", bits=4)
    assert not out.exists()
    out.write_text("before")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(gguf.GGUFWriter, "write_padding", full)
    with pytest.raises(ExportError, match=r"No space left on device; what was there before is untouched"):
        export_gguf(path, out, tmp_path / "float", bits=4, tokenizer=False)
    assert out.read_text() == "before"
    assert sorted(p.name for p in tmp_path.glob("*.tmp")) == []


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path, **HALF)
    words = ["export", str(path), "--gguf", str(tmp_path / "out.gguf")]
    folder = ["--model", str(tmp_path / "float")]
    for more, said in (
        (["--bits", "4"], "--gguf needs --model DIR"),
        (folder, "--gguf needs --bits, such as --bits 4"),
        ([*folder, "--bits", "4", "--opset", "21"], "--opset is not for --gguf"),
        ([*folder, "--bits", "5"], "5"),
    ):
        assert main([*words, *more]) == 1
        assert said in capsys.readouterr().err
    assert main(["export", str(path), "--hf", str(tmp_path / "hf"), *folder, "--exact"]) == 1
    assert "--exact is not for --hf" in capsys.readouterr().err
