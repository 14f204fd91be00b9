"""Linear layers on packed weights in plain PyTorch: sums in float64, rounded once."""

from collections.abc import Sequence

import torch
from torch import Tensor

from bitdial.kernels.word_layout import unpack_scales, unpack_words


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
    """x (tokens, columns) times the weight: (tokens, rows), in x's type."""
    codes = unpack_words(words, fields, bits, len(scale), x.shape[1])
    y = x.double() @ weight_values(codes, scale, group_scale, high - bits, offset).T
    return (y if bias is None else y + bias.double()).to(x.dtype)


def weight_values(codes: Tensor, scale: Tensor, group_scale: Tensor | None, shift: int, offset: float) -> Tensor:
    """The weight (rows, columns) in float64 of its codes and the operator's scales."""
    rows, columns = codes.shape
    weight = codes.to(torch.float64).add_(offset)
    if group_scale is not None:
        groups = unpack_scales(group_scale, rows, columns).double()
        weight *= groups.repeat_interleave(columns // groups.shape[1], dim=1)
    return weight.mul_((scale.double() * 2.0**shift)[:, None])
