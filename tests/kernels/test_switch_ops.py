"""The switch operator: every code, width and rule against `functional.narrow`; rows of words; only what changes.

The reference runs here. The kernel runs on a GPU; elsewhere this file runs itself once more with Triton's interpreter.
"""

import importlib.util
import os
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from bitdial import functional as bf
from bitdial.kernels.switch_ops import BLOCK_BYTES, BLOCK_WORDS, grid_of, switch_
from bitdial.kernels.width_table import SECOND

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HIGHS = range(2, 9)


@pytest.mark.skipif(INTERPRETED or DEVICE == "cuda", reason="already runs here")
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_all_of_this_under_the_interpreter(run_under_the_interpreter: Callable[[str], None]) -> None:
    run_under_the_interpreter(__file__)


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


# How weight integers follow from codes, and the schemes that ask for it; `nested` with a phase as well.
GRIDS = {0: "truncate", 1: "centred", 2: "nested", 2 + 8: "nested+8"}


def test_grids_of_schemes() -> None:
    assert {grid: scheme for scheme in GRIDS.values() for grid in [grid_of(scheme)]} == GRIDS
    assert {grid_of(scheme) for scheme in ("double_rounding", "adabits", "lsq")} == {0}
    assert grid_of("dorefa") == 1


def integers(codes: Tensor, high: int, low: int, grid: int) -> Tensor:
    """From the definitions: the code, 2 * code + 1 below 8 bits, or whole steps of the stored codes."""
    if grid < 2:
        return 2 * codes + 1 if grid == 1 and low < 8 else codes
    cell = 2 ** (high - low)
    return (codes.long() * cell + cell // 2 - (grid - 2)).to(torch.int8)


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("scheme, ties", [("double_rounding", "even"), ("double_rounding", "up"), ("truncate", "even")])
def test_every_code_and_width(scheme: str, ties: str, grid: int) -> None:
    if grid >= 2 and scheme != "truncate":
        pytest.skip("nested codes are made by a shift")
    second = SECOND["floor" if scheme == "truncate" else f"nearest {ties}"]

    def least(low: int) -> int:
        """The fewest stored bits, of which some phases need 6."""
        return max(low, 6) if grid > 2 else low

    master = every_code()
    if grid > 2:  # the lowest codes are never stored with a phase
        for block, high in zip(master.view(len(HIGHS), -1), HIGHS, strict=True):
            block.clamp_(min=-(2 ** (high - 1)) + grid - 2)
    for low in HIGHS:
        active = torch.full_like(master, 77)
        lines = [(i, i * BLOCK_WORDS, i * BLOCK_WORDS, high, second, grid) for i, high in enumerate(HIGHS)]
        wanted = ints([[low] * len(lines), [int(high >= least(low)) for high in HIGHS]], len(lines))
        empty = torch.zeros(1, dtype=torch.int32, device=DEVICE)
        switch_(master, active, empty, empty.clone(), ints(lines, 6), ints([], 5), wanted)
        for i, high in enumerate(HIGHS):
            block = slice(i * BLOCK_BYTES, (i + 1) * BLOCK_BYTES)
            expected = torch.full((BLOCK_BYTES,), 77, dtype=torch.int8)
            if high >= least(low):
                expected = bf.narrow(master[block].cpu(), high=high, low=low, scheme=scheme, ties=ties)
                expected = integers(expected, high, low, grid)
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
