"""Bits by layer of a language model within the bytes of a uniform width, found by measuring on a text."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bitdial.artifact import Artifact
from bitdial.errors import ConfigError
from bitdial.live.load import load, load_trainable
from bitdial.live.shared_inputs import shared_inputs
from bitdial.planning import MeasuredSearch, measured_search
from bitdial.planning.cost import Costs, measure_costs
from bitdial.recipes.language_model import LanguageModel
from bitdial.train.perplexity import CHARACTERS_PER_TOKEN, read_text, token_rows

EVERY = 4  # of so many tokens the logits of one are compared: neighbours say much the same
TOKENS_TO_COUNT = 8


def thinned(output: Any) -> Tensor:
    """Some of the logits that a model of transformers gives, (tokens, words)."""
    logits: Tensor = output.logits
    return logits[:, EVERY - 1 :: EVERY].flatten(0, 1)


def first_rows(path: Path, tokenizer: Any, *, rows: int, length: int) -> Tensor:
    """The first rows of `length` tokens of the text at `path`."""
    if length < EVERY:
        raise ConfigError(f"rows of {length} tokens are too short: one in {EVERY} tokens is looked at")
    found = token_rows(read_text(path)[: CHARACTERS_PER_TOKEN * rows * length], tokenizer, length=length)[:rows]
    if len(found) < rows:
        raise ConfigError(f"{path} has {len(found)} rows of {length} tokens; give more text, or fewer rows than {rows}")
    return found


def find_llm_plan(
    artifact: Artifact,
    language: LanguageModel,
    rows: Tensor,
    *,
    bits: int,
    device: str = "cpu",
    seconds: float | None = None,
    progress: bool = True,
) -> tuple[MeasuredSearch, Costs]:
    """The plan in as many bytes as uniform `bits` whose next tokens are nearest to the float model's; what plans cost.

    Layers that read the same input, as q, k and v, share a width, so that packed kernels can still join their products.
    """
    if bits not in artifact.bit_choices:
        raise ConfigError(f"the file has no {bits} bits, whose bytes are the budget; it has {artifact.bit_choices}")
    model = language.model
    costs = measure_costs(load_trainable(artifact, model), {"input_ids": rows[:1, :TOKENS_TO_COUNT]})
    groups = shared_inputs(model, costs.layers)
    live = load(artifact, model, device=device, kernels="float")
    batches = [{"input_ids": row[None].to(device)} for row in rows]
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        found = measured_search(
            live, batches, costs, costs.of(bits)["bytes"], reference=model.to(device), output=thinned, groups=groups,
            seconds=seconds, progress=progress,
        )  # fmt: skip
    return found, costs
