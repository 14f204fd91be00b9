"""Text that a language model writes itself, to distil it on (LLM-QAT): no text of anyone else is needed for it.

Each row begins with a token of the vocabulary. The next three to five are the likeliest ones, the rest is drawn as the
model says. Rows are made some at a time, each group from a seed of its own, and written as they come: a run that was
killed goes on behind the last whole group. A GPU takes several groups at a time, which takes hardly longer than one.
"""

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bitdial.prepare.model_call import evaluating
from bitdial.train.text import STORED, map_tokens
from bitdial.train.tokens import Tokens

TOGETHER = 32  # rows of a group
AT_ONCE = {"cuda": 4}  # groups that go through the model at a time; elsewhere one
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
        at_once = AT_ONCE.get(next(model.parameters()).device.type, 1)
        for start in range(done * TOGETHER, rows, at_once * TOGETHER):
            count = min(at_once * TOGETHER, rows - start)
            out.write(_write_rows(model, start // TOGETHER, count, length=length, seed=seed, first=first).tobytes())
            out.flush()
        out.write(STORED(int(first[0])).tobytes())
    os.replace(part, path)
    return map_tokens(path)


def _write_rows(model: nn.Module, group: int, count: int, *, length: int, seed: int, first: Tensor) -> Tokens:
    """`count` rows from that group on, one behind the other."""
    device = next(model.parameters()).device
    begin, greedy, generators = [], [], []
    for number, start in enumerate(range(0, count, TOGETHER), start=group):
        rows, own = min(TOGETHER, count - start), seed * 1_000_003 + number
        host = torch.Generator().manual_seed(own)
        begin.append(first[torch.randint(len(first), (rows, 1), generator=host)])
        greedy.append(torch.randint(GREEDY[0], GREEDY[1] + 1, (rows, 1), generator=host))
        generators.append(torch.Generator(device).manual_seed(own))
    with evaluating(model), torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
        made = _continue(model, torch.cat(begin).to(device), torch.cat(greedy).to(device), length, generators)
    return made.flatten().cpu().numpy().astype(STORED)


def _continue(
    model: nn.Module, begin: Tensor, greedy: Tensor, length: int, generators: list[torch.Generator]
) -> Tensor:
    rows, token, cache = [begin], begin, None
    for place in range(1, length):
        returned: Any = model(input_ids=token, past_key_values=cache, use_cache=True)
        cache, logits = returned.past_key_values, returned.logits[:, -1].float()
        parts = zip(torch.softmax(logits, dim=-1).split(TOGETHER), generators, strict=True)
        drawn = torch.cat([torch.multinomial(part, 1, generator=generator) for part, generator in parts])
        token = torch.where(greedy >= place, logits.argmax(dim=-1, keepdim=True), drawn)
        rows.append(token)
    return torch.cat(rows, dim=1)
