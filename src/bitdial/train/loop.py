"""train(model, data, config): the whole run, from the first step to the last, resumable at any of them."""

import logging
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from bitdial.dial.dial import set_bits
from bitdial.errors import CheckpointError, TrainingError
from bitdial.prepare.measure import Measure
from bitdial.prepare.model_call import Batch
from bitdial.prepare.model_output import Output
from bitdial.sensitivity.result import Sensitivity
from bitdial.train import distributed
from bitdial.train.callbacks import Callback, Run, check_callbacks
from bitdial.train.checkpoint import read_checkpoint, sole_user, write_checkpoint
from bitdial.train.config import TrainConfig
from bitdial.train.data import ArrayData, TrainingData, as_training_data
from bitdial.train.evaluate import accuracy
from bitdial.train.evaluation import Evaluation
from bitdial.train.history import History, Totals
from bitdial.train.own_optimizer import OptimizerFactory
from bitdial.train.progress import Progress, make_progress
from bitdial.train.state import checking, under
from bitdial.train.steps import JointStep, LossFunction
from bitdial.train.stopping import StopRequest, until_stopped

log = logging.getLogger(__name__)

GRADIENT_SAMPLES = 8  # an epoch


@sole_user
def train(
    model: nn.Module,
    data: TrainingData | Iterable[Any],
    config: TrainConfig,
    *,
    loss: LossFunction = F.cross_entropy,
    output: Output = None,
    optimizer: OptimizerFactory | None = None,
    evaluate_on: Sequence[tuple[Batch, Any]] | None = None,
    measure: Measure = accuracy,
    teacher: nn.Module | None = None,
    sensitivity: Sensitivity | Mapping[str, float] | None = None,
    callbacks: Sequence[Callback] = (),
    checkpoint: str | os.PathLike[str] | None = None,
    progress: bool = True,
) -> History:
    """Train the prepared `model` in place at all of its widths, and leave it at the highest, in eval mode.

    `data` is an ArrayData, or any iterable of (inputs, targets) or (inputs, targets, index); one without a length needs
    `config.steps_per_epoch`. `output` selects the part of what the model returns that `loss` takes. `optimizer` makes
    one of your own for the weights (see `bitdial.train.own_optimizer`). On `evaluate_on`, `measure(model, batches)` is
    taken at every width after each epoch, and once on its first batch before the first. `callbacks` are called after
    each step and epoch, and may stop the run.

    With `checkpoint`, the run saves itself there after each epoch, every `config.checkpoint_every` steps, on SIGTERM
    (then TrainingError is raised) and on Ctrl-C (KeyboardInterrupt); if the file is there already, it goes on from it.
    One that another process trains with is refused. Under torchrun it joins the other processes by itself.
    """
    called = check_callbacks(callbacks)
    distributed.join(next(model.parameters()).device)
    source = as_training_data(data, config.steps_per_epoch)
    step = JointStep(
        model,
        config,
        steps_per_epoch=len(source),
        loss=loss,
        output=output,
        optimizer=optimizer,
        teacher=teacher,
        samples=source.samples,
        sensitivity=sensitivity,
    )
    if type(source) is ArrayData:  # another class may give out other targets
        step.labels.everything = source.targets
    evaluation = None
    if evaluate_on is not None:
        evaluation = Evaluation(model, evaluate_on, measure, bit_choices=step.bit_choices, output=output)
    loop = _Loop(model, step, source, evaluation, called)
    if checkpoint is not None:
        loop.checkpoint = Path(checkpoint)
        loop.resume()
    if evaluation is not None:
        evaluation.rehearse()
    with make_progress(progress and distributed.rank() == 0, config.epochs, step.total_steps) as view:
        loop.run_all(view)
    step.graphs.clear()  # recorded collectives would keep a process group from ending
    set_bits(model, step.bit_choices[0])
    model.eval()
    return loop.run.history


class _Loop:
    """The epochs of a run, from where it stands."""

    def __init__(
        self,
        model: nn.Module,
        step: JointStep,
        source: TrainingData,
        evaluation: Evaluation | None,
        callbacks: tuple[Callback, ...],
    ):
        self.step, self.source, self.evaluation, self.callbacks = step, source, evaluation, callbacks
        self.checkpoint: Path | None = None
        self.totals = Totals()
        self.run = Run(
            model=model,
            config=step.config,
            history=History(layers=list(step.layers)),
            total_steps=step.total_steps,
            evaluates=None if evaluation is None else evaluation.name,
        )

    def resume(self) -> None:
        """Go on from the checkpoint, if there is one."""
        if self.checkpoint is None or not self.checkpoint.exists():
            return
        extra, beside = read_checkpoint(self.checkpoint, self.step)
        if set(extra) - {"callbacks"} != {"history", "totals"}:
            raise CheckpointError(f"{self.checkpoint} was not written by train(); go on from it with load_checkpoint")
        run = self.run
        run.history, self.totals, run.step = History(**extra["history"]), Totals(extra["totals"]), self.step.step
        run.row = run.history.rows[-1] if run.history.rows else None
        with checking(self.checkpoint):
            _load_callbacks(self.callbacks, extra.get("callbacks", []), beside)
        if run.step % len(self.source) and not self.source.resumable:
            log.warning(
                "resuming inside an epoch of a loader whose order bitdial does not know: the run equals one that "
                "never stopped only if the loader repeats the same order and draws no random numbers of its own; use "
                "ArrayData for certainty"
            )

    def save(self) -> None:
        """Write the checkpoint, if there is to be one."""
        self.step.check()
        if self.checkpoint is None:
            return
        states, beside = _callback_states(self.callbacks)
        extra = {"history": self.run.history.to_dict(), "totals": self.totals.read(), "callbacks": states}
        write_checkpoint(self.checkpoint, self.step, extra, beside)

    def run_all(self, view: Progress) -> None:
        """All epochs that are left, until a callback ends the run."""
        run, epochs = self.run, self.run.config.epochs
        with until_stopped() as stop:
            for one in self.callbacks:
                one.on_start(run)
            while run.history.ended is None and self.step.step < run.total_steps:
                run.epoch = self.step.step // len(self.source)
                self._epoch(view, stop)
                asked = self._asked(stop)
                goes_on = run.epoch + 1 < epochs or self.checkpoint is not None  # a run that is done is not thrown away
                if asked and goes_on and run.history.ended is None:
                    raise stop.problem(self.step.step, self.checkpoint)
            for one in self.callbacks:
                one.on_end(run)

    def _asked(self, stop: StopRequest) -> bool:
        return distributed.any_rank(stop.is_set())

    def _ended(self) -> bool:
        """Whether a callback has ended the run; the history then says why."""
        if self.callbacks and distributed.any_rank(self.run.reason is not None):
            self.run.history.ended = self.run.reason or "another process ended it"
        return self.run.history.ended is not None

    def _epoch(self, view: Progress, stop: StopRequest) -> None:
        """An epoch from the present step on, with its row; not all of it if a callback ends the run."""
        run, step, length = self.run, self.step, len(self.source)
        began, lr, first = time.monotonic(), run.config.lr, step.step % length
        every = max(length // GRADIENT_SAMPLES, 1)
        shares = self.source.batches(run.epoch, start=first, rank=distributed.rank(), world=distributed.world_size())
        for number, batch in enumerate(shares, start=first):
            report = step(batch.inputs, batch.targets, batch.index)
            self.totals.add(report)
            lr, run.report, run.step = report.lr, report, step.step
            if number % every == 0:
                run.history.sample_gradients(step.step - 1, report)
            view.step(run.epoch, step.step, report)
            for one in self.callbacks:
                one.on_step(run)
            if number + 1 < length and self._between_steps(stop):
                return
        if step.step != (run.epoch + 1) * length:
            raise TrainingError(
                f"epoch {run.epoch + 1} gave {step.step - run.epoch * length} batches instead of the {length} that the "
                "data's length promises"
            )
        step.end_epoch()
        run.row = self.totals.row(run.epoch, lr, time.monotonic() - began) | self._evaluated()
        run.history.rows.append(run.row)
        self.totals = Totals()
        for one in self.callbacks:
            one.on_epoch(run)
        self._ended()
        self.save()
        view.epoch(run.row)

    def _between_steps(self, stop: StopRequest) -> bool:
        """Save if it is time, and stop if a signal asked; whether a callback ended the run."""
        every, asked, ended = self.run.config.checkpoint_every, self._asked(stop), self._ended()
        if asked or ended or (every is not None and self.step.step % every == 0):
            self.save()
        if asked and not ended:
            raise stop.problem(self.step.step, self.checkpoint)
        return ended

    def _evaluated(self) -> dict[str, Any]:
        if self.evaluation is None:
            return {}
        with ExitStack() as stack:
            for one in self.callbacks:
                stack.enter_context(one.evaluating(self.run))
            return self.evaluation.row()


def _callback_states(callbacks: Sequence[Callback]) -> tuple[list[dict[str, Any]], dict[str, Tensor]]:
    """What a checkpoint keeps of those that have a state: JSON values, and tensors by the callback's number."""
    states: list[dict[str, Any]] = []
    beside: dict[str, Tensor] = {}
    for one in callbacks:
        if state := one.state_dict():
            tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
            beside |= {f"{len(states)}.{name}": value for name, value in tensors.items()}
            values = {name: value for name, value in state.items() if name not in tensors}
            states.append({"kind": type(one).__name__, "values": values})
    return states, beside


def _load_callbacks(callbacks: Sequence[Callback], states: list[dict[str, Any]], beside: dict[str, Tensor]) -> None:
    """Give the callbacks with a state theirs back, in order."""
    keeping = [one for one in callbacks if one.state_dict()]
    now, then = [type(one).__name__ for one in keeping], [state["kind"] for state in states]
    if now != then:
        raise CheckpointError(f"it was written with callbacks {then} that keep a state, these are {now}; use the same")
    for number, (one, state) in enumerate(zip(keeping, states, strict=True)):
        one.load_state_dict({**state["values"], **under(beside, f"{number}.")})
