"""The switch of a whole model in one launch: the first programs narrow codes, the others copy rows of small operands.

A program narrows 8 KB of codes, four in a 32-bit word at once, with loads and stores of 16 bytes. All it needs to know
are numbers in memory, so one kernel serves every scheme and width.
"""

import triton
import triton.language as tl

from bitdial.kernels.switch import BLOCK_WORDS, SwitchTables
from bitdial.kernels.width_table import DOUBLED as DOUBLED_GRID
from bitdial.kernels.width_table import NESTED as NESTED_GRID
from bitdial.kernels.width_table import SECOND

NEAREST_EVEN, NEAREST_UP = tl.constexpr(SECOND["nearest even"]), tl.constexpr(SECOND["nearest up"])
DOUBLED, NESTED = tl.constexpr(DOUBLED_GRID), tl.constexpr(NESTED_GRID)
WARPS = 8


@triton.jit
def _switch(  # type: ignore[no-untyped-def]
    master_ptr,
    active_ptr,
    table_ptr,
    words_ptr,
    code_blocks_ptr,
    word_blocks_ptr,
    wanted_ptr,
    keys,
    code_blocks,
    WORDS: tl.constexpr,
):
    block = tl.program_id(0)
    if block < code_blocks:
        line = code_blocks_ptr + 6 * block
        key = tl.load(line)
        if tl.load(wanted_ptr + keys + key) != 0:
            source, target = tl.multiple_of(tl.load(line + 1), WORDS), tl.multiple_of(tl.load(line + 2), WORDS)
            high, second, grid = tl.load(line + 3), tl.load(line + 4), tl.load(line + 5)
            at = tl.arange(0, WORDS)
            words = tl.load(master_ptr + source + at)
            words = _narrow(words, tl.load(wanted_ptr + key), high, second, grid)
            tl.store(active_ptr + target + at, words)
    else:
        line = word_blocks_ptr + 5 * (block - code_blocks)
        key = tl.load(line)
        if tl.load(wanted_ptr + keys + key) != 0:
            source = tl.load(line + 1) + tl.load(wanted_ptr + key) * tl.load(line + 3)
            target, count = tl.multiple_of(tl.load(line + 2), 4), tl.multiple_of(tl.load(line + 4), 4)
            at = tl.arange(0, WORDS)
            words = tl.load(table_ptr + tl.multiple_of(source, 4) + at, mask=at < count, other=0)
            tl.store(words_ptr + target + at, words, mask=at < count)


@triton.jit
def _narrow(words, low, high, second, grid):  # type: ignore[no-untyped-def]
    """Four codes of `high` bits in each word to `low` bits, as weight integers; see `reference/switch.py`.

    Shifted up to 8 bits and with 128 added, codes are bytes that are not negative: u. Narrowing them from 8 bits is the
    same as narrowing the stored ones, ties included. Of u / 2^shift, `whole` has the floor; what is cut off and the
    rule for ties decide whether one is added: the carry of a sum over the low `shift` bits, 6 at most, so that it stays
    within the byte. A byte that was rounded up beyond the top has the bit above set, and loses one again.
    """
    ONES: tl.constexpr = 0x01010101
    SIGNS: tl.constexpr = 0x80808080 - (1 << 32)  # as a signed number
    shift = 8 - low
    cut = (1 << shift) - 1
    half = (1 << shift) >> 1
    above = tl.where(low < 8, ONES, 0)  # at 8 bits nothing is rounded
    odd = tl.where(second == NEAREST_EVEN, above, 0)
    lift = tl.where(second == NEAREST_EVEN, tl.maximum(half - 1, 0), tl.where(second == NEAREST_UP, half, 0))
    twice = tl.where((low < 8) & (grid == DOUBLED), 1, 0)
    align = 8 - high
    u = ((words << align) & (ONES * ((0xFF << align) & 0xFF))) ^ SIGNS
    whole = (u >> shift) & (ONES * ((1 << low) - 1))
    carry = (u & (ONES * cut)) + (whole & odd) + ONES * lift
    whole += (carry >> shift) & above
    whole -= (whole >> low) & above
    # `whole` is code + 2^(low-1). With 128 added, the results are not negative either; the last step takes it away.
    offset = tl.where(twice != 0, 129 - (1 << low), 128 - (1 << (low - 1)))
    integers = (whole << twice) + ONES * offset
    # `nested`: the code back in its place among the stored bits, the middle of its cell, less the phase.
    up = high - low
    steps = (whole << up) + ONES * (128 - (1 << (high - 1)) + ((1 << up) >> 1) - (grid - NESTED))
    return tl.where(grid < NESTED, integers, steps) ^ SIGNS


def switch(tables: SwitchTables) -> None:
    """Bring `active` and `words` to what is `wanted`, in place; see `bitdial.kernels.switch`."""
    master, active, table, words, code_blocks, word_blocks, wanted = tables
    grid = (code_blocks.shape[0] + word_blocks.shape[0],)
    _switch[grid](
        master.view(table.dtype), active.view(table.dtype), table, words, code_blocks, word_blocks, wanted,
        wanted.shape[1], code_blocks.shape[0], WORDS=BLOCK_WORDS, num_warps=WARPS,
    )  # fmt: skip
