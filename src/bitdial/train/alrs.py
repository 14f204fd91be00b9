"""Adaptive Learning Rate Scaling: the rate of the quantization scales at one width (paper, Eqs. 6-7).

    rate_b = eta_b * (lr - mean_i g_i)           'literal', floored at 0
    rate_b = eta_b * lr * (1 - mean_i g_i)       'relative'
    g_i    = min(max|clip(grad of layer i's scales, norm 1)|, 1)

As printed (the literal reading) the rate falls below zero as soon as the mean exceeds the learning rate, 5e-4, and
is then floored: the scales stand still. The relative reading keeps what the text describes, a rate that shrinks
smoothly while scale gradients are large.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from bitdial.errors import ConfigError


def eta(shift: int) -> float:
    """10^(-shift/2) for an even shift, 5 * 10^(-(shift+1)/2) for an odd one."""
    if shift < 0:
        raise ConfigError(f"shift={shift} must not be negative")
    return 10.0 ** -(shift // 2) if shift % 2 == 0 else 5 * 10.0 ** -((shift + 1) // 2)


def layer_peaks(layers: Iterable[Sequence[Tensor]]) -> Tensor:
    """g_i of each layer (layers,), from the gradients of its scales."""
    flat = [(i, g.detach().float()) for i, gradients in enumerate(layers) for g in gradients]
    if not flat:
        return torch.zeros(0)
    gradients = [g for _, g in flat]
    owner = torch.tensor([i for i, _ in flat], device=gradients[0].device)
    largest = torch.stack(torch._foreach_norm(gradients, float("inf")))
    squares = torch.stack(torch._foreach_norm(gradients, 2)).square_()
    zeros = largest.new_zeros(flat[-1][0] + 1)
    norm = zeros.index_add(0, owner, squares).sqrt_()
    peaks = zeros.scatter_reduce(0, owner, largest, "amax")
    return (peaks / norm.clamp_min(1.0)).clamp_max_(1.0)


def scaled_rate(lr: float, *, shift: int, peak: float, reading: str) -> float:
    """The learning rate of the scales at a width `shift` bits below the highest; never negative."""
    if reading == "off":
        return lr
    if reading == "literal":
        return eta(shift) * max(lr - peak, 0.0)
    if reading == "relative":
        return eta(shift) * lr * max(1.0 - peak, 0.0)
    raise ConfigError(f"alrs={reading!r} is not known; choose 'relative', 'literal' or 'off'")
