"""The switch operator: every code, width and rule against `functional.narrow`; rows of words; only what changes.

The reference runs here, the kernel on a GPU and under Triton's interpreter (`test_interpreter.py`).
"""

import os
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from bitdial import functional as bf
from bitdial.kernels.ops import switch_
from bitdial.kernels.switch import BLOCK_BYTES, BLOCK_WORDS, grid_of
from bitdial.kernels.width_table import SECOND

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = pytest.mark.interpreter
HIGHS = range(2, 9)


def ints(rows: Sequence[Sequence[int]], columns: int) -> Tensor:
    return torch.tensor(rows, dtype=torch.int32, device=DEVICE).reshape(-1, columns)


def every_code() -> Tensor:
    """A block for each stored width: every code of it, beside every other code in all places of a word."""
    blocks = []
    for high in HIGHS:
        least, most = bf.code_range(high)
        generator = torch.Generator().manual_seed(high)
        codes = torch.randint(least, most + 1, (BLOCK_BYTES,), generator=generator)
        codes[: 4 * (most + 1 - least)] = torch.arange(least, most + 1).repeat(4)
        blocks.append(codes)
    return torch.cat(blocks).char().to(DEVICE)


@pytest.mark.parametrize(
    "scheme, ties",
    [("double_rounding", "even"), ("double_rounding", "up"), ("truncate", "even"), ("centred", "even"),
     ("nested", "even"), ("nested+8", "even")],
)  # fmt: skip
def test_every_code_and_width(scheme: str, ties: str) -> None:
    """The weight's integers, which the scheme says, of every code; centred ones of 8 bits as their codes."""
    rule = bf.scheme_of(scheme)
    second = SECOND[rule.second_rounding(ties)]
    master = every_code()
    phase = rule.stored_range(8)[0] + 128
    highs = [high for high in HIGHS if not phase or 8 * phase <= 2**high]  # whose codes have room for it
    for i, high in enumerate(HIGHS):
        if high in highs:
            master[i * BLOCK_BYTES : (i + 1) * BLOCK_BYTES].clamp_(*rule.stored_range(high))
    for low in HIGHS:
        active = torch.full_like(master, 77)
        how = (second, grid_of(scheme))
        lines = [(i, i * BLOCK_WORDS, i * BLOCK_WORDS, high, *how) for i, high in enumerate(HIGHS)]
        wanted = ints([[low] * len(lines), [int(high >= low and high in highs) for high in HIGHS]], len(lines))
        empty = torch.zeros(1, dtype=torch.int32, device=DEVICE)
        switch_(master, active, empty, empty.clone(), ints(lines, 6), ints([], 5), wanted)
        for i, high in enumerate(HIGHS):
            block = slice(i * BLOCK_BYTES, (i + 1) * BLOCK_BYTES)
            expected = torch.full((BLOCK_BYTES,), 77, dtype=torch.int8)
            if high >= low and high in highs:
                codes = bf.narrow(master[block].cpu(), high=high, low=low, scheme=scheme, ties=ties)
                factor, addend = rule.integers(high - low) if rule.fits_int8(low) else (1, 0)
                expected = (factor * codes.int() + addend).to(torch.int8)
            assert torch.equal(active[block].cpu(), expected), (high, low)


def test_rows_of_words_and_blocks_that_change_place() -> None:
    generator = torch.Generator().manual_seed(0)
    table = torch.randint(-(2**31), 2**31 - 1, (9000,), generator=generator).int().to(DEVICE)
    words = torch.full((3000,), 5, dtype=torch.int32, device=DEVICE)
    master = torch.cat([torch.full((BLOCK_BYTES,), value, dtype=torch.int8, device=DEVICE) for value in (8, 16)])
    active = torch.zeros_like(master)
    code_lines = [(0, 0, BLOCK_WORDS, 8, SECOND["floor"], 0), (0, BLOCK_WORDS, 0, 8, SECOND["floor"], 0)]
    word_lines = [(1, 40, 0, 2500, BLOCK_WORDS), (1, 40 + BLOCK_WORDS, BLOCK_WORDS, 2500, 2500 - BLOCK_WORDS),
                  (2, 8000, 2600, 12, 12), (3, 8100, 2700, 8, 4)]  # fmt: skip
    wanted = ints([[5, 2, 4, 1], [1, 1, 0, 1]], 4)
    switch_(master, active, table, words, ints(code_lines, 6), ints(word_lines, 5), wanted)
    expected = torch.full_like(words, 5)
    expected[:2500] = table[40 + 2 * 2500 :][:2500]
    expected[2700:2704] = table[8108:8112]
    assert torch.equal(words, expected)
    assert active.view(2, -1).unique(dim=1).flatten().tolist() == [2, 1]  # 16 and 8, at 5 bits


@pytest.mark.skipif(INTERPRETED, reason="the op is declared once; opcheck needs its reference only")
def test_the_op_is_declared_well() -> None:
    master = every_code()
    words = torch.zeros(8, dtype=torch.int32, device=DEVICE)
    code_lines, word_lines = [(0, 6 * BLOCK_WORDS, 0, 8, SECOND["nearest even"], 1)], [(0, 0, 4, 0, 4)]
    tables = ints(code_lines, 6), ints(word_lines, 5), ints([[3], [1]], 1)
    torch.library.opcheck(switch_, (master, torch.zeros_like(master), words + 1, words, *tables))
