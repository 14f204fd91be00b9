"""The operators that have kernels for CPUs: a function for each, of the operator's name; see `kernels/ops.py`."""

from collections.abc import Sequence

import torch
from torch import Tensor

from bitdial.kernels.cpu.digits import digits_of
from bitdial.kernels.cpu.layouts import FloatLayout, make_layouts
from bitdial.kernels.cpu.nibbles import MOST_TOKENS
from bitdial.kernels.kept_layouts import Use, kept_layout
from bitdial.kernels.reference import packed_linear as reference


def packed_linear(
    x: Tensor,
    words: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    fields: Sequence[int],
    bits: int,
    high: int,
    offset: float,
    group_scale: Tensor | None,
) -> Tensor:
    """A Linear layer on packed weights, by the layout that is kept for them.

    Tokens with infinite or missing numbers, which have no fixed point, are the reference's where that is needed.
    """
    use = Use(fields if type(fields) is tuple else tuple(fields), bits, high, offset)
    if not x.numel() or not scale.shape[0]:
        return reference.packed_linear(x, words, scale, bias, *use, group_scale)
    made = kept_layout(words, scale, group_scale, use, lambda: make_layouts(words, scale, group_scale, use, x.shape[1]))
    if made.nibbles is not None and x.dtype == torch.bfloat16 and x.shape[0] <= MOST_TOKENS:
        return made.nibbles.multiply(x.contiguous(), bias)
    if isinstance(made.exact, FloatLayout):
        y = made.exact.multiply(x.float())
        return (y if bias is None else y.add_(bias)).to(x.dtype)
    tokens = digits_of(x.contiguous())
    y = made.exact.multiply(tokens)
    y = (y if bias is None else y.add_(bias)).to(x.dtype)
    if not tokens.finite:
        others = ~torch.isfinite(x).all(dim=1)
        y[others] = reference.packed_linear(x[others], words, scale, bias, *use, group_scale)
    return y
