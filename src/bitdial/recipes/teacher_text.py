"""Text that a language model writes itself, to distil it on (LLM-QAT): no text of anyone else is needed for it.

Each row begins with a token of the vocabulary. The next three to five are the likeliest ones, the rest is drawn as the
model says. Rows are made some at a time, each group from a seed of its own, and written as they come: a run that was
killed goes on behind the last whole group.
"""

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bitdial.prepare.model_call import evaluating
from bitdial.train.text import STORED, map_tokens
from bitdial.train.tokens import Tokens

TOGETHER = 32  # rows
GREEDY = (3, 5)  # tokens behind the first: at least and at most


def teacher_text(model: nn.Module, path: Path, *, rows: int, length: int, seed: int, first: Tensor) -> Tokens:
    """`rows` times `length` tokens that `model` writes, in a file at `path`, mapped; made only if it is not there.

    `first` (tokens,) are those that a row may begin with. One more token closes the last row.
    """
    if path.exists():
        return map_tokens(path)
    part = path.with_suffix(".part")
    size = TOGETHER * length * STORED().nbytes
    done = part.stat().st_size // size if part.exists() else 0
    path.parent.mkdir(parents=True, exist_ok=True)
    with part.open("ab") as out:
        out.truncate(done * size)
        for group in range(done, -(-rows // TOGETHER)):
            count = min(TOGETHER, rows - group * TOGETHER)
            out.write(_write_rows(model, group, count, length=length, seed=seed, first=first).tobytes())
            out.flush()
        out.write(STORED(int(first[0])).tobytes())
    os.replace(part, path)
    return map_tokens(path)


def _write_rows(model: nn.Module, group: int, count: int, *, length: int, seed: int, first: Tensor) -> Tokens:
    """The rows of one group, one behind the other."""
    device = next(model.parameters()).device
    host = torch.Generator().manual_seed(seed * 1_000_003 + group)
    begin = first[torch.randint(len(first), (count, 1), generator=host)].to(device)
    greedy = torch.randint(GREEDY[0], GREEDY[1] + 1, (count, 1), generator=host).to(device)
    generator = torch.Generator(device).manual_seed(seed * 1_000_003 + group)
    with evaluating(model), torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
        rows = _continue(model, begin, greedy, length, generator)
    return rows.flatten().cpu().numpy().astype(STORED)


def _continue(model: nn.Module, begin: Tensor, greedy: Tensor, length: int, generator: torch.Generator) -> Tensor:
    rows, token, cache = [begin], begin, None
    for place in range(1, length):
        returned: Any = model(input_ids=token, past_key_values=cache, use_cache=True)
        cache, logits = returned.past_key_values, returned.logits[:, -1].float()
        drawn = torch.multinomial(torch.softmax(logits, dim=-1), 1, generator=generator)
        token = torch.where(greedy >= place, logits.argmax(dim=-1, keepdim=True), drawn)
        rows.append(token)
    return torch.cat(rows, dim=1)
