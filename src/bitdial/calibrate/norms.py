"""Norm statistics that follow what quantisation changes.

Statistics estimated anew on a few hundred samples lose points by themselves. So they are corrected instead: by how much
the mean of a norm's input has moved against the float model on the same samples, and by how many times its variance
has grown. Each norm is corrected before the next layer runs. Both are moments in which a pixel of unusual energy counts
as any other (see `positions`).
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from bitdial.calibrate.positions import Moments, moments_of, position_weights
from bitdial.errors import QuantizationError

_LEAST_VARIANCE = 1e-6  # of a channel, over the mean of all: below it there is nothing to compare


class Reference(NamedTuple):
    """What a norm reads in the float model: its moments, and the weights of pixels, batch by batch; None: all alike."""

    moments: Moments
    weights: list[Tensor] | None


def reference_of(inputs: Sequence[Tensor], name: str) -> Reference:
    """The moments of what a norm reads in the float model, with pixels of unusual energy held back."""
    weights = position_weights(inputs, 1) if inputs[0].dim() > 3 else None
    return Reference(moments(inputs, name, weights), weights)


def moments(inputs: Sequence[Tensor], name: str, weights: Sequence[Tensor] | None = None) -> Moments:
    """The moments of a norm's `inputs` (N, C, ...), all batches together; pixels have `weights` (N, 1, ...)."""
    found = moments_of(inputs, 1, weights)
    if not bool((torch.isfinite(found.mean) & torch.isfinite(found.variance)).all()):
        raise QuantizationError(f"norm {name!r}: its input holds NaN or infinity; check the batches and the weights")
    return found


@torch.no_grad()
def correct_norm(norm: nn.Module, plain: nn.Module, quantized: Moments, reference: Moments) -> None:
    """Set the statistics of `norm`, in place, to those of the float model's `plain` one and what has changed."""
    usual = reference.variance.mean()
    known = reference.variance > _LEAST_VARIANCE * usual
    ratio = torch.where(known, quantized.variance / torch.where(known, reference.variance, usual), 1.0)
    mean, variance = norm.get_buffer("running_mean"), norm.get_buffer("running_var")
    mean.copy_(plain.get_buffer("running_mean") + (quantized.mean - reference.mean))
    variance.copy_(plain.get_buffer("running_var") * ratio)
