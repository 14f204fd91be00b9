"""The switch of a whole model in plain PyTorch: runs of neighbouring blocks are narrowed at once."""

from dataclasses import dataclass

from torch import Tensor

from bitdial import functional as bf
from bitdial.kernels.switch import BLOCK_BYTES, SwitchTables
from bitdial.kernels.width_table import DOUBLED, NESTED, PLAIN, SECOND

_RUN_BYTES = 64 * BLOCK_BYTES  # that are narrowed at once: what lies between the steps stays in the cache
# What `functional.narrow` calls the second roundings.
_RULES = {
    SECOND["nearest even"]: ("double_rounding", "even"),
    SECOND["nearest up"]: ("double_rounding", "up"),
    SECOND["floor"]: ("truncate", "even"),
}


def switch_(tables: SwitchTables) -> None:
    """Bring `active` and `words` to what is `wanted`, in place, where that is new."""
    master, active, table, words, code_blocks, word_blocks, wanted = tables
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
