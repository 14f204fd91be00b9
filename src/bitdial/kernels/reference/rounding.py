"""Columns of a weight rounded one after the other, in plain PyTorch."""

from typing import NamedTuple

import torch
from torch import Tensor


class Columns(NamedTuple):
    """Some columns of a weight in rows, about to be rounded; `calibrate.rounding` says what they are chosen by.

    codes      (groups, rows, columns) as they are now, as indices into the values
    steps      (groups, rows, columns) the scale of each weight
    gradients  (settings, groups, rows, columns) half those of the error at each setting
    second     (settings, groups, columns, columns) what a change of one column adds to the gradients of the others
    weights    (settings, groups, rows) how much the errors of each row weigh
    """

    codes: Tensor
    steps: Tensor
    gradients: Tensor
    second: Tensor
    weights: Tensor


class Meanings(NamedTuple):
    """What codes mean: `values` (settings, codes) at each setting. At the first `fine` settings no two are alike.

    `runs` (2, runs) are the first and the last of the codes that have the same value at all other settings.
    """

    values: Tensor
    runs: Tensor
    fine: int


def round_columns(columns: Columns, meanings: Meanings) -> Tensor:
    """The codes of least error; `gradients` are brought up to date in place."""
    codes, steps, gradients, second, weights = columns
    values, codes, curves = meanings.values, codes.clone(), second.diagonal(dim1=2, dim2=3)
    middles, ends = (values[0, 1:] + values[0, :-1]) / 2, values[meanings.fine :, meanings.runs[0]]
    for place in range(codes.shape[2]):
        step, curve, own = steps[:, :, place], curves[:, :, place, None], codes[:, :, place]
        held = values[:, own]
        aims = held - gradients[..., place] / (curve * step)  # the minimum of each parabola
        best = _best_codes(aims, weights * curve, own, meanings, middles, ends)
        change = (values[:, best] - held) * step
        codes[:, :, place] = best
        gradients += change[..., None] * second[:, :, None, place]
    return codes


def _best_codes(aims: Tensor, slopes: Tensor, own: Tensor, meanings: Meanings, middles: Tensor, ends: Tensor) -> Tensor:
    """The codes (groups, rows) of least error: in each run the one nearest to the aim of the fine settings.

    `slopes` (settings, groups, rows) say how steep the parabolas are, `middles` what lies between two codes, and `ends`
    (coarse settings, runs) are the values of the runs.
    """
    runs, fine = meanings.runs, meanings.fine
    if fine:
        slope = slopes[:fine].sum(dim=0)
        aim = (aims[:fine] * slopes[:fine]).sum(dim=0) / slope
        candidates = torch.searchsorted(middles, aim.contiguous())[..., None].clamp(runs[0], runs[1])
        cost = (meanings.values[0][candidates] - aim[..., None]).square_().mul_(slope[..., None])
    else:
        candidates = own[..., None].clamp(runs[0], runs[1])
        cost = aims.new_zeros(candidates.shape)
    for end, aim, slope in zip(ends, aims[fine:], slopes[fine:], strict=True):
        cost += (end - aim[..., None]).square_().mul_(slope[..., None])
    return candidates.gather(-1, cost.argmin(dim=-1, keepdim=True))[..., 0]
