"""Tiny decoders of three families, with random weights and texts that do not repeat themselves."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bitdial import QuantConfig, prepare, save

SIZES = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "eos_token_id": 60}
IDS = torch.randint(3, 60, (8, 10), generator=torch.Generator().manual_seed(1))
GREEDY = {"do_sample": False, "pad_token_id": 0}


def decoder(family: str, **settings: Any) -> Any:
    transformers = pytest.importorskip("transformers", minversion="5")
    more = {"head_dim": 8} if family.startswith("Gemma") else {}
    config = getattr(transformers, f"{family}Config")(
        **{**SIZES, **more, "num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.3, **settings}
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return getattr(transformers, f"{family}ForCausalLM")(config).eval()


class Decoders:
    """Float models and their files, each made once."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._made: dict[Any, tuple[Any, Path]] = {}

    def __call__(self, family: str = "Llama", **config: Any) -> tuple[Any, Path]:
        """A float model of `family`, and the file of its integers at 8, 4 and 2 bits."""
        key = (family, *sorted(config.items()))
        if key not in self._made:
            model, path = decoder(family), self.folder / f"{len(self._made)}.safetensors"
            settings = {"activations": "float", "keep_first_last": False, "start": "max", **config}
            logging.disable(logging.WARNING)  # Gemma's embedding stays in float
            try:
                save(prepare(model, QuantConfig(bit_choices=(8, 4, 2), **settings), {"input_ids": IDS}), path)
            finally:
                logging.disable(logging.NOTSET)
            self._made[key] = model, path
        return self._made[key]


@pytest.fixture(scope="session")
def decoders(tmp_path_factory: pytest.TempPathFactory) -> Decoders:
    return Decoders(tmp_path_factory.mktemp("decoders"))


def both(live: nn.Module, fast: Any, ids: Tensor, **settings: Any) -> tuple[Any, Any]:
    """What plain and speculative decoding return, with the logits of each new token."""
    how = {"max_new_tokens": 12, **GREEDY, "return_dict_in_generate": True, "output_logits": True, **settings}
    generate: Any = live.generate
    return generate(ids, **how), fast.generate(ids, **how)


def same_bits(plain: Any, fast: Any) -> bool:
    """Whether texts, logits and caches are the same, bit for bit."""
    pairs = [(plain.sequences, fast.sequences), *zip(plain.logits, fast.logits, strict=True)]
    layers = zip(plain.past_key_values.layers, fast.past_key_values.layers, strict=True)
    pairs += [pair for a, b in layers for pair in ((a.keys, b.keys), (a.values, b.values))]
    return all(torch.equal(a, b) for a, b in pairs)
