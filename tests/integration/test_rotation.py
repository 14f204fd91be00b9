"""A rotated decoder through the whole path: prepared, trained, saved, loaded on the plain model, switched, exported."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bitdial import (
    JointStep,
    QuantConfig,
    TrainConfig,
    code_exact,
    export_pretrained,
    load,
    load_pretrained,
    load_trainable,
    prepare,
    read_artifact,
    rotate,
    save,
    set_bits,
)  # fmt: skip
from bitdial.cli import main

transformers = pytest.importorskip("transformers", minversion="5")

IDS = torch.randint(3, 96, (2, 9), generator=torch.Generator().manual_seed(0))
WIDTHS = (8, 4, 2)


def llama(**settings: Any) -> Any:
    sizes = {
        "hidden_size": 96, "num_hidden_layers": 2, "intermediate_size": 128, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 96, "max_position_embeddings": 64,
    }  # fmt: skip
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**sizes, **tokens, **settings})).eval()


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(input_ids=IDS, use_cache=False).logits


def loss(out: Any, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(out.logits.flatten(0, 1), target.flatten())


def prepared(model: nn.Module, **settings: Any) -> nn.Module:
    """Prepared, and trained for a step."""
    config = QuantConfig(bit_choices=WIDTHS, start="max", **settings)
    ready = prepare(model, config, {"input_ids": IDS})
    JointStep(ready, TrainConfig(epochs=1, lr=1e-3), steps_per_epoch=1, loss=loss)({"input_ids": IDS}, IDS)
    return ready.eval()


@pytest.mark.parametrize("ends", ["apart", "tied", "untied", "online"])
@pytest.mark.parametrize("activations", ["float", "auto", "dynamic"])
def test_the_whole_path(tmp_path: Path, ends: str, activations: str, capsys: pytest.CaptureFixture[str]) -> None:
    plain = llama(tie_word_embeddings=ends != "apart")
    rotated = rotate(plain, untie=ends == "untied", residual="online" if ends == "online" else "merged")
    model = prepared(rotated, activations=activations, group_size=32)
    path = tmp_path / "model.safetensors"
    save(model, path)
    entry = read_artifact(path).manifest["rotation"]
    assert len(entry["online"]) == {"apart": 2, "tied": 4, "untied": 2, "online": 6}[ends]
    assert entry["untied"] == (["lm_head"] if ends == "untied" else [])
    assert main(["inspect", str(path)]) == 0
    merged = "values" if ends == "online" else "residual, values"
    assert f"  {merged} in the weights, {len(entry['online'])} modules online" in capsys.readouterr().out
    trainable = load_trainable(path, plain)
    save(trainable, tmp_path / "again")
    assert read_artifact(tmp_path / "again").manifest["rotation"] == entry
    from_plain = load_pretrained(export_pretrained(path, tmp_path / "a", plain))
    from_rotated = load_pretrained(export_pretrained(path, tmp_path / "b", model))
    lives = [load(path, plain), load(path, rotated), load(tmp_path / "again", plain), from_plain, from_rotated]
    exact = {}
    for bits in WIDTHS:
        set_bits(model, bits)
        for live in lives:
            set_bits(live, bits)
            assert torch.equal(logits(live), logits(model))
        if activations != "float":
            exact[bits] = logits(code_exact(lives[0]))
    assert lives[3].generate(input_ids=IDS, max_new_tokens=2, do_sample=False).shape[1] > IDS.shape[1]
    if activations != "float":
        integer = load(path, plain, kernels="integer")
        for bits in WIDTHS:
            set_bits(integer, bits)
            assert torch.equal(logits(integer), exact[bits])


def test_in_16_bits_and_on_packed_words(tmp_path: Path) -> None:
    plain = llama(tie_word_embeddings=True)
    model = prepared(rotate(plain), activations="float", scheme="nested")
    save(model, tmp_path / "m")
    for kernels in ("float", "packed"):
        live = load(tmp_path / "m", plain, dtype=torch.bfloat16, kernels=kernels)
        assert live.model.embed_tokens.rotation.signs.dtype == torch.float32
        for bits in (8, 4):
            set_bits(live, bits)
            set_bits(model, bits)
            difference = (logits(live).float() - logits(model)).norm() / logits(model).norm()
            assert float(difference) < 0.03
