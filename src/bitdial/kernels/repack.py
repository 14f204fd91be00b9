"""Words of the highest width into words of the active widths, by one operator, `bitdial::repack_`.

master, active   packed words of all layers, at the highest width and at the widths in use; `word_layout` draws them
blocks (b, 2)    layer, number within the layer                                                  int32
layers (n, 4)    where its words begin in the master and in the active buffer, words a plane     int64
                 of its own, words from one active plane to the next
bits (n,)        the width that each layer is to have                                            int32
held (b,)        the width that each block has                                                   int32
"""

from typing import NamedTuple

from torch import Tensor

REPACK_BLOCK = 512  # places of a layer's tiles that a block of the kernel takes


class RepackTables(NamedTuple):
    """The tensors of a repack, in the order of `bitdial::repack_`; it changes `active` and `held`."""

    master: Tensor
    active: Tensor
    blocks: Tensor
    layers: Tensor
    bits: Tensor
    held: Tensor


class RepackRule(NamedTuple):
    """The stored width, the widest active one, and how codes are narrowed."""

    high: int
    widest: int
    scheme: str
    ties: str
