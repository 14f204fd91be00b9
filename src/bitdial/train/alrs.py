"""Adaptive Learning Rate Scaling: the rate of the quantization scales at one width (paper, Eqs. 6-7).

    rate_b = eta_b * (lr - mean_i g_i)           'literal', floored at 0
    rate_b = eta_b * lr * (1 - mean_i g_i)       'relative'
    rate_b = eta_b * lr * (1 - g_i)              'layer': layer i has a rate of its own
    rate_b = eta_b * lr * (1 - g_ic)             'channel': so has its scale c; g_ic is its own clipped gradient
    g_i    = min(max|clip(grad of layer i's scales, norm 1)|, 1)

As printed (the literal reading) the rate falls below zero as soon as the mean exceeds the learning rate, 5e-4, and
is then floored: the scales stand still. The relative reading keeps what the text describes, a rate that shrinks
smoothly while scale gradients are large. The last two are what the paper suggests for networks whose layers differ
much, such as MobileNetV2: one layer with large gradients no longer slows down all others.
"""

import functools
from collections.abc import Iterable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from bitdial.errors import ConfigError
from bitdial.train.sharding import norms as norms_of

OWN = ("layer", "channel")
READINGS = ("relative", "literal", *OWN, "off")


def eta(shift: int) -> float:
    """10^(-shift/2) for an even shift, 5 * 10^(-(shift+1)/2) for an odd one."""
    if shift < 0:
        raise ConfigError(f"shift={shift} must not be negative")
    return 10.0 ** -(shift // 2) if shift % 2 == 0 else 5 * 10.0 ** -((shift + 1) // 2)


def layer_peaks(layers: Iterable[Sequence[Tensor]]) -> Tensor:
    """g_i of each layer (layers,), from the gradients of its scales."""
    return _peaks_and_norms(layers)[0]


def _peaks_and_norms(layers: Iterable[Sequence[Tensor]]) -> tuple[Tensor, Tensor]:
    """g_i, and the norm of all gradients of a layer or 1 if that is more: both (layers,)."""
    flat = [(i, g.detach().float()) for i, gradients in enumerate(layers) for g in gradients]
    if not flat:
        return torch.zeros(0), torch.ones(0)
    gradients, owners = [g for _, g in flat], tuple(i for i, _ in flat)
    largest, norms = norms_of(gradients, float("inf")), norms_of(gradients, 2)
    count, each = owners[-1] + 1, len(owners) // (owners[-1] + 1)
    if owners == tuple(
        i for i in range(count) for _ in range(each)
    ):  # as many for each layer: no indices, fewer kernels
        peaks, norm = largest.view(count, each).amax(dim=1), norms.view(count, each).norm(dim=1)
    else:
        owner, zeros = _index(owners, largest.device), largest.new_zeros(count)
        peaks = zeros.scatter_reduce(0, owner, largest, "amax")
        norm = zeros.index_add(0, owner, norms.square()).sqrt_()
    norm = norm.clamp_min(1.0)
    return (peaks / norm).clamp_max_(1.0), norm


def own_shares(layers: Sequence[Sequence[Tensor]], reading: str) -> list[list[Tensor]]:
    """1 - g for each scale, given the gradients by layer: the share of eta_b * lr that it moves at.

    For 'layer' one number for all scales of a layer, for 'channel' one for each element.
    """
    peaks, norms = _peaks_and_norms(layers)
    if reading == "layer":
        return [[1.0 - peaks[i] for _ in gradients] for i, gradients in enumerate(layers)]
    return [
        [1.0 - (g.detach().abs() / norm).clamp_max(1.0) for g in gs] for gs, norm in zip(layers, norms, strict=True)
    ]


def moving_scales(pairs: Iterable[tuple[Tensor | None, Tensor | None]]) -> list[list[Tensor]]:
    """The scales that took part in the last pass, by layer; one that layers share goes with the first.

    `pairs` has the scales of weight and activation of each layer.
    """
    found: list[list[Tensor]] = []
    seen: set[Tensor] = set()
    for pair in pairs:
        scales = [s for s in pair if s is not None and s.grad is not None and s not in seen]
        seen.update(scales)
        found += [scales] if scales else []
    return found


def rate_of_scales(
    lr: float | Tensor, moving: list[list[Tensor]], *, shift: int, reading: str
) -> tuple[float | Tensor, dict[Tensor, Tensor] | None]:
    """The rate of the scales at a width `shift` bits below the highest, and where scales have their own, their shares.

    `moving` is what `moving_scales` found.
    """
    if reading == "off" or not moving:
        return lr, None
    gradients = [[s.grad for s in scales if s.grad is not None] for scales in moving]
    peak = lr * 0.0 if reading in OWN else layer_peaks(gradients).mean()
    if isinstance(lr, Tensor):
        rate: float | Tensor = scaled_rate(lr, shift=shift, peak=torch.as_tensor(peak), reading=reading)
    else:
        rate = scaled_rate(lr, shift=shift, peak=float(peak), reading=reading)
    if reading not in OWN:
        return rate, None
    shares = own_shares(gradients, reading)
    pairs = zip([s for scales in moving for s in scales], [s for layer in shares for s in layer], strict=True)
    return rate, dict(pairs)


@functools.lru_cache(maxsize=64)
def _index(positions: tuple[int, ...], device: torch.device) -> Tensor:
    """Moved to the device once: a recorded CUDA graph must not copy from the host."""
    return torch.tensor(positions, device=device)


Rate = TypeVar("Rate", float, Tensor)


def scaled_rate(lr: Rate, *, shift: int, peak: Rate, reading: str) -> Rate:
    """The learning rate of the scales at a width `shift` bits below the highest; never negative.

    `peak` is mean_i g_i. Tensors in give a tensor out, without a look at their values. For 'layer' and 'channel' it is
    eta_b * lr, of which each scale takes its share (`own_shares`).
    """
    if reading == "off":
        return lr
    if reading == "literal":
        return eta(shift) * _not_negative(lr - peak)
    if reading == "relative":
        return eta(shift) * lr * _not_negative(1.0 - peak)
    if reading in OWN:
        return eta(shift) * lr
    raise ConfigError(f"alrs={reading!r} is not known; choose one of {', '.join(map(repr, READINGS))}")


def _not_negative(value: Rate) -> Rate:
    return value.clamp_min(0.0) if isinstance(value, Tensor) else max(value, 0.0)
