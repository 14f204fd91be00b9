"""`from_pretrained` on folders of bitdial: the model of `load_pretrained`, refused for the same reasons."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from bitdial import BitPlan, Rule, get_bits, load_pretrained, rotate, set_bits
from bitdial.errors import ArtifactError, BitdialError, ConfigError, PlanError
from bitdial.export.transformers_quantizer import one_device, register

from .tiny_models import change, folder_of, logits, tiny

transformers = pytest.importorskip("transformers", minversion="5")
pytest.importorskip("accelerate")


def read(folder: Path, **options: Any) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, **options)


def widths(model: Any) -> set[tuple[int, int]]:
    return set(get_bits(model).values())


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of the nested llama, with a stored plan."""
    plan = BitPlan({"model.layers.0.mlp.up_proj": 3}, default=4)
    return folder_of(tiny(), tmp_path_factory.mktemp("llama"), plans={"3.9 bits": plan})


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    """A copy of it to spoil."""
    return Path(shutil.copytree(made, tmp_path / "folder"))


# --- what works -----------------------------------------------------------------------------------


def test_it_is_the_model_of_load_pretrained(tmp_path: Path) -> None:
    ends = (Rule(type="Embedding", bits=8), Rule(pattern="lm_head", bits=8, activations="float"))
    cases = {
        "llama": (tiny(), {}),
        "tied": (tiny(tie_word_embeddings=True), {"scheme": "double_rounding"}),
        "qwen": (tiny("Qwen2"), {"activations": "auto"}),
        "gemma": (tiny("Gemma"), {"group_size": 32}),
        "embedding": (tiny(tie_word_embeddings=True), {"rules": ends, "group_size": 32}),
        "rotated": (rotate(tiny(intermediate_size=128)), {"activations": "dynamic"}),
    }
    for name, (model, settings) in cases.items():
        folder = folder_of(model, tmp_path / name, **settings)
        live, known = read(folder, local_files_only=True), load_pretrained(folder)
        assert type(live) is type(known) is type(tiny({"qwen": "Qwen2", "gemma": "Gemma"}.get(name, "Llama")))
        assert not live.training
        assert not any(p.requires_grad or p.is_meta for p in live.parameters())
        if name != "embedding":
            assert (live.lm_head.weight is live.model.embed_tokens.weight) == (name in ("tied", "gemma"))
        assert get_bits(live) == get_bits(known), "the highest width"
        for bits in (8, 3):
            set_bits(live, bits)
            set_bits(known, bits)
            assert torch.equal(logits(live), logits(known)), name
        assert list(live.state_dict()) == list(known.state_dict())
        assert live.generation_config.to_dict() == known.generation_config.to_dict()
        place = {"_name_or_path": ""}  # transformers' own remembers it
        assert live.config.to_dict() | place == known.config.to_dict() | place


def test_the_width_to_begin_with(made: Path) -> None:
    assert widths(read(made)) == {(8, 8)}
    assert widths(read(made, bits=4)) == {(4, 4)}
    live = transformers.LlamaForCausalLM.from_pretrained(made, bits="3.9 bits")
    assert widths(live) == {(3, 3), (4, 4)}
    assert not hasattr(live.config, "bits")
    assert not hasattr(live.config, "transformers_weights")
    plan = BitPlan({"model.layers.1.mlp.up_proj": 2}, default=3).to_dict()
    assert widths(read(made, bits=plan)) == {(2, 2), (3, 3)}
    with pytest.raises(PlanError, match="bits=5 is not in bit_choices"):
        read(made, bits=5)


def test_16_bits(made: Path, tmp_path: Path) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        live = read(made, dtype=dtype)
        assert live.dtype == live.config.dtype == dtype
        assert torch.equal(logits(live), logits(load_pretrained(made, dtype=dtype)))
    assert read(made).dtype == torch.float32
    own = folder_of(tiny(dtype="bfloat16").float(), tmp_path / "own")
    assert read(own).dtype == torch.bfloat16, "the config's"
    assert read(own, dtype=torch.float32).dtype == torch.float32
    assert read(own).model.rotary_emb.inv_freq.dtype == torch.float32
    quantised = folder_of(tiny(dtype="bfloat16").float(), tmp_path / "quantised", activations="auto")
    assert json.loads((quantised / "config.json").read_text())["dtype"] == "float32", "what it runs in"
    assert read(quantised).dtype == torch.float32
    for each, dtype, message in (
        (quantised, torch.bfloat16, "dtype=torch.bfloat16 is for weight-only models, but layer .* quantises"),
        (made, torch.float64, "dtype=torch.float64 is not supported"),
    ):
        with pytest.raises(ConfigError, match=message):
            read(each, dtype=dtype)


def test_devices(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = "cuda" if torch.cuda.is_available() else "cpu"
    assert read(made, device_map="auto").device.type == first
    for place in ("cpu", {"": "cpu"}, {"model": "cpu", "lm_head": torch.device("cpu")}):
        assert read(made, device_map=place).device.type == "cpu"
    with pytest.raises(ConfigError, match="device='here' is not a device"):
        read(made, device_map={"": "here"})
    for place in ({"model": "cpu", "lm_head": "disk"}, {"model": 0, "lm_head": 1}, {"": "disk"}):
        with pytest.raises(ConfigError, match="a live one is on one device"):
            read(made, device_map=place)
    with pytest.raises(ConfigError, match="finds no GPU here" if not torch.cuda.is_available() else "GPUs here"):
        read(made, device_map={"": 99})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert one_device("auto") == torch.device("cuda")
    assert one_device({"model": 1, "lm_head": "cuda:1"}) == torch.device("cuda:1")
    for several in ("balanced", "balanced_low_0"):
        with pytest.raises(ConfigError, match="is on one device"):
            one_device(several)


def test_folders_of_earlier_versions(folder: Path) -> None:
    """The artifact was model.safetensors, and the config had nothing about it but quantization_config."""
    wanted = logits(load_pretrained(folder))
    (folder / "bitdial.safetensors").rename(folder / "model.safetensors")
    change(folder, transformers_weights=None, bits=None, dtype=None)
    for live in (load_pretrained(folder), read(folder)):
        assert torch.equal(logits(live), wanted)
    change(folder, dtype="bfloat16")
    assert read(folder).dtype == torch.bfloat16


# --- what is refused ------------------------------------------------------------------------------


@pytest.fixture
def unregistered() -> Iterator[None]:
    """transformers as it is without bitdial."""
    from transformers.quantizers import auto

    for mapping in (auto.AUTO_QUANTIZER_MAPPING, auto.AUTO_QUANTIZATION_CONFIG_MAPPING):
        del mapping["bitdial"]
    yield
    register()


@pytest.mark.usefixtures("unregistered")
def test_without_bitdial_transformers_refuses_the_folder(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"pip install 'bitdial\[hf\]'\) and `import bitdial` before from_pretrained"):
        read(folder)
    change(folder, transformers_weights=None)  # as transformers does when it saves a config
    with pytest.raises(OSError, match=r"no file named model.safetensors"):
        read(folder)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda f: (f / "bitdial.safetensors").unlink(), "there is no file .*bitdial.safetensors"),
        (lambda f: (f / "bitdial.safetensors").write_bytes((f / "bitdial.safetensors").read_bytes()[:-9]), "truncated"),
        (lambda f: flip(f / "bitdial.safetensors"), "does not match its digest"),
        (lambda f: change(f, quantization_config={"quant_method": "bitdial"}), "are they of two models"),
        (lambda f: change(f, quantization_config={"quant_method": "bitdial", "to_dict": 3}), "are they of two models"),
        (lambda f: change(f, quantization_config={"quant_method": "bitdial", "self": 3}), "are they of two models"),
        (lambda f: change(f, hidden_size=128), "does not fit bitdial.safetensors: layer .* shape is"),
        (lambda f: change(f, num_hidden_layers=3), "does not fit bitdial.safetensors: only the model has"),
        (lambda f: change(f, num_hidden_layers=10**9), "num_hidden_layers is 1000000000"),
        (lambda f: change(f, vocab_size=10**12), "does not fit bitdial.safetensors: .*embed_tokens"),
        (lambda f: change(f, tie_word_embeddings=True), "only the file has the float tensor"),
        (lambda f: change(f, transformers_weights="../../elsewhere.safetensors", vocab_size=5), "does not fit bitdial"),
        (lambda f: change(f, bits="all"), "'all' is not a bit-width"),
        (lambda f: change(f, bits={"layers": 3}), "a stored plan needs exactly"),
        (lambda f: change(f, bits=[8, 8, 8]), "is not a bit-width"),
        (lambda f: change(f, bits=7), "bits=7 is not in bit_choices"),
    ],
)
def test_folders_that_do_not_fit(folder: Path, spoil: Callable[[Path], object], message: str) -> None:
    spoil(folder)
    with pytest.raises(BitdialError, match=message):
        read(folder)
    if "num_hidden" not in message:
        with pytest.raises(BitdialError, match=message):
            load_pretrained(folder)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))


def test_what_else_is_refused(made: Path, tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="does not fit"):
        transformers.AutoModel.from_pretrained(made)  # without its head
    config = transformers.AutoConfig.from_pretrained(made)
    config.distributed_config = {"tp_size": 2}
    with pytest.raises(ConfigError, match="is on one device; leave out distributed_config"):
        read(made, config=config)
    config.distributed_config = None
    with pytest.raises(ConfigError, match="give the folder, and no state_dict"):
        transformers.LlamaForCausalLM.from_pretrained(None, config=config, state_dict={})
    tiny().save_pretrained(tmp_path / "float")
    with pytest.raises(ValueError, match="bitdial does require the model to be pre-quantized"):
        read(tmp_path / "float", quantization_config={"quant_method": "bitdial"})
