"""What a training run shows while it runs. The only file that imports rich."""

import logging
import time
from types import TracebackType
from typing import Any, Protocol, Self

from bitdial.train.step_report import StepReport

log = logging.getLogger(__name__)


class Progress(Protocol):
    """Receives each step's report; use it as a context manager."""

    def __enter__(self) -> Self:
        """Begin to show."""
        ...

    def __exit__(self, *problem: Any) -> None:
        """End, whatever happened."""
        ...

    def step(self, epoch: int, step: int, report: StepReport) -> None:
        """Called after each step, with its number in the whole run, from 1."""
        ...

    def epoch(self, row: dict[str, Any]) -> None:
        """Called after each epoch with its row of the history."""
        ...


class LogProgress:
    """One line of log an epoch: for runs without a terminal, and where rich is not installed."""

    def __init__(self, epochs: int, total_steps: int):
        self.epochs = epochs

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *problem: Any) -> None:
        pass

    def step(self, epoch: int, step: int, report: StepReport) -> None:
        """Nothing between epochs."""

    def epoch(self, row: dict[str, Any]) -> None:
        """Log the epoch's loss and accuracy per width."""
        log.info("epoch %d/%d  %s", row["epoch"] + 1, self.epochs, describe(row))


class BarProgress:
    """A live bar with loss and accuracy per bit-width."""

    def __init__(self, epochs: int, total_steps: int):
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        self.epochs = epochs
        self._total, self._shown = total_steps, 0.0
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            TimeRemainingColumn(compact=True),
            TextColumn("{task.fields[status]}"),
            console=Console(stderr=True),  # results alone are on stdout
        )
        self._task = self._bar.add_task(f"epoch 1/{epochs}", total=total_steps, status="")

    def __enter__(self) -> Self:
        self._bar.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.__exit__(kind, problem, trace)

    def step(self, epoch: int, step: int, report: StepReport) -> None:
        """Move the bar, ten times a second at the most: reading a loss waits for the GPU."""
        if time.monotonic() - self._shown < 0.1 and step < self._total:
            return
        self._shown = time.monotonic()
        parts = []
        for bits, loss in report.loss.items():
            share = f" {100 * float(report.correct[bits]) / report.seen:.0f}%" if bits in report.correct else ""
            parts.append(f"{bits}b {float(loss):.3f}{share}")
        text = "  ".join(parts)
        self._bar.update(self._task, completed=step, description=f"epoch {epoch + 1}/{self.epochs}", status=text)

    def epoch(self, row: dict[str, Any]) -> None:
        """The bar says enough."""


def make_progress(show: bool, epochs: int, total_steps: int) -> Progress:
    """A bar if asked for and rich is there, else lines of log."""
    if show:
        try:
            return BarProgress(epochs, total_steps)
        except ImportError:
            log.info("rich is not installed, so there is no progress bar; pip install 'bitdial[cli]' brings it")
    return LogProgress(epochs, total_steps)


def describe(row: dict[str, Any]) -> str:
    """An epoch's row of the history in one line."""
    parts = []
    for bits, loss in row["loss"].items():
        shares = [f"{100 * row[key][bits]:.1f}%" for key in ("train_top1", "top1") if bits in row.get(key, {})]
        measured = row.get("measured", {}).get(bits, {})
        named = measured if isinstance(measured, dict) else {"": measured}
        numbers = [
            f"{name} {value}".strip() if value is None else f"{name} {value:.4g}".strip()
            for name, value in named.items()
        ]
        parts.append(" ".join([f"{bits}b {loss:.3f}", *(["/".join(shares)] if shares else []), *numbers]))
    return "  ".join(parts)
