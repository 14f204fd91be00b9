"""A prepared model that was neither trained nor calibrated says so, once, when it is saved.

Its scales are a starting point for learning. A pretrained network loses points by them, at 8 bits too.
"""

import logging

import torch
from torch import nn

log = logging.getLogger(__name__)

START = "_bitdial_start"  # the attribute of a prepared model that has what it began with, until it is told


def remember_start(model: nn.Module) -> None:
    """Let the prepared `model` know what its parameters are now."""
    setattr(model, START, _sums(model))


def check_learned(model: nn.Module) -> None:
    """Tell, once, if the parameters of `model`, which is about to be saved, are still those of its start."""
    start = getattr(model, START, None)
    if start is None:
        return
    delattr(model, START)
    if start == _sums(model):
        log.warning(
            "weights and scales are as prepare() made them, neither trained nor calibrated: a pretrained model loses "
            "accuracy so, also at the highest width; calibrate(model, batches) needs some hundred inputs and no "
            "labels, train(model, data) learns all widths"
        )


@torch.no_grad()
def _sums(model: nn.Module) -> list[float]:
    """What tells parameters that learned from those that did not: a sum of each."""
    return [
        float(parameter.sum(dtype=torch.float64)) for parameter in model.parameters() if parameter.is_floating_point()
    ]
