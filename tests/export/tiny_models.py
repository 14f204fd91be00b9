"""Small language models of transformers, prepared and written as folders."""

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bitdial import QuantConfig, export_pretrained, prepare, save

WIDTHS = (8, 4, 3, 2)
IDS = torch.randint(3, 96, (2, 9), generator=torch.Generator().manual_seed(0))
SIZES = {
    "hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 96, "num_attention_heads": 4, "vocab_size": 96,
    "max_position_embeddings": 64, "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def tiny(kind: str = "Llama", **settings: Any) -> nn.Module:
    """A model with random weights: Llama, Qwen2 or Gemma."""
    import transformers

    own = {"head_dim": 16} if kind == "Gemma" else {}
    config = getattr(transformers, f"{kind}Config")(**{**SIZES, **own, **settings})
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model: nn.Module = getattr(transformers, f"{kind}ForCausalLM")(config)
    return model.eval()


def folder_of(model: nn.Module, place: Path, *, plans: Any = None, **settings: Any) -> Path:
    """`model`, prepared and exported to `place / "folder"`."""
    usual = {"activations": "float", "start": "3std", "scheme": "nested", "bit_choices": WIDTHS}
    prepared = prepare(model, QuantConfig(**(usual | settings)), {"input_ids": IDS}).eval()
    place.mkdir(exist_ok=True)
    save(prepared, place / "file.safetensors", plans=plans or {})
    return export_pretrained(place / "file.safetensors", place / "folder", prepared)


def logits(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=IDS).logits
    return found


def change(folder: Path, **settings: Any) -> None:
    """Spoil the config in `folder`; None takes an entry out."""
    path = folder / "config.json"
    found = {**json.loads(path.read_text()), **settings}
    path.write_text(json.dumps({key: value for key, value in found.items() if value is not None}))
