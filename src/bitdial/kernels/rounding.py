"""Round some columns of a weight, one after the other, for all settings of the dial: the inner loop of a calibration.

The columns cannot be done at once, since each is rounded to what those before it left. In plain PyTorch that takes some
twenty operators a column. On a GPU it is one launch for all of them.
"""

import torch
from torch import Tensor

from bitdial.kernels.dispatch import INDEXABLE, use_triton
from bitdial.kernels.reference import rounding as reference
from bitdial.kernels.reference.rounding import Columns, Meanings

__all__ = ["Columns", "Meanings", "round_columns"]


def round_columns(columns: Columns, meanings: Meanings) -> Tensor:
    """The codes (groups, rows, columns) of least error; `gradients` are brought up to date in place."""
    if use_triton(columns.gradients) and _fits(columns):
        from bitdial.kernels.triton.calibration import rounding

        return rounding.round_columns(columns, meanings)
    return reference.round_columns(columns, meanings)


def _fits(columns: Columns) -> bool:
    """Whether the kernel takes them: float32, not too large to index, and not empty."""
    sizes = columns.gradients.numel(), columns.second.numel()
    return columns.gradients.dtype == torch.float32 and min(sizes) > 0 and max(sizes) < INDEXABLE
