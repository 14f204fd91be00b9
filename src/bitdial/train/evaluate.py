"""Accuracy at a setting, and norm statistics for one."""

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
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

    A batch is inputs only: a tensor, a tuple of positional or a dict of keyword arguments. Only the sets that `plan`
    selects change; weights, scales and other sets stay. After an error all statistics are what they were. Use it for a
    setting that was not trained, such as a plan or weight bits that differ from activation bits.
    """
    batches = iter(batches)
    first = next(batches, None)
    if first is None:
        raise TrainingError("recalibrate_norms needs at least one batch")
    with at_bits(model, plan), evaluating(model):
        norms = {n: m.active for n, m in unwrap(model).named_modules() if isinstance(m, SwitchableBatchNorm)}
        if not norms:
            raise TrainingError("the model has no switchable batch norm to recalibrate")
        if any(getattr(norm, "statistics_are_fixed", False) for norm in norms.values()):
            raise TrainingError(
                "the norms of a model on integer sums are fixed; recalibrate load(path, kernels='float')"
            )
        with _averaging(norms.values()):
            for number, batch in enumerate(itertools.chain([first], batches), start=1):
                _check_inputs(batch, number)
                call(model, batch)
            _check_statistics(norms)


@contextmanager
def _averaging(norms: Collection[nn.Module]) -> Iterator[None]:
    """Let `norms` forget their statistics and average those of what they see in a block; an error gives them back."""
    momenta = [norm.momentum for norm in norms]
    before = [(part, part.clone()) for norm in norms for part in norm.buffers()]
    try:
        for norm in norms:
            norm.reset_running_stats()  # type: ignore[operator]
            norm.momentum = None  # type: ignore[assignment]  # a cumulative average
            norm.train()
        yield
    except BaseException:
        for part, value in before:
            part.copy_(value)
        raise
    finally:
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum


def _check_inputs(batch: Batch, number: int) -> None:
    """Refuse a tensor with NaN or infinity. Among several inputs, infinity may be meant: a mask has it."""
    if isinstance(batch, Tensor) and not bool(torch.isfinite(batch).all()):
        raise QuantizationError(f"batch {number} holds NaN or infinity; check the inputs. All statistics stay")


def _check_statistics(norms: Mapping[str, nn.Module]) -> None:
    for name, norm in norms.items():
        if not all(bool(torch.isfinite(part).all()) for part in norm.buffers()):
            raise QuantizationError(
                f"norm {name!r}: its new statistics hold NaN or infinity; check the batches and the weights of the "
                "layers before it. All statistics stay"
            )
