"""Live models in transformers' hands: saved, generating, in pipelines and threads, and not trained."""

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from bitdial import (
    BitPlan,
    export_pretrained,
    get_bits,
    load_pretrained,
    read_artifact,
    resident_bytes,
    set_bits,
    view_at_bits,
)
from bitdial.errors import ArtifactError, ConfigError, ExportError

from ..language.made_up import save_tokenizer
from .tiny_models import IDS, WIDTHS, folder_of, logits, tiny

transformers = pytest.importorskip("transformers", minversion="5")

PLAN = BitPlan({"model.layers.0.mlp.up_proj": 3}, default=4)


def read(folder: Path, **options: Any) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, **options)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of the nested llama, with a stored plan, and weights large enough for widths to differ."""
    model = tiny()
    for part in model.parameters():
        part.data *= 5
    return folder_of(model, tmp_path_factory.mktemp("llama"), plans={"mixed": PLAN})


def generated(model: Any, **options: Any) -> list[list[int]]:
    plain = {"attention_mask": torch.ones_like(IDS), "min_new_tokens": 12, "max_new_tokens": 12, "do_sample": False}
    out = model.generate(input_ids=IDS, **plain, **options)
    tokens: list[list[int]] = out[:, IDS.shape[1] :].tolist()
    return tokens


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


# --- saving ---------------------------------------------------------------------------------------


def test_what_is_saved_is_what_was_read(made: Path, tmp_path: Path) -> None:
    for name, live in (("auto", read(made)), ("own", load_pretrained(made)), ("16", read(made, dtype=torch.bfloat16))):
        live.save_pretrained(tmp_path / name, max_shard_size="1KB", safe_serialization=True)
        saved = files(tmp_path / name)
        if name == "16":
            assert json.loads(saved.pop("config.json"))["dtype"] == "bfloat16"
            assert load_pretrained(tmp_path / name).dtype == torch.bfloat16
        assert saved == {file: content for file, content in files(made).items() if file in saved}
        assert len(saved) == 3 - (name == "16")


def test_a_folder_is_read_at_what_the_model_was_set_to(made: Path, tmp_path: Path) -> None:
    live = read(made)
    for setting, stored in (
        (3, 3),
        ("mixed", "mixed"),
        (PLAN, "mixed"),
        (BitPlan({"model.layers.1.mlp.up_proj": 2}, default=8), None),
        (8, 8),
    ):
        set_bits(live, setting)
        live.save_pretrained(tmp_path / "saved")  # over what is there
        found = json.loads((tmp_path / "saved" / "config.json").read_text())["bits"]
        assert found == (stored or get_bits(live).to_dict())
        for again in (read(tmp_path / "saved"), load_pretrained(tmp_path / "saved")):
            assert get_bits(again) == get_bits(live)
            assert torch.equal(logits(again), logits(live))
    fewer = load_pretrained(made, kernels="packed", bit_choices=(4, 2), dtype=torch.bfloat16)
    set_bits(fewer, 2)
    fewer.save_pretrained(tmp_path / "saved")
    assert set(get_bits(load_pretrained(tmp_path / "saved")).values()) == {(2, 2)}
    assert read_artifact(tmp_path / "saved" / "bitdial.safetensors").bit_choices == WIDTHS, "the whole file"


def test_a_view_saves_its_own_width_and_a_folder_saves_over_itself(made: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(made, tmp_path / "folder"))
    live = read(folder)
    view_at_bits(live, 2).save_pretrained(folder)
    assert set(get_bits(load_pretrained(folder)).values()) == {(2, 2)}
    live.save_pretrained(folder)
    assert files(folder) == files(made)
    assert export_pretrained(made / "bitdial.safetensors", tmp_path / "again", live) == tmp_path / "again"
    assert files(tmp_path / "again") == files(made)


def test_what_is_not_saved(made: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(made, tmp_path / "folder"))
    live = read(folder)
    live.save_pretrained(tmp_path / "out", is_main_process=False)
    for refused in ({"push_to_hub": True}, {"variant": "fp16"}, {"state_dict": {"a": 1}}):
        with pytest.raises(ConfigError, match=rf"save_pretrained\({next(iter(refused))}=...\) is not for live models"):
            live.save_pretrained(tmp_path / "out", **refused)
    with pytest.raises(ConfigError, match="call its own save_pretrained"):
        transformers.PreTrainedModel.save_pretrained(live, tmp_path / "class")
    shutil.copyfile(folder_of(tiny(), tmp_path / "other") / "bitdial.safetensors", folder / "bitdial.safetensors")
    with pytest.raises(ArtifactError, match="is gone or another one; save_pretrained needs it"):
        live.save_pretrained(tmp_path / "out")
    (folder / "bitdial.safetensors").unlink()
    with pytest.raises(ArtifactError, match="is gone or another one: there is no file"):
        live.save_pretrained(tmp_path / "out")
    assert not (tmp_path / "out").exists()
    with pytest.raises(ExportError, match="has a quantization_config already"):
        export_pretrained(made / "bitdial.safetensors", tmp_path / "out", made)


# --- running --------------------------------------------------------------------------------------


@pytest.mark.usefixtures("fresh_compiler")
def test_generate_with_a_static_cache_and_compiled(made: Path) -> None:
    live = read(made)
    options = transformers.CompileConfig(backend="eager", mode=None, dynamic=False)
    options._compile_all_devices = True  # transformers compiles on GPUs alone by itself
    found = {}
    for bits in (8, 2):
        set_bits(live, bits)
        found[bits] = generated(live)
        assert generated(live, cache_implementation="static") == found[bits]
        assert not hasattr(live, "_compiled_call") or bits == 2
        assert generated(live, cache_implementation="static", compile_config=options) == found[bits]
        assert hasattr(live, "_compiled_call"), "it was compiled"
    assert found[8] != found[2], "or the dial would not matter"


def test_pipelines(made: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(made, tmp_path / "folder"))
    save_tokenizer(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    texts = []
    for model, options in ((read(folder, bits=4), {}), (str(folder), {"model_kwargs": {"bits": 4}})):
        pipe = transformers.pipeline("text-generation", model, tokenizer=tokenizer, device="cpu", **options)
        assert set(get_bits(pipe.model).values()) == {(4, 4)}
        texts.append(pipe("the cat sat on", max_new_tokens=4, do_sample=False)[0]["generated_text"])
    assert texts[0] == texts[1]
    assert texts[0].startswith("the cat sat on")


def test_widths_in_threads(made: Path) -> None:
    """Each thread has a view of its own; nobody waits for the dial, and nobody's width is another's."""
    live = read(made)
    alone = {}
    for bits in WIDTHS:
        set_bits(live, bits)
        alone[bits] = generated(live)
    assert len({str(tokens) for tokens in alone.values()}) == len(WIDTHS)
    set_bits(live, 8)
    views = {bits: view_at_bits(live, bits) for bits in WIDTHS}
    with ThreadPoolExecutor(len(WIDTHS)) as threads:
        runs = [(bits, threads.submit(generated, views[bits])) for _ in range(3) for bits in WIDTHS]
        assert all(run.result() == alone[bits] for bits, run in runs)
    assert set(get_bits(live).values()) == {(8, 8)}


def test_the_memory_of_views(made: Path) -> None:
    """Float kernels: the weights in use are each view's own. Packed ones, of codes that are prefixes: nothing is."""
    for kernels, own in (("float", len(WIDTHS) + 1), ("packed", 1)):
        live = load_pretrained(made, kernels=kernels, dtype=torch.bfloat16)
        one = resident_bytes(live)
        together = resident_bytes(nn.ModuleList([live, *(view_at_bits(live, bits) for bits in WIDTHS)]))
        assert together == one | {"active": own * one["active"]}
        assert one["active"] > 0


def test_a_trainer_refuses_it(made: Path, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    for live in (read(made), load_pretrained(made)):
        assert not live.hf_quantizer.is_trainable
        with pytest.raises(ValueError, match="cannot perform fine-tuning on purely quantized models"):
            transformers.Trainer(live, transformers.TrainingArguments(tmp_path / "out", use_cpu=True, report_to=[]))
