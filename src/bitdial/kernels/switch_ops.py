"""The switch of a whole model as one PyTorch operator: codes narrowed, small operands chosen, all of it in one launch.

    master (bytes,) int8    stored codes of all layers          table (words,) int32   operands at every choice, in rows
    active (bytes,) int8    integers at the widths in use       words (words,) int32   those of the row in use

Every part of a model that can change has a key; `wanted` (2, keys) int32 says what each is to have and whether that is
new. Work is cut into blocks, one for a program of the kernel, which reads its line of a table and returns at once if
its key does not change. Numbers of 32 bits are copied as words, whatever they mean.

    code_blocks (blocks, 6)   key, where it begins in master and in active (in words of 4 bytes), stored width,
                              second rounding (`codes.SECOND`), the grid: 0 plain codes, 1 the integer below
                              8 bits is 2 * code + 1, 2 + phase steps of the stored codes (`nested`)
    word_blocks (blocks, 5)   key, where row 0 begins in table, where the words begin, words from row to row, words;
                              all but the key are multiples of 4

The wanted number is a width for code blocks, the number of a row for word blocks.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from bitdial import functional as bf
from bitdial.kernels.fake_quantize import triton_runs
from bitdial.kernels.in_place import BLOCK_WORDS, in_place_op
from bitdial.kernels.width_table import DOUBLED, NESTED, PLAIN, SECOND

BLOCK_BYTES = 4 * BLOCK_WORDS
_RUN_BYTES = 64 * BLOCK_BYTES  # that the reference narrows at once: what lies between its steps stays in the cache
# What `functional.narrow` calls the second roundings.
_RULES = {
    SECOND["nearest even"]: ("double_rounding", "even"),
    SECOND["nearest up"]: ("double_rounding", "up"),
    SECOND["floor"]: ("truncate", "even"),
}


@in_place_op("switch_", mutates=("active", "words"))
def switch_(
    master: Tensor, active: Tensor, table: Tensor, words: Tensor, code_blocks: Tensor, word_blocks: Tensor,
    wanted: Tensor,
) -> None:  # fmt: skip
    """Bring `active` and `words` to what is `wanted`, in place, where that is new."""
    if triton_runs(master):
        from bitdial.kernels.triton.inference import switch as triton_switch

        with torch.cuda.device_of(master):
            triton_switch.switch(master, active, table, words, code_blocks, word_blocks, wanted)
        return
    values, changes = wanted.tolist()
    for run in _runs(code_blocks.tolist(), values, changes):
        codes = master[run.source : run.source + run.count]
        active[run.target : run.target + run.count] = narrowed(codes, *run.how)
    for key, source, target, stride, count in word_blocks.tolist():
        if changes[key]:
            begin = source + values[key] * stride
            words[target : target + count] = table[begin : begin + count]


@dataclass
class _Run:
    """Neighbouring blocks that are narrowed alike: bytes in master and in active, and the arguments of `narrowed`."""

    source: int
    target: int
    count: int
    how: tuple[int, ...]


def _runs(lines: list[list[int]], values: list[int], changes: list[int]) -> list[_Run]:
    """The code blocks that change, in runs of at most _RUN_BYTES."""
    runs: list[_Run] = []
    for key, source, target, *how in lines:
        if not changes[key]:
            continue
        block = _Run(4 * source, 4 * target, BLOCK_BYTES, (values[key], *how))
        if runs and runs[-1].count < _RUN_BYTES and _follows(runs[-1], block):
            runs[-1].count += BLOCK_BYTES
        else:
            runs.append(block)
    return runs


def _follows(run: _Run, block: _Run) -> bool:
    ends = run.source + run.count, run.target + run.count
    return ends == (block.source, block.target) and run.how == block.how


def grid_of(scheme: str) -> int:
    """How the weight integers of `scheme` follow from its codes, as a number for code blocks."""
    rule = bf.scheme_of(scheme)
    if rule.integers(1) == (1, 0):
        return PLAIN
    return DOUBLED if rule.integers(0) == (2, 1) else NESTED - rule.integers(0)[1]


def narrowed(codes: Tensor, bits: int, high: int, second: int, grid: int) -> Tensor:
    """What the kernels multiply with, int8: the weight integers of the `bits`-bit codes, as `grid` says."""
    scheme, ties = _RULES[second]
    codes = bf.narrow(codes, high=high, low=bits, scheme=scheme, ties=ties)
    if grid == PLAIN or (grid == DOUBLED and bits == 8):
        return codes
    if grid == DOUBLED:
        return 2 * codes + 1
    shift = high - bits
    return (codes << shift) + ((1 << shift >> 1) - (grid - NESTED))
