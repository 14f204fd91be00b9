"""The scale of a token, made while a model runs: activations of the kind 'dynamic'.

A token is a row of the last axis. What is stored is one number per width, the clip ratio: which share of the token's
largest magnitude the largest code stands for. In float32, each operation rounded once:

    factor = clip(clip_ratio, 2^-10, 1) / (2^(bits-1) - 1)
    scale  = max(max|x| * factor, 2^-100)
    code   = clip(round(x / scale), -2^(bits-1), 2^(bits-1) - 1)      ties to even
    value  = code * scale

The maximum does not depend on an order, so every engine and every backend has the same scale. The least scale gives a
token of zeros the codes 0. A token that holds NaN or infinity has such a scale, so all its values are NaN.
"""

import torch
from torch import Tensor

from bitdial.functional.schemes import code_range

LEAST_CLIP_RATIO, MOST_CLIP_RATIO = 2.0**-10, 1.0
LEAST_TOKEN_SCALE = 2.0**-100


def usable_clip_ratio(clip_ratio: Tensor) -> Tensor:
    """The learned clip ratio as the forward pass uses it: inside its range."""
    return clip_ratio.detach().clamp(LEAST_CLIP_RATIO, MOST_CLIP_RATIO)


def token_factor(clip_ratio: Tensor, bits: int) -> Tensor:
    """What the largest magnitude of a token is multiplied with, (1,): the clip ratio over the largest code."""
    ratio = usable_clip_ratio(clip_ratio)
    return ratio / torch.full_like(ratio, code_range(bits)[1])  # by a tensor: a GPU multiplies with 1 / number


def token_scale(x: Tensor, factor: Tensor) -> Tensor:
    """The scale (..., 1) of each token of x (..., inputs), given what `token_factor` gives."""
    return (x.detach().abs().amax(dim=-1, keepdim=True) * factor).clamp_min(LEAST_TOKEN_SCALE)
