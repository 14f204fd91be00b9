"""What a calibration shows while it runs."""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

log = logging.getLogger(__name__)


class Progress(Protocol):
    """Receives how far it is: blocks that are done (with a fraction), the block at hand, errors by width."""

    def update(self, done: float, block: str, errors: dict[int, float]) -> None:
        """Show it."""
        ...


class LogProgress:
    """A line of log for each block."""

    def __init__(self) -> None:
        self._last = ""

    def update(self, done: float, block: str, errors: dict[int, float]) -> None:
        """Log a block once it is done."""
        if errors and done == int(done) and block != self._last:
            self._last = block
            log.info("calibrated block %d, %s  %s", done, block, describe(errors))


class BarProgress:
    """A live bar with the block, the error at each width and the time left."""

    def __init__(self, bar: Any, task: Any):
        self._bar, self._task, self._shown = bar, task, 0.0

    def update(self, done: float, block: str, errors: dict[int, float]) -> None:
        """Move the bar, ten times a second at the most."""
        if done == int(done) or time.monotonic() - self._shown > 0.1:
            self._shown = time.monotonic()
            self._bar.update(self._task, completed=done, description=block, status=describe(errors))


def describe(errors: dict[int, float]) -> str:
    """Errors by width in one line."""
    return "  ".join(f"{bits}b {error:.2g}" for bits, error in errors.items())


@contextmanager
def show_progress(blocks: int, *, show: bool) -> Iterator[Progress]:
    """A bar if asked for and rich is there, else lines of log."""
    if show:
        try:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
            from rich.progress import Progress as Bar
        except ImportError:
            log.info("rich is not installed, so there is no progress bar; pip install 'bitdial[cli]' brings it")
        else:
            columns = (
                TextColumn("{task.description}"),
                BarColumn(bar_width=20),
                MofNCompleteColumn(),
                TimeRemainingColumn(compact=True),
                TextColumn("{task.fields[status]}"),
            )
            with Bar(*columns, console=Console(stderr=True)) as bar:
                yield BarProgress(bar, bar.add_task("", total=blocks, status=""))
            return
    yield LogProgress()
