"""What a layer multiplies, as rows: the inputs that meet its weight in one output, for some of its outputs.

A row of a `Linear` is a token's features. A row of a convolution is the window under its kernel. Outputs are drawn at
random, the same ones for inputs of the same shape, so that rows of the float model and of each width belong together.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bitdial.calibrate.positions import MOST_ENERGY
from bitdial.nn.layer_kinds import CONV1D, CONV2D, CONV3D, LINEAR, LayerKind, padding_around

LEAST_ROWS, MOST_ROWS = 2048, 16384  # of windows
ROWS_PER_INPUT = 16
MOST_TOKENS = 32768
MOST_TOKEN_ENERGY = 10.0  # in medians of all tokens


def _tokens(layer: Any, x: Tensor, places: Callable[[int], Tensor]) -> Tensor:
    rows = x.reshape(1, -1, x.shape[-1])
    return rows[:, places(rows.shape[1])]


def _windows(layer: Any, x: Tensor, places: Callable[[int], Tensor]) -> Tensor:
    dims = len(layer.kernel_size)
    x = x if x.dim() == dims + 2 else x[None]
    x = F.pad(x, padding_around(layer), mode="constant" if layer.padding_mode == "zeros" else layer.padding_mode)
    for dim, (size, stride, dilation) in enumerate(zip(layer.kernel_size, layer.stride, layer.dilation, strict=True)):
        x = x.unfold(2 + dim, dilation * (size - 1) + 1, stride)
    for dim, dilation in enumerate(layer.dilation, start=-len(layer.dilation)):
        x = x.unfold(dim, 1, dilation).squeeze(-1)  # every `dilation`-th
    outputs = x.movedim(1, 1 + dims)  # (images, places, channels, kernel)
    counts = outputs.shape[: 1 + dims]
    chosen = torch.unravel_index(places(math.prod(counts)), counts)
    rows = outputs[chosen]  # (chosen, channels, kernel)
    return rows.unflatten(1, (layer.groups, -1)).flatten(2).transpose(0, 1)


ROWS: dict[LayerKind, Callable[[Any, Tensor, Callable[[int], Tensor]], Tensor]] = {
    LINEAR: _tokens,
    CONV1D: _windows,
    CONV2D: _windows,
    CONV3D: _windows,
}


def input_rows(kind: LayerKind, layer: Any, inputs: Sequence[Tensor], *, seed: int) -> Tensor:
    """Rows (groups, samples, inputs) of a `layer` of a `kind` in ROWS, over all batches of its `inputs`."""
    width = layer.weight[0].numel()
    most = MOST_TOKENS if kind is LINEAR else min(max(ROWS_PER_INPUT * width, LEAST_ROWS), MOST_ROWS)
    share = -(-most // len(inputs))
    generator = torch.Generator().manual_seed(seed)

    def places(count: int) -> Tensor:
        if count <= share:
            return torch.arange(count, device=inputs[0].device)
        return torch.randperm(count, generator=generator)[:share].to(inputs[0].device)

    return torch.cat([ROWS[kind](layer, x, places) for x in inputs], dim=1)


def held_back(rows: Tensor, like: Tensor, *, images: bool) -> Tensor:
    """`rows` (groups, samples, inputs), in which one of many times the usual energy counts as others do.

    Of `images` these are windows whose channels are large in relation to the channel's mean (see `positions`). Else
    they are tokens of a language model, of which some are a thousand times as large as others, in few channels: second
    moments would be theirs alone, though a norm makes all tokens equal again. Sizes go by `like`, the same rows in
    float, so that rows of all settings are held back alike.
    """
    squares = like.square()
    if images:
        most, usual = MOST_ENERGY, squares.mean(dim=1, keepdim=True).clamp_min_(1e-30)
        energy = squares.div_(usual).mean(dim=(0, 2))
    else:
        most, total = MOST_TOKEN_ENERGY, squares.sum(dim=(0, 2))
        energy = total / total.median().clamp_min(1e-6 * total.max() + 1e-30)
    return rows * (most / energy.clamp_min_(most)).sqrt_()[:, None]
