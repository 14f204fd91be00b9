"""The product of a Linear, the same to the bit whether or not its weight wants a gradient.

`F.linear` on an input of three or more dimensions makes one matrix of its rows, and copies them for that if it must.
But where the input is a transposed view (what an LSTM with batch_first=True returns) and the weight wants no gradient,
it multiplies batch by batch instead. The sums then have another order. A trained model wants gradients and a loaded one
does not, so here it is always one matrix.
"""

import torch.nn.functional as F
from torch import Tensor


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`F.linear` with a weight that wants a gradient: x (..., inputs), weight (outputs, inputs), bias (outputs,)."""
    alike = x.dim() < 3 or x.numel() == 0 or (x.dim() == 3 and bias is not None and x.is_contiguous())
    if alike:
        return F.linear(x, weight, bias)
    y = F.linear(x.reshape(-1, x.shape[-1]), weight).view(*x.shape[:-1], weight.shape[0])
    return y if bias is None else y + bias.to(y.dtype)
