"""Accuracy at a setting, and norm statistics for one."""

import itertools
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from bitdial.errors import QuantizationError, TrainingError
from bitdial.nn import SwitchableBatchNorm
from bitdial.observe import Batch, call, evaluating
from bitdial.plan import BitPlan, LayerBits, at_bits, unwrap


def accuracy(model: nn.Module, batches: Iterable[tuple[Batch, Tensor]]) -> float:
    """The share of samples whose largest logit is the target, in eval mode, at the model's present setting."""
    right = seen = 0
    with evaluating(model):
        for inputs, targets in batches:
            logits = call(model, inputs)
            if not bool(torch.isfinite(logits).all()):
                raise QuantizationError("the model's output holds NaN or infinity; check the input")
            guess = logits.argmax(dim=-1)
            if guess.shape != targets.shape:
                raise TrainingError(
                    f"targets of shape {tuple(targets.shape)} do not go with predictions of shape {tuple(guess.shape)}"
                )
            right += int((guess == targets).sum())
            seen += targets.numel()
    if seen == 0:
        raise TrainingError("there is nothing to evaluate on: no batch was given")
    return right / seen


def evaluate(
    model: nn.Module, batches: Iterable[tuple[Batch, Tensor]], settings: Iterable[LayerBits | BitPlan | str]
) -> dict[Any, float]:
    """Accuracy at each of `settings` (widths, plans, or names of stored ones); the model's setting is put back."""
    batches = list(batches)
    results: dict[Any, float] = {}
    for setting in settings:
        with at_bits(model, setting):
            results[setting] = accuracy(model, batches)
    return results


def batched(inputs: Tensor, targets: Tensor, batch_size: int = 256) -> list[tuple[Tensor, Tensor]]:
    """Split two tensors into batches, in order."""
    return list(zip(inputs.split(batch_size), targets.split(batch_size), strict=True))


def recalibrate_norms(model: nn.Module, batches: Iterable[Batch], plan: LayerBits | BitPlan) -> None:
    """Re-estimate in place the batch-norm statistics in use at `plan`, as the plain average over `batches`.

    Only the sets that `plan` selects change; weights, scales and other sets stay. Use it for a setting that was not
    trained, such as a plan or weight bits that differ from activation bits.
    """
    batches = iter(batches)
    first = next(batches, None)
    if first is None:
        raise TrainingError("recalibrate_norms needs at least one batch")
    with at_bits(model, plan), evaluating(model):
        norms = [m.active for m in unwrap(model).modules() if isinstance(m, SwitchableBatchNorm)]
        if not norms:
            raise TrainingError("the model has no switchable batch norm to recalibrate")
        if any(getattr(norm, "statistics_are_fixed", False) for norm in norms):
            raise TrainingError(
                "the norms of a model on integer sums are fixed; recalibrate load(path, kernels='float')"
            )
        momenta = [norm.momentum for norm in norms]
        try:
            for norm in norms:
                norm.reset_running_stats()  # type: ignore[operator]
                norm.momentum = None  # type: ignore[assignment]  # a cumulative average
                norm.train()
            for batch in itertools.chain([first], batches):
                call(model, batch)
        finally:
            for norm, momentum in zip(norms, momenta, strict=True):
                norm.momentum = momentum
