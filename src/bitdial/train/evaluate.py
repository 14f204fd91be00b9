"""Accuracy at a setting, and norm statistics for one."""

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from bitdial.calibrate.calibrate import correct_norms
from bitdial.config import check_choice
from bitdial.dial.dial import at_bits, resolve_plan, set_bits, unwrap
from bitdial.dial.plan import BitPlan, LayerBits, listed
from bitdial.errors import ConfigError, QuantizationError, TrainingError
from bitdial.nn import SwitchableBatchNorm
from bitdial.nn.frozen_norm import FrozenNorm2d
from bitdial.prepare.labels import label_problem, pairs
from bitdial.prepare.measure import Measure, Measured, take_measure
from bitdial.prepare.model_call import INPUTS_ALONE, Batch, call, evaluating
from bitdial.prepare.model_output import Output, find_class_axis, no_tensor, selected
from bitdial.train.data import check_samples


def accuracy(
    model: nn.Module,
    batches: Iterable[tuple[Batch, Tensor]],
    *,
    class_axis: int | None = None,
    output: Output = None,
    ignore: int | None = None,
) -> float:
    """The share of targets whose class has the largest logit, in eval mode, at the model's present setting.

    The classes lie along the axis that the targets lack: (samples, classes) with (samples,), (samples, classes, height,
    width) with (samples, height, width). If several axes fit, it is an error until `class_axis` says which. `output`
    selects the logits from what the model returns: a key or an attribute, a place in a tuple, or a function. Targets
    that are `ignore` are left out.
    """
    right = seen = 0
    with evaluating(model):
        for inputs, targets in pairs(batches):
            logits = selected(call(model, inputs), output)
            if not isinstance(logits, Tensor):
                raise TrainingError(no_tensor(logits))
            if not isinstance(targets, Tensor):
                raise TrainingError(f"the targets must be one tensor to compare, got {type(targets).__name__}")
            axis = find_class_axis(logits, targets, class_axis)
            if not bool(torch.isfinite(logits).all()):
                raise QuantizationError("the model's output holds NaN or infinity; check the input")
            counts = _count_right(logits, targets, axis, ignore)
            right, seen = right + counts[0], seen + counts[1]
    if seen == 0:
        raise TrainingError("there is nothing to evaluate on: no batch was given, or no target that counts")
    return right / seen


def _count_right(logits: Tensor, targets: Tensor, axis: int, ignore: int | None) -> tuple[int, int]:
    """How many of `targets` are the largest logit along `axis`, and how many there are without those to `ignore`."""
    classes = logits.shape[axis]
    counted = torch.ones_like(targets, dtype=torch.bool) if ignore is None else targets != ignore
    odd = ((targets < 0) | (targets >= classes)) & counted
    if targets.is_floating_point():
        odd |= (targets != targets.floor()) & counted  # true of NaN as well
    hits = (logits.argmax(dim=axis) == targets) & counted
    right, seen, odd_ones = torch.stack([hits.sum(), counted.sum(), odd.sum()]).tolist()  # one wait for the device
    if odd_ones:
        label = targets[odd][0].item()
        raise TrainingError(f"{label_problem(label, classes)}: accuracy(..., ignore={label})")
    return right, seen


def evaluate(
    model: nn.Module,
    batches: Iterable[tuple[Batch, Any]],
    settings: Iterable[LayerBits | BitPlan | str],
    *,
    measure: Measure = accuracy,
) -> dict[Any, Any]:
    """`measure(model, batches)` at each of `settings`: widths, plans, or names of stored ones.

    A measure returns a number or a dict of numbers. It finds the model in eval mode, without gradients, at the setting;
    afterwards the model is as it was.
    """
    settings, batches = listed(settings), list(batches)
    results: dict[Any, Measured] = {}
    for setting in settings:
        with at_bits(model, setting):
            results[setting] = take_measure(model, batches, measure)
    return results


def batched(inputs: Tensor, targets: Tensor, batch_size: int = 256) -> list[tuple[Tensor, Tensor]]:
    """Split two tensors into batches, in order."""
    check_samples(inputs, targets, batch_size)
    return list(zip(inputs.split(batch_size), targets.split(batch_size), strict=True))


def recalibrate_norms(
    model: nn.Module,
    batches: Tensor | dict[str, Any] | Iterable[Batch],
    plan: LayerBits | BitPlan | str | list[Any],
    *,
    method: str = "average",
) -> None:
    """Re-estimate in place the batch-norm statistics in use at `plan`, as the plain average over `batches`.

    With `method="difference"` they are corrected instead: by how they differ, on `batches`, from those of the model
    without quantisation. That is for a prepared model that was not trained, and for few batches: an average over a few
    hundred samples loses accuracy by itself.

    A batch is inputs only: a tensor, a tuple of positional or a dict of keyword arguments. A tensor or dict by itself
    is one batch. Frozen norms of detectors stay as they are in an average. Settings in a list take turns, batch by batch, and a set that several of them use averages all that it
    sees. Only the sets that are used change; weights, scales and other sets stay. After an error all statistics are
    what they were. Use it for settings that were not trained, or seldom: plans, or weight bits that differ from
    activation bits; with batches as in training, augmented if they were.
    """
    settings = plan if isinstance(plan, list) else [plan]
    check_choice("method", method, ("average", "difference"))
    if method == "difference":
        given: list[Any] = [batches] if isinstance(batches, Tensor | dict) else list(batches)
        correct_norms(unwrap(model), given, [BitPlan(resolve_plan(model, setting)) for setting in settings])
        return
    several: Iterator[Batch] = iter([batches] if isinstance(batches, Tensor | dict) else batches)
    first = next(several, None)
    if first is None or not settings:
        raise TrainingError(f"recalibrate_norms needs at least one {'batch' if settings else 'setting'}")
    norms: dict[nn.Module, str] = {}
    for setting in settings:
        with at_bits(model, setting):
            norms |= _norms_in_use(model)
    if not norms:
        raise TrainingError("all switchable norms of the model are frozen; method='difference' corrects their statistics")
    with at_bits(model, settings[0]), evaluating(model), _averaging(norms):
        for number, batch in enumerate(itertools.chain([first], several), start=1):
            _check_inputs(batch, number, first)
            set_bits(model, settings[(number - 1) % len(settings)])
            call(model, batch)
        if number < len(settings):
            raise TrainingError(
                f"{number} batches for {len(settings)} settings: each needs one at least. All statistics stay"
            )
        _check_statistics(norms)


def _norms_in_use(model: nn.Module) -> dict[nn.Module, str]:
    """The sets of switchable norms that the present setting selects, and the names of the norms."""
    modules = dict(unwrap(model).named_modules())
    if any(getattr(module, "statistics_are_fixed", False) for module in modules.values()):
        raise TrainingError("the norms of a model on integer sums are fixed; recalibrate load(path, kernels='float')")
    norms = {n: m for n, m in modules.items() if isinstance(m, SwitchableBatchNorm)}
    if not norms:
        raise TrainingError("the model has no switchable batch norm to recalibrate")
    return {norm.active: name for name, norm in norms.items() if not isinstance(norm.active, FrozenNorm2d)}


@contextmanager
def _averaging(norms: Collection[nn.Module]) -> Iterator[None]:
    """Let `norms` forget their statistics and average those of what they see in a block; an error gives them back."""
    momenta, hooks = [norm.momentum for norm in norms], []
    before = [(part, part.clone()) for norm in norms for part in norm.buffers()]
    try:
        for norm in norms:
            norm.reset_running_stats()  # type: ignore[operator]
            hooks.append(norm.register_forward_pre_hook(_cumulative(itertools.count(1))))
            norm.training = True
        yield
    except BaseException:
        for part, value in before:
            part.copy_(value)
        raise
    finally:
        for hook in hooks:
            hook.remove()
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum


def _cumulative(calls: Iterator[int]) -> Callable[..., None]:
    """A hook that makes a norm's statistics the plain average over `calls`; not all norms take None as that."""

    def hook(norm: nn.Module, args: Any) -> None:
        norm.momentum = 1.0 / next(calls)  # type: ignore[assignment]

    return hook


def _check_inputs(batch: Batch, number: int, first: Batch) -> None:
    """Refuse a tensor with NaN or infinity, or that must be targets. Among several inputs, a mask may hold infinity."""
    if not isinstance(batch, Tensor):
        return
    if isinstance(first, Tensor) and batch.is_floating_point() != first.is_floating_point():
        kinds = f"batch {number} is {batch.dtype}, batch 1 {first.dtype}"
        raise ConfigError(f"{kinds}: are they of one kind? {INPUTS_ALONE}")
    if not bool(torch.isfinite(batch).all()):
        raise QuantizationError(f"batch {number} holds NaN or infinity; check the inputs. All statistics stay")


def _check_statistics(norms: Mapping[nn.Module, str]) -> None:
    for norm, name in norms.items():
        if not all(bool(torch.isfinite(part).all()) for part in norm.buffers()):
            raise QuantizationError(
                f"norm {name!r}: its new statistics hold NaN or infinity; check the batches and the weights of the "
                "layers before it. All statistics stay"
            )
