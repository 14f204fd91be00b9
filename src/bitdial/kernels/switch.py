"""The switch of a whole model by one operator, `bitdial::switch_`: codes narrowed, small operands chosen, at once.

    master (bytes,) int8    stored codes of all layers          table (words,) int32   operands at every choice, in rows
    active (bytes,) int8    integers at the widths in use       words (words,) int32   those of the row in use

Every part of a model that can change has a key; `wanted` (2, keys) int32 says what each is to have and whether that is
new. Work is cut into blocks, one for a program of the kernel, which reads its line of a table and returns at once if
its key does not change. Numbers of 32 bits are copied as words, whatever they mean.

    code_blocks (blocks, 6)   key, where it begins in master and in active (in words of 4 bytes), stored width,
                              second rounding (`width_table.SECOND`), the grid: 0 plain codes, 1 the integer below
                              8 bits is 2 * code + 1, 2 + phase steps of the stored codes (`nested`)
    word_blocks (blocks, 5)   key, where row 0 begins in table, where the words begin, words from row to row, words;
                              all but the key are multiples of 4

The wanted number is a width for code blocks, the number of a row for word blocks.
"""

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bitdial import functional as bf
from bitdial.errors import PlanError
from bitdial.kernels.width_table import DOUBLED, NESTED, PLAIN

Numbers = NDArray[np.int32]
BLOCK_WORDS = 2048  # what one program of a switch handles: at most, and of codes exactly
BLOCK_BYTES = 4 * BLOCK_WORDS


class SwitchTables(NamedTuple):
    """The tensors of a switch, in the order of `bitdial::switch_`; it changes `active` and `words`."""

    master: Tensor
    active: Tensor
    table: Tensor
    words: Tensor
    code_blocks: Tensor
    word_blocks: Tensor
    wanted: Tensor


def grid_of(scheme: str) -> int:
    """How the weight integers of `scheme` follow from its codes, as a number for code blocks."""
    rule = bf.scheme_of(scheme)
    if rule.integers(1) == (1, 0):
        return PLAIN
    return DOUBLED if rule.integers(0) == (2, 1) else NESTED - rule.integers(0)[1]


def send(numbers: Numbers, target: Tensor) -> None:
    """Copy `numbers` into `target`, int32, without waiting for the device; PlanError while a graph is recorded."""
    on_gpu = target.is_cuda
    if on_gpu and torch.cuda.is_current_stream_capturing():
        raise PlanError("a switch cannot be recorded; call set_bits outside, recorded graphs follow the dial")
    # Pinned memory that PyTorch does not use again before the copy is done.
    staged = torch.empty(target.shape, dtype=torch.int32, pin_memory=on_gpu)
    staged.numpy()[...] = numbers
    target.copy_(staged, non_blocking=True)
