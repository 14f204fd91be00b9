"""Folders for vLLM: the words decoded by hand and by the format's own library give our weights, bit for bit."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from bitdial import QuantConfig, Rule, load, prepare, save, set_bits
from bitdial.cli import main
from bitdial.errors import ExportError
from bitdial.export.compressed_tensors import export_compressed_tensors, pack_words
from bitdial.live.layers import LiveLayer

transformers = pytest.importorskip("transformers", minversion="5")
pytestmark = pytest.mark.filterwarnings("ignore:.*stay in float:UserWarning")
TOKENS = torch.arange(12).reshape(2, 6)


def llama() -> nn.Module:
    sizes = {"hidden_size": 48, "num_hidden_layers": 1, "intermediate_size": 64, "num_attention_heads": 2,
             "num_key_value_heads": 1, "vocab_size": 40, "tie_word_embeddings": True}  # fmt: skip
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **tokens)).eval()


def written(place: Path, **settings: Any) -> tuple[Path, nn.Module]:
    """An artifact of a tiny Llama beside its float folder, and the live model."""
    model = llama()
    model.save_pretrained(place / "float")  # type: ignore[operator]
    usual = {"bit_choices": (8, 4, 2), "activations": "float", "keep_first_last": False, "start": "max"}
    save(prepare(model, QuantConfig(**(usual | settings)), {"input_ids": TOKENS}), place / "model.safetensors")
    return place / "model.safetensors", load(place / "model.safetensors", model)


def unpacked(words: Tensor, bits: int, shape: list[int]) -> Tensor:
    """Codes from words, bit by bit in plain Python."""
    rows = []
    for row in words.tolist():
        number = sum((word & 0xFFFFFFFF) << (32 * place) for place, word in enumerate(row))
        rows.append([((number >> (bits * i)) & ((1 << bits) - 1)) - (1 << (bits - 1)) for i in range(shape[1])])
    return torch.tensor(rows, dtype=torch.int8)


@pytest.mark.parametrize("bits", [8, 4])
def test_words_hold_every_code(bits: int) -> None:
    codes = torch.arange(-(1 << (bits - 1)), 1 << (bits - 1)).to(torch.int8)
    table = torch.stack([codes.roll(shift) for shift in range(9)])[:, : -3 if bits == 8 else None]
    words = pack_words(table, bits)
    assert words.dtype == torch.int32
    assert words.shape == (9, -(-table.shape[1] * bits // 32))
    assert torch.equal(unpacked(words, bits, [*table.shape]), table)


@pytest.mark.parametrize("settings", [{"group_size": 16}, {}, {"group_size": 16, "group_scales": "float"}])
def test_decoded_weights_are_ours_bit_for_bit(tmp_path: Path, settings: dict[str, Any]) -> None:
    path, live = written(tmp_path, **settings)
    layers = {name: layer for name, layer in live.named_modules() if isinstance(layer, LiveLayer)}
    for bits in (8, 4):
        done = export_compressed_tensors(path, tmp_path / f"out-{bits}", tmp_path / "float", bits=bits)
        set_bits(live, bits)
        tensors = load_file(done.folder / "model.safetensors")
        for name, layer in layers.items():
            shape = tensors.pop(f"{name}.weight_shape").tolist()
            codes = unpacked(tensors.pop(f"{name}.weight_packed"), bits, shape)
            scale = tensors.pop(f"{name}.weight_scale")
            value = (codes.float().unflatten(1, (scale.shape[1], -1)) * scale[:, :, None]).flatten(1)
            assert torch.equal(value, layer.engine.active), name
        plain = {name: t for name, t in llama().state_dict().items() if name.removesuffix(".weight") not in layers}
        plain.pop("lm_head.weight")  # tied
        assert tensors.keys() == plain.keys()
        assert all(torch.equal(tensors[name], plain[name]) for name in plain)
        described = json.loads((done.folder / "config.json").read_text())["quantization_config"]
        (group,) = described["config_groups"].values()
        assert group["weights"]["num_bits"] == bits
        assert group["weights"]["group_size"] == settings.get("group_size")
        assert (group["targets"], described["ignore"]) == (["Linear"], ["lm_head"])


@pytest.mark.filterwarnings("ignore")  # of the library
def test_its_own_library_decodes_our_weights(tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import PackedQuantizationCompressor
    from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme

    path, live = written(tmp_path, group_size=16)
    for bits in (8, 4):
        done = export_compressed_tensors(path, tmp_path / f"out-{bits}", tmp_path / "float", bits=bits)
        described = json.loads((done.folder / "config.json").read_text())["quantization_config"]
        (group,) = QuantizationConfig.model_validate(described).config_groups.values()
        assert isinstance(group, QuantizationScheme)
        tensors = load_file(done.folder / "model.safetensors")
        set_bits(live, bits)
        for name, layer in live.named_modules():
            if isinstance(layer, LiveLayer):
                parts = {key: tensors[f"{name}.{key}"] for key in ("weight_packed", "weight_scale", "weight_shape")}
                decoded = PackedQuantizationCompressor.decompress(parts, group)["weight"]
                assert torch.equal(decoded, layer.engine.active), name
        loaded = transformers.AutoModelForCausalLM.from_pretrained(done.folder, dtype=torch.float32)
        with torch.no_grad():
            torch.testing.assert_close(loaded(TOKENS).logits, live(TOKENS).logits)


def test_a_layer_with_a_width_of_its_own_is_in_a_group_of_its_own(tmp_path: Path) -> None:
    path, _ = written(tmp_path, group_size=16, rules=(Rule(pattern="*.down_proj", bits=8),))
    done = export_compressed_tensors(path, tmp_path / "out", tmp_path / "float", bits=4)
    assert done.layers[8, 16] == ["model.layers.0.mlp.down_proj"]
    described = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    by_bits = {group["weights"]["num_bits"]: group["targets"] for group in described["config_groups"].values()}
    assert by_bits == {bits: names for (bits, _), names in done.layers.items()}


def test_what_the_format_cannot_say_is_refused(tmp_path: Path) -> None:
    cases: list[tuple[dict[str, Any], int, str]] = [
        ({"scheme": "nested"}, 4, "layer 'model.layers.0.self_attn.q_proj': values of scheme 'nested' at 4 bits"),
        ({"scheme": "centred"}, 8, "lie between the integers"),
        ({"activations": "signed"}, 8, "quantises its input"),
        ({}, 2, "is at 2 bits; compressed-tensors folders are for 8 or 4 bits"),
        ({"rules": (Rule(type="Embedding", quantize=True),)}, 8, "is of kind Embedding"),
    ]
    for number, (settings, bits, said) in enumerate(cases):
        path, _ = written(tmp_path / str(number), **settings)
        with pytest.raises(ExportError, match=said):
            export_compressed_tensors(path, tmp_path / "out", path.parent / "float", bits=bits)
        assert not (tmp_path / "out").exists()
    for folder in (path.parent, path.parent / "float"):
        with pytest.raises(ExportError, match="would be lost"):
            export_compressed_tensors(path, folder, path.parent / "float", bits=8)
    export_compressed_tensors(written(tmp_path / "n", scheme="nested")[0], tmp_path / "o", tmp_path / "n/float", bits=8)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, _ = written(tmp_path, group_size=16)
    words = ["export", str(path), "--compressed-tensors", str(tmp_path / "out")]
    assert main([*words, "--model", str(tmp_path / "float"), "--bits", "4"]) == 0
    assert "nothing rounded; layers: 7 x 4 bits" in capsys.readouterr().out
    for more, said in (
        (["--bits", "4"], "--compressed-tensors needs --model DIR"),
        (["--model", str(tmp_path / "float")], "needs --bits 8 or --bits 4"),
        (
            ["--model", str(tmp_path / "float"), "--bits", "4", "--opset", "21"],
            "--opset is not for --compressed-tensors",
        ),
    ):
        assert main([*words, *more]) == 1
        assert said in capsys.readouterr().err
