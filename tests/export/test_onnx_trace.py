"""Models of transformers as ONNX files: caches, masks, lengths that are free, several outputs."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from torch import Tensor, nn

from bitdial import export_onnx, set_bits
from bitdial.errors import ExportError

from .conftest import check_against, session

transformers = pytest.importorskip("transformers", minversion="5")

SIZES = {
    "hidden_size": 32, "num_hidden_layers": 1, "intermediate_size": 48, "num_attention_heads": 4, "vocab_size": 96,
    "max_position_embeddings": 40,
}  # fmt: skip
FREE = {"input_ids": {1: "sequence"}, "attention_mask": {1: "sequence"}}


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return make().eval()


def text(count: int, length: int, *, padded: bool) -> dict[str, Tensor]:
    ids = torch.randint(3, 96, (count, length), generator=torch.Generator().manual_seed(length))
    mask = torch.ones_like(ids)
    if padded:
        mask[-1, length // 2 :] = 0
    return {"input_ids": ids, "attention_mask": mask}


# torch.export of 2.11 does not see that min(8 n, 16 n) is 8 n for all lengths n, and refuses a free length.
grouped = pytest.mark.skipif(tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13), reason="torch before 2.13")


@pytest.mark.parametrize("key_heads", [4, pytest.param(2, marks=grouped)])
def test_a_decoder_goes_without_its_cache(
    make_live: Callable[..., nn.Module], tmp_path: Path, caplog: pytest.LogCaptureFixture, key_heads: int
) -> None:
    config = transformers.LlamaConfig(**SIZES, num_key_value_heads=key_heads)
    live: Any = make_live(seeded(lambda: transformers.LlamaForCausalLM(config)), text(4, 9, padded=False))
    # The sample is one text without padding: other counts, lengths and masks must go all the same.
    path = export_onnx(live, tmp_path / "m.onnx", text(1, 9, padded=False), bits=4, dynamic_axes=FREE).path
    (said,) = [r.getMessage() for r in caplog.records if r.name == "bitdial.export.onnx" and r.levelno >= logging.INFO]
    assert said == f"{path}: left out, for a file gives tensors and keeps no cache: past_key_values (DynamicCache)"
    assert live.config.use_cache, "the model keeps its config"
    assert live(**text(1, 9, padded=False)).past_key_values is not None
    file = session(path)
    assert [(i.name, i.shape) for i in file.get_inputs()] == [
        ("input_ids", ["batch", "sequence"]),
        ("attention_mask", ["batch", "sequence"]),
    ]
    assert [(o.name, o.shape) for o in file.get_outputs()] == [("logits", ["batch", "sequence", 96])]
    set_bits(live, 4)
    for batch in (text(1, 9, padded=False), text(3, 14, padded=True), text(1, 1, padded=False)):
        assert check_against(path, live, batch) == 0
    names = {tensor.name for tensor in onnx.load(path).graph.initializer}
    assert {"model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight_codes"} <= names


def test_a_length_that_the_model_bounds(make_live: Callable[..., nn.Module], tmp_path: Path) -> None:
    """BERT has 40 positions: the range is asked for, not guessed."""
    sample = text(2, 9, padded=False)
    live = make_live(seeded(lambda: transformers.BertModel(transformers.BertConfig(**SIZES))), sample)
    way = r"'sequence'; torch.export finds: sequence = Dim\('sequence', max=40\)\.\nFix .* or give the range: "
    with pytest.raises(ExportError, match=way + r"dynamic_axes={'input_ids': {1: torch.export.Dim\('sequence', max=40"):
        export_onnx(live, tmp_path / "m.onnx", sample, dynamic_axes=FREE)
    axes = {"input_ids": {1: torch.export.Dim("sequence", max=40)}, "attention_mask": {1: "sequence"}}
    sample["output_hidden_states"] = True  # type: ignore[assignment]  # a setting, fixed in the file
    path = export_onnx(live, tmp_path / "m.onnx", sample, bits=3, dynamic_axes=axes).path
    names = ["last_hidden_state", "pooler_output", *(f"hidden_states_{i}" for i in range(2))]
    assert [o.name for o in session(path).get_outputs()] == names
    set_bits(live, 3)
    for batch in (text(3, 40, padded=True), text(1, 5, padded=True)):
        check_against(path, live, batch)
