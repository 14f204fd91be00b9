"""train(model, data, config): the whole run, from the first step to the last, resumable at any of them."""

import logging
import os
import signal
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch.nn.functional as F
from torch import nn

from bitdial.dial.dial import set_bits
from bitdial.errors import CheckpointError, TrainingError
from bitdial.prepare.measure import Measure
from bitdial.prepare.model_call import Batch
from bitdial.prepare.model_output import Output
from bitdial.sensitivity.result import Sensitivity
from bitdial.train import distributed
from bitdial.train.checkpoint import load_checkpoint, save_checkpoint, sole_user
from bitdial.train.config import TrainConfig
from bitdial.train.data import ArrayData, LoaderData, TrainingData
from bitdial.train.evaluate import accuracy
from bitdial.train.evaluation import Evaluation
from bitdial.train.progress import make_progress
from bitdial.train.steps import JointStep, LossFunction, StepReport

log = logging.getLogger(__name__)

GRADIENT_SAMPLES = 8  # an epoch


@dataclass
class History:
    """What a run leaves behind: a row per epoch, and samples of the scale gradients.

    A row has `epoch`, `lr`, `seconds`, and by width (as text, so that it is JSON) `loss`, `train_top1` (if the targets
    are class labels), `top1` (if evaluated; `measured` by a measure of your own, None where not finite), `scale_rate`
    (mean ALRS rate) and `stopped` (share of steps at which that rate was 0). `gradients` has, by width, a list of
    {"step", "weight": per layer, "act": per layer}: the largest scale gradients.
    """

    layers: list[str]
    rows: list[dict[str, Any]] = field(default_factory=list)
    gradients: dict[str, list[dict[str, Any]]] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """The history as JSON values."""
        return {"layers": self.layers, "rows": self.rows, "gradients": self.gradients}


class _Totals:
    """Sums over the steps of one epoch, by width."""

    def __init__(self, saved: dict[str, Any] | None = None):
        self.sums: dict[str, dict[str, Any]] = saved or {}

    def add(self, report: StepReport) -> None:
        for bits, loss in report.loss.items():
            mine = self.sums.setdefault(str(bits), {})
            rate = report.scale_rate.get(bits, report.lr)
            now = {"steps": 1, "loss": loss.double(), "rate": rate, "zero": rate == 0.0}
            if bits in report.correct:
                now |= {"right": report.correct[bits], "seen": report.seen}
            for name, value in now.items():
                mine[name] = mine.get(name, 0.0) + value  # on a GPU, sums stay there until they are read

    def read(self) -> dict[str, dict[str, float]]:
        """The sums as plain numbers."""
        return {bits: {name: float(value) for name, value in sums.items()} for bits, sums in self.sums.items()}

    def row(self, epoch: int, lr: float, seconds: float) -> dict[str, Any]:
        items = self.read().items()
        right = {b: distributed.total(s.get("right", 0.0)) for b, s in items}
        seen = {b: distributed.total(s.get("seen", 0.0)) for b, s in items}
        return {
            "epoch": epoch,
            "lr": lr,
            "seconds": seconds,
            "loss": {b: s["loss"] / s["steps"] for b, s in items},
            "train_top1": {b: right[b] / seen[b] for b in right if seen[b]},
            "scale_rate": {b: s["rate"] / s["steps"] for b, s in items},
            "stopped": {b: s["zero"] / s["steps"] for b, s in items},
        }


@sole_user
def train(
    model: nn.Module,
    data: TrainingData | Iterable[Any],
    config: TrainConfig,
    *,
    loss: LossFunction = F.cross_entropy,
    output: Output = None,
    evaluate_on: Sequence[tuple[Batch, Any]] | None = None,
    measure: Measure = accuracy,
    teacher: nn.Module | None = None,
    sensitivity: Sensitivity | Mapping[str, float] | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    progress: bool = True,
) -> History:
    """Train the prepared `model` in place at all of its widths, and leave it at the highest, in eval mode.

    `data` is an ArrayData, or any sized iterable of (inputs, targets) or (inputs, targets, index). `output` selects the
    part of what the model returns that `loss` takes. On `evaluate_on`, `measure(model, batches)` is taken at every
    width after each epoch, and once on its first batch before the first. With `checkpoint`, the run saves itself there
    after each epoch, every `config.checkpoint_every` steps and on SIGTERM; if the file is there already, it goes on
    from it. One that another process trains with is refused. Under torchrun it joins the other processes by itself.
    """
    device = next(model.parameters()).device
    distributed.join(device)
    source = cast(TrainingData, data) if hasattr(data, "batches") else LoaderData(data)
    wrapped = distributed.wrap(model)
    step = JointStep(
        wrapped,
        config,
        steps_per_epoch=len(source),
        loss=loss,
        output=output,
        teacher=teacher,
        samples=source.samples,
        sensitivity=sensitivity,
    )
    if type(source) is ArrayData:  # another class may give out other targets
        step.labels.everything = source.targets
    history = History(layers=list(step.layers))
    first_epoch, first_batch, totals = 0, 0, _Totals()
    if checkpoint is not None and Path(checkpoint).exists():
        extra = load_checkpoint(checkpoint, step)
        if set(extra) != {"history", "totals"}:
            raise CheckpointError(f"{checkpoint} was not written by train(); go on from it with load_checkpoint")
        first_epoch, first_batch = divmod(step.step, len(source))
        history = History(**extra["history"])
        totals = _Totals(extra["totals"])
        if first_batch and not source.resumable:
            log.warning(
                "resuming inside an epoch of a loader whose order bitdial does not know: the run equals one that "
                "never stopped only if the loader repeats the same order and draws no random numbers of its own; use "
                "ArrayData for certainty"
            )
    evaluation = None
    if evaluate_on is not None:
        evaluation = Evaluation(model, evaluate_on, measure, bit_choices=step.bit_choices, output=output)
        evaluation.rehearse()
    every = max(len(source) // GRADIENT_SAMPLES, 1)

    def save() -> None:
        step.check()
        if checkpoint is not None:
            save_checkpoint(checkpoint, step, {"history": history.to_dict(), "totals": totals.read()})

    view = make_progress(progress and distributed.rank() == 0, config.epochs, step.total_steps)
    with view, until_terminated() as stop:
        for epoch in range(first_epoch, config.epochs):
            began, first, lr = time.monotonic(), first_batch if epoch == first_epoch else 0, config.lr
            shares = source.batches(epoch, start=first, rank=distributed.rank(), world=distributed.world_size())
            for number, batch in enumerate(shares, start=first):
                report = step(batch.inputs, batch.targets, batch.index)
                totals.add(report)
                lr = report.lr
                if number % every == 0:
                    _sample_gradients(history, step.step - 1, report)
                view.step(epoch, step.step, report)
                if number + 1 < len(source):
                    due = config.checkpoint_every is not None and step.step % config.checkpoint_every == 0
                    stopping = distributed.any_rank(stop.is_set(), device)
                    if due or stopping:
                        save()
                    if stopping:
                        raise stopped(step.step, checkpoint)
            if step.step != (epoch + 1) * len(source):
                raise TrainingError(
                    f"epoch {epoch + 1} gave {step.step - epoch * len(source)} batches instead of the "
                    f"{len(source)} that the data's length promises"
                )
            step.end_epoch()
            row = totals.row(epoch, lr, time.monotonic() - began)
            if evaluation is not None:
                row |= evaluation.row()
            history.rows.append(row)
            totals = _Totals()
            save()
            view.epoch(row)
            if epoch + 1 < config.epochs and distributed.any_rank(stop.is_set(), device):
                raise stopped(step.step, checkpoint)
    set_bits(model, step.bit_choices[0])
    model.eval()
    return history


def stopped(step: int, checkpoint: str | os.PathLike[str] | None) -> TrainingError:
    """What to raise when SIGTERM ends a run whose state is in `checkpoint`."""
    where = "nothing was saved" if checkpoint is None else f"run again to go on from {checkpoint}"
    return TrainingError(f"stopped by SIGTERM after step {step}; {where}")


def _sample_gradients(history: History, step: int, report: StepReport) -> None:
    for bits, peaks in report.weight_scale_peaks.items():
        act = report.act_scale_peaks[bits]
        entry = {"step": step, "weight": peaks.tolist(), "act": act.tolist()}
        history.gradients.setdefault(str(bits), []).append(entry)


@contextmanager
def until_terminated() -> Iterator[threading.Event]:
    """An event that SIGTERM sets, so that the loop can save first; outside the main thread it is never set."""
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = signal.signal(signal.SIGTERM, lambda *_: stop.set())
    try:
        yield stop
    finally:
        signal.signal(signal.SIGTERM, before)
