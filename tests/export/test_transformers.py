"""Folders of transformers models: written, read back live, and refused if anything is off."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from bitdial import (
    BitPlan,
    QuantConfig,
    Rule,
    describe,
    export_pretrained,
    get_bits,
    load,
    load_pretrained,
    prepare,
    read_artifact,
    save,
    set_bits,
    view_at_bits,
)  # fmt: skip
from bitdial.cli import main
from bitdial.errors import ArtifactError, ConfigError, ExportError
from bitdial.live.engines.packed import PackedEngine

transformers = pytest.importorskip("transformers", minversion="5")

WIDTHS = (8, 4, 3, 2)
IDS = torch.randint(3, 96, (2, 9), generator=torch.Generator().manual_seed(0))
SIZES = {
    "hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 96, "num_attention_heads": 4, "vocab_size": 96,
    "max_position_embeddings": 64,
}  # fmt: skip


def llama(**settings: Any) -> nn.Module:
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = transformers.LlamaConfig(**{**SIZES, "num_key_value_heads": 2, **tokens, **settings})
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return transformers.LlamaForCausalLM(config).eval()


def prepared(model: nn.Module, scheme: str = "nested", **settings: Any) -> nn.Module:
    config = QuantConfig(**{"activations": "float", "start": "3std", **settings}, bit_choices=WIDTHS, scheme=scheme)
    return prepare(model, config, {"input_ids": IDS}).eval()


def logits(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of the nested llama."""
    place = tmp_path_factory.mktemp("llama")
    model = prepared(llama())
    save(model, place / "file.safetensors")
    return export_pretrained(place / "file.safetensors", place / "folder", model)


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    """A copy of it to spoil."""
    return Path(shutil.copytree(made, tmp_path / "folder"))


def change(folder: Path, **settings: Any) -> None:
    path = folder / "config.json"
    found = {**json.loads(path.read_text()), **settings}
    path.write_text(json.dumps({key: value for key, value in found.items() if value is not None}))


# --- what works -----------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("scheme", ["nested", "double_rounding"])
def test_the_folder_is_the_trained_model(tmp_path: Path, scheme: str, tied: bool) -> None:
    model = prepared(llama(tie_word_embeddings=tied), scheme)
    save(model, tmp_path / "model.safetensors")
    assert export_pretrained(tmp_path / "model.safetensors", tmp_path, model) == tmp_path, "also where the file is"
    names = {"model.safetensors", "bitdial.safetensors", "config.json", "generation_config.json"}
    assert {p.name for p in tmp_path.iterdir()} == names
    live = load_pretrained(tmp_path, bits=4)
    assert type(live) is transformers.LlamaForCausalLM
    assert (live.lm_head.weight is live.model.embed_tokens.weight) == tied
    assert set(get_bits(live).values()) == {(4, 4)}
    for bits in WIDTHS:
        set_bits(live, bits)
        set_bits(model, bits)
        assert torch.equal(logits(live), logits(model))


@pytest.mark.parametrize("scheme", ["nested", "double_rounding"])
def test_a_model_in_16_bits_generates_and_switches(tmp_path: Path, scheme: str) -> None:
    model = prepared(llama(dtype="bfloat16").float(), scheme)
    save(model, tmp_path / "file.safetensors")
    export_pretrained(tmp_path / "file.safetensors", tmp_path / "folder", model)
    live = load_pretrained(tmp_path / "folder", kernels="packed")
    assert live.dtype == torch.bfloat16, "the config's"
    assert live.model.rotary_emb.inv_freq.dtype == torch.float32
    words = [m for m in live.modules() if isinstance(m, PackedEngine)]
    assert len(words) == 14, "seven in each block"
    plain = load_pretrained(tmp_path / "folder", dtype=torch.float32)
    for bits in (8, 3):
        set_bits(live, bits)
        set_bits(plain, bits)
        difference = (logits(live).float() - logits(plain)).norm() / logits(plain).norm()
        assert float(difference) < 0.03
        out = live.generate(input_ids=IDS, max_new_tokens=3, do_sample=False)
        assert torch.equal(out[:, : IDS.shape[1]], IDS)
        assert out.shape[1] > IDS.shape[1]
    if scheme == "nested":
        view = view_at_bits(live, 2)
        set_bits(live, 8)
        set_bits(plain, 2)
        assert float((logits(view).float() - logits(plain)).norm() / logits(plain).norm()) < 0.03
        assert view.generate(input_ids=IDS, max_new_tokens=2).shape[1] > IDS.shape[1]


@pytest.mark.usefixtures("fresh_compiler")
def test_compiled_decoders_follow_the_dial(made: Path) -> None:
    live = load_pretrained(made, kernels="packed", dtype=torch.float16)
    compiled = torch.compile(live.model.layers[1].mlp, backend="aot_eager", fullgraph=True)
    x = torch.randn(2, 3, 64, generator=torch.Generator().manual_seed(1)).half()
    for bits in (8, 2):
        set_bits(live, bits)
        with torch.no_grad():
            assert torch.equal(compiled(x), live.model.layers[1].mlp(x))


def test_other_architectures(tmp_path: Path) -> None:
    models = {
        "qwen": transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**SIZES, num_key_value_heads=2)),
        "bert": transformers.BertForSequenceClassification(transformers.BertConfig(**SIZES)),
    }
    for name, float_model in models.items():
        for activations in ("float", "auto"):
            model = prepared(float_model.eval(), "double_rounding", activations=activations)
            save(model, tmp_path / "file.safetensors")
            live = load_pretrained(export_pretrained(tmp_path / "file.safetensors", tmp_path / name, model), bits=3)
            set_bits(model, 3)
            assert type(live) is type(float_model)
            assert torch.equal(logits(live), logits(model))


def test_a_tied_embedding_and_head_at_8_bits(tmp_path: Path) -> None:
    """Stored once, as codes, and at 8 bits whatever the dial says; on every kernel and through a folder."""
    rules = (Rule(type="Embedding", bits=8), Rule(pattern="lm_head", bits=8, activations="float"))
    sizes = {"group_size": 32, "keep_first_last": True, "rules": rules}
    for activations in ("float", "auto"):
        float_model = llama(tie_word_embeddings=True)
        model = prepared(float_model, activations=activations, **sizes)
        path = tmp_path / "model.safetensors"
        save(model, path)
        artifact = read_artifact(path)
        assert artifact.layers["lm_head"]["tied_to"] == "model.embed_tokens"
        assert artifact.fixed_bits == {"model.embed_tokens": 8, "lm_head": 8}
        ends = {name: t for name, t in artifact.tensors.items() if "embed" in name or "lm_head" in name}
        assert {name: tuple(t.shape) for name, t in ends.items()} == {
            "model.embed_tokens/codes": (96, 64),
            "model.embed_tokens/weight_scale": (1, 96),
            "model.embed_tokens/group_scale": (96, 2),
        }
        assert describe(model).file_bytes == sum(t.nbytes for t in artifact.tensors.values())
        lives = [load(path, float_model), load_pretrained(export_pretrained(path, tmp_path / "folder", model))]
        for bits in WIDTHS:
            set_bits(model, bits)
            for live in lives:
                set_bits(live, bits)
                assert {get_bits(live)[name][0] for name in ("model.embed_tokens", "lm_head")} == {8}
                assert torch.equal(logits(live), logits(model))
        assert lives[1].generate(input_ids=IDS, max_new_tokens=2, do_sample=False).shape[1] > IDS.shape[1]
        plan = BitPlan({"model.embed_tokens": 4, "lm_head": 4}, default=2)
        for each in (model, lives[0]):
            set_bits(each, plan)
        assert torch.equal(logits(lives[0]), logits(model)), "a plan that names them moves them"
        if activations == "float":
            packed = load(path, float_model, kernels="packed", dtype=torch.bfloat16)
            set_bits(packed, 3)
            set_bits(model, 3)
            assert float((logits(packed).float() - logits(model)).norm() / logits(model).norm()) < 0.03
    with pytest.raises(ConfigError, match=r"'lm_head' uses the same weight in float; .* Rule\(pattern='lm_head'"):
        prepared(llama(tie_word_embeddings=True), rules=rules[:1])


def test_a_folder_gives_config_and_tokenizer(made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "source"
    llama().save_pretrained(source)
    for name in ("tokenizer.json", "tokenizer_config.json", "secrets.txt"):
        (source / name).write_text("{}")
    main(["export", str(made / "bitdial.safetensors"), "--hf", str(tmp_path / "out"), "--model", str(source)])
    assert f"Saved {tmp_path / 'out'}" in capsys.readouterr().out
    names = {"config.json", "bitdial.safetensors", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}
    assert {p.name for p in (tmp_path / "out").iterdir()} == names
    assert torch.equal(logits(load_pretrained(tmp_path / "out")), logits(load_pretrained(made)))
    assert (
        read_artifact(tmp_path / "out" / "bitdial.safetensors").digest
        == read_artifact(made / "bitdial.safetensors").digest
    )


def test_generation_settings_come_along(folder: Path) -> None:
    (folder / "generation_config.json").write_text('{"max_new_tokens": 5, "eos_token_id": 2, "pad_token_id": 0}')
    assert load_pretrained(folder).generation_config.max_new_tokens == 5
    (folder / "generation_config.json").unlink()
    assert load_pretrained(folder).generation_config.eos_token_id == 2


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda f: (f / "config.json").unlink(), "cannot read .*config.json: No such file"),
        (lambda f: (f / "config.json").write_text("{"), "config.json is not a JSON file"),
        (lambda f: (f / "config.json").write_text("[]"), "config.json is not a JSON object"),
        (lambda f: (f / "generation_config.json").write_text("3"), "generation_config.json is not a JSON object"),
        (lambda f: (f / "bitdial.safetensors").unlink(), "there is no file .*bitdial.safetensors"),
        (lambda f: (f / "bitdial.safetensors").write_bytes((f / "bitdial.safetensors").read_bytes()[:-9]), "truncated"),
        (lambda f: change(f, quantization_config=None), r"no quantization_config of bitdial \(none\)"),
        (lambda f: change(f, quantization_config={"quant_method": "gptq"}), "that of 'gptq'"),
        (lambda f: change(f, quantization_config={"quant_method": "bitdial"}), "are they of two models"),
        (lambda f: change(f, model_type="mine"), "has no model_type 'mine'; if the model has code of its own"),
        (lambda f: change(f, model_type=None), "has no model_type None"),
        (lambda f: change(f, architectures=None), "no architecture None for model_type 'llama'"),
        (lambda f: change(f, architectures=["Trainer"]), r"no architecture \['Trainer'\] for model_type 'llama'"),
        (lambda f: change(f, architectures=["LlamaForSequenceClassification"]), "does not fit bitdial.safetensors"),
        (lambda f: change(f, model_type="gpt2", architectures=["GPT2LMHeadModel"]), "is it the architecture"),
        (lambda f: change(f, hidden_size=128), "does not fit bitdial.safetensors: layer .* shape is"),
        (lambda f: change(f, num_hidden_layers=3), "does not fit bitdial.safetensors: only the model has"),
        (lambda f: change(f, num_hidden_layers=10**9), "num_hidden_layers is more than the .* tensors"),
        (lambda f: change(f, vocab_size=10**12), "does not fit bitdial.safetensors: .*embed_tokens"),
        (lambda f: change(f, hidden_size="wide"), "transformers cannot build this model"),
        (lambda f: change(f, tie_word_embeddings=True), "only the file has the float tensor"),
    ],
)
def test_folders_that_do_not_fit(folder: Path, spoil: Callable[[Path], object], message: str) -> None:
    spoil(folder)
    with pytest.raises(ArtifactError, match=message):
        load_pretrained(folder)


def test_code_and_places_elsewhere_are_not_heeded(folder: Path, tmp_path: Path) -> None:
    wanted = logits(load_pretrained(folder))
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Evil: pass\n")
    elsewhere = {"auto_map": {"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil"}}
    change(folder, **elsewhere, _attn_implementation="someone/kernels", attn_implementation="someone/kernels")
    assert torch.equal(logits(load_pretrained(folder)), wanted)
    assert not (tmp_path / "ran").exists()


def test_what_cannot_be_exported(made: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="a Linear has no transformers config"):
        export_pretrained(made / "bitdial.safetensors", tmp_path, nn.Linear(2, 2))
    with pytest.raises(ExportError, match="has a quantization_config already"):
        export_pretrained(made / "bitdial.safetensors", tmp_path, made)
    with pytest.raises(ArtifactError, match=r"cannot read .*config.json"):
        export_pretrained(made / "bitdial.safetensors", tmp_path, tmp_path)
    with pytest.raises(ArtifactError, match="there is no folder"):
        load_pretrained(tmp_path / "nowhere")
    assert list(tmp_path.iterdir()) == []


def test_a_model_that_came_out_of_a_gguf_file(made: Path, tmp_path: Path) -> None:
    """transformers reads such a file as float weights, and its config goes on to say where they came from."""
    entry = {"quant_method": "gguf", "gguf_file": "model.Q4_1.gguf", "dequantize": False}
    float_model = llama()
    float_model.config.quantization_config = transformers.utils.quantization_config.GgufConfig(**entry)
    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_text(json.dumps({**json.loads(llama().config.to_json_string()), "architectures":
                                        ["LlamaForCausalLM"], "quantization_config": entry}))  # fmt: skip
    for like in (float_model, source):
        out = export_pretrained(made / "bitdial.safetensors", tmp_path / "out", like)
        settings = json.loads((out / "config.json").read_text())
        assert settings["quantization_config"]["quant_method"] == "bitdial"
        assert "gguf" not in (out / "config.json").read_text()
        assert torch.equal(logits(load_pretrained(out)), logits(load_pretrained(made)))
    for other in ({"quant_method": "gptq", "bits": 4}, {"bits": 4}, "gguf"):
        change(source, quantization_config=other)
        with pytest.raises(ExportError, match="has a quantization_config already"):
            export_pretrained(made / "bitdial.safetensors", tmp_path / "out", source)


def test_the_float_model_is_not_overwritten(made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    llama().save_pretrained(tmp_path)
    before = (tmp_path / "model.safetensors").read_bytes()
    command = ["export", str(made / "bitdial.safetensors"), "--hf", str(tmp_path), "--model", str(tmp_path)]
    assert main(command) == 1
    assert "whose weights would be lost" in capsys.readouterr().err
    assert (tmp_path / "model.safetensors").read_bytes() == before


def test_a_folder_of_another_model_is_refused_before_anything_is_written(made: Path, tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path / "source")
    settings = json.loads((tmp_path / "source" / "config.json").read_text())
    (tmp_path / "source" / "config.json").write_text(json.dumps(settings | {"num_hidden_layers": 1}))
    with pytest.raises(ArtifactError, match=r"source.config.json does not fit bitdial.safetensors"):
        export_pretrained(made / "bitdial.safetensors", tmp_path / "out", tmp_path / "source")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "words, message",
    [
        (["--hf", "OUT", "--model", "DIR", "--bits", "4"], "--bits is not for --hf"),
        (["--hf", "OUT", "--model", "DIR", "--opset", "21"], "--opset is not for --hf"),
        (["--onnx", "OUT", "--model", "DIR"], "--model is not for --onnx"),
    ],
)
def test_options_that_would_do_nothing(
    made: Path, tmp_path: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    places = {"OUT": str(tmp_path / "out"), "DIR": str(made)}
    assert main(["export", str(made / "bitdial.safetensors"), *(places.get(word, word) for word in words)]) == 1
    assert message in capsys.readouterr().err


def test_paths_of_this_machine_stay_here(tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path / "source")
    model = prepared(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "source"))
    save(model, tmp_path / "file.safetensors")
    out = export_pretrained(tmp_path / "file.safetensors", tmp_path / "out", model)
    assert all(str(tmp_path) not in p.read_text() for p in out.glob("*.json"))
    assert torch.equal(logits(load_pretrained(out)), logits(load(tmp_path / "file.safetensors", llama())))


def test_without_transformers_the_extra_is_named(made: Path) -> None:
    script = f"""
import sys
sys.modules["transformers"] = None
from bitdial import load_pretrained
try:
    load_pretrained({str(made)!r})
except ImportError as problem:
    print(problem)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "transformers is not installed; install it with: pip install 'bitdial[hf]'", done
