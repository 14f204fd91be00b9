"""Callbacks: code of the user's own between the steps and epochs of `train`, and some that are ready.

class Report(Callback):
    def on_epoch(self, run):
        send(run.row["loss"])
        if run.row["loss"]["2"] < 0.1:
            run.stop("good enough")

train(model, data, config, callbacks=[Report(), Ema(0.999), EarlyStopping(5), CsvLog("run.csv")])
"""

import csv
import inspect
import math
import os
import statistics
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bitdial.errors import BitdialError, ConfigError
from bitdial.files.atomic import check_target, replacing
from bitdial.train import distributed
from bitdial.train.config import TrainConfig
from bitdial.train.history import History
from bitdial.train.step_report import StepReport


@dataclass
class Run:
    """What a callback sees of the run.

    `step` counts from 1 over the whole run, `epoch` from 0. `report` is of the last step, `row` the last epoch's of the
    history. `evaluates` says whether rows have `top1`, `measured` or (None) neither.
    """

    model: nn.Module
    config: TrainConfig
    history: History
    total_steps: int
    evaluates: str | None = None
    epoch: int = 0
    step: int = 0
    report: StepReport | None = None
    row: dict[str, Any] | None = None
    reason: str | None = None

    def stop(self, reason: str) -> None:
        """End the run after this step or epoch, as if it had been the last; the history says why."""
        self.reason = reason


class Callback:
    """Override what you need; every hook does nothing by itself. Under torchrun all processes call them."""

    def on_start(self, run: Run) -> None:
        """Before the first step, also of a run that goes on from a checkpoint."""

    def on_step(self, run: Run) -> None:
        """After each step. On a GPU, reading the report's tensors waits for the device."""

    def on_epoch(self, run: Run) -> None:
        """After each epoch and its evaluation."""

    def on_end(self, run: Run) -> None:
        """After the last epoch, or the one in which a callback stopped the run; not after an error or Ctrl-C."""

    def evaluating(self, run: Run) -> AbstractContextManager[None]:
        """What evaluation runs inside of; the model must be as before afterwards."""
        return nullcontext()

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint has to keep of it: tensors and JSON values by name."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict` gave."""


def check_callbacks(callbacks: object) -> tuple[Callback, ...]:
    """`callbacks` as a tuple; ConfigError for what is none, or whose hooks do not take the run."""
    if isinstance(callbacks, Callback) or not isinstance(callbacks, list | tuple):
        raise ConfigError(f"callbacks={callbacks!r:.60} must be a list of Callback objects")
    for one in callbacks:
        if not isinstance(one, Callback):
            raise ConfigError(f"the callback {one!r:.60} must be an object of a class that inherits from Callback")
        for name in ("on_start", "on_step", "on_epoch", "on_end", "evaluating"):
            try:
                inspect.signature(getattr(one, name)).bind(None)
            except TypeError as problem:
                raise ConfigError(
                    f"{type(one).__name__}.{name} must take the run and nothing else: {problem}"
                ) from problem
    return tuple(callbacks)


class Ema(Callback):
    """An exponential moving average of the weights, scales and norm statistics; evaluated, and the model's at the end.

    After step n the average moves by 1 - min(decay, (1 + n) / (10 + n)) towards the model, so that its start is soon
    forgotten. Training itself goes on from the model's own weights.
    """

    def __init__(self, decay: float = 0.999):
        if not 0 < decay < 1:
            raise ConfigError(f"decay={decay!r} must lie between 0 and 1")
        self.decay, self.steps = decay, 0
        self.average: dict[str, Tensor] = {}

    def on_start(self, run: Run) -> None:
        """Begin with the model as it is, unless the average came from a checkpoint."""
        own = run.model.state_dict()
        if self.average and {n: v.shape for n, v in self.average.items()} != {n: v.shape for n, v in own.items()}:
            raise ConfigError("the average in the checkpoint is of another model")
        self.average = {name: self.average.get(name, value).detach().to(value).clone() for name, value in own.items()}

    @torch.no_grad()
    def on_step(self, run: Run) -> None:
        """Move the average."""
        self.steps += 1
        rate = 1 - min(self.decay, (1 + self.steps) / (10 + self.steps))
        for name, value in run.model.state_dict().items():
            if value.is_floating_point():
                self.average[name].lerp_(value, rate)
            else:
                self.average[name].copy_(value)

    @contextmanager
    def evaluating(self, run: Run) -> Iterator[None]:
        """The model has the average meanwhile."""
        before = {name: value.clone() for name, value in run.model.state_dict().items()}
        _copy(self.average, run.model)
        try:
            yield
        finally:
            _copy(before, run.model)

    def on_end(self, run: Run) -> None:
        """The average becomes the model's."""
        _copy(self.average, run.model)

    def state_dict(self) -> dict[str, Any]:
        """The average and the number of steps in it."""
        return {"steps": self.steps, **{f"average.{name}": value for name, value in self.average.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict` gave."""
        self.steps = int(state["steps"])
        self.average = {name[len("average.") :]: value for name, value in state.items() if name != "steps"}


@torch.no_grad()
def _copy(values: Mapping[str, Tensor], model: nn.Module) -> None:
    for name, own in model.state_dict().items():
        own.copy_(values[name])


def mean_top1(row: dict[str, Any]) -> float:
    """The accuracy of an epoch, averaged over the widths."""
    return statistics.fmean(row["top1"].values())


class EarlyStopping(Callback):
    """Ends the run when `of(row)`, of which more is better, has not risen for `patience` epochs.

    EarlyStopping(5, of=lambda row: -row["measured"]["2"]["perplexity"])
    """

    def __init__(self, patience: int, *, of: Callable[[dict[str, Any]], float] = mean_top1):
        if type(patience) is not int or patience < 1:
            raise ConfigError(f"patience={patience!r} must be a whole number, at least 1")
        self.patience, self.of = patience, of
        self.best: float | None = None
        self.waited = 0

    def on_start(self, run: Run) -> None:
        """Refuse to wait for an accuracy that nobody measures."""
        if self.of is mean_top1 and run.evaluates != "top1":
            raise ConfigError(
                "EarlyStopping looks at the accuracy on evaluate_on, which this run lacks; pass evaluate_on, or "
                "say what to look at: EarlyStopping(5, of=lambda row: -row['loss']['2'])"
            )

    def on_epoch(self, run: Run) -> None:
        """Compare the epoch with the best."""
        assert run.row is not None
        value = float(self.of(run.row))
        if not math.isnan(value) and (self.best is None or value > self.best):
            self.best, self.waited = value, 0
            return
        self.waited += 1
        if self.waited >= self.patience:
            run.stop(f"no better than {self.best} for {self.waited} epochs")

    def state_dict(self) -> dict[str, Any]:
        """The best value, and for how long it has been."""
        return {"best": self.best, "waited": self.waited}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict` gave."""
        self.best, self.waited = state["best"], int(state["waited"])


class CsvLog(Callback):
    """A CSV file with a line for each epoch and width, written anew after each epoch from the history."""

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path)

    def on_start(self, run: Run) -> None:
        """Find out now whether it can be written."""
        check_target("CsvLog", self.path, "log.csv")

    def on_epoch(self, run: Run) -> None:
        """Write all epochs so far."""
        if distributed.rank() != 0:
            return
        lines = [line for row in run.history.rows for line in flat_rows(row)]
        columns = list(dict.fromkeys(name for line in lines for name in line))
        with replacing(self.path, error=BitdialError) as temporary, temporary.open("w", newline="") as file:
            writer = csv.DictWriter(file, columns)
            writer.writeheader()
            writer.writerows(lines)


def flat_rows(row: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A row of the history as one flat dict for each width: epoch, lr, seconds, bits, loss, train_top1, ..."""
    for bits in row["loss"]:
        line = {name: value for name, value in row.items() if not isinstance(value, dict)} | {"bits": bits}
        for name, values in row.items():
            if isinstance(values, dict) and bits in values:
                parts = values[bits]
                line |= {f"{name}.{n}": v for n, v in parts.items()} if isinstance(parts, dict) else {name: parts}
        yield line
