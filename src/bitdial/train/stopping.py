"""Ctrl-C and SIGTERM: a run finishes its step and saves itself before it ends."""

import logging
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bitdial.errors import TrainingError

log = logging.getLogger(__name__)


class StopRequest:
    """Whether a signal has asked the run to stop, and which."""

    def __init__(self) -> None:
        self.signal: int | None = None

    def is_set(self) -> bool:
        """Whether it has."""
        return self.signal is not None

    def problem(self, step: int, checkpoint: str | os.PathLike[str] | None) -> BaseException:
        """What to raise when the run has stopped and its state is in `checkpoint`.

        KeyboardInterrupt after Ctrl-C, as it would be without bitdial; else TrainingError, also in a process of several
        in which another was asked to stop.
        """
        where = "nothing was saved" if checkpoint is None else f"run again to go on from {checkpoint}"
        if self.signal == signal.SIGINT:
            return KeyboardInterrupt(f"stopped by Ctrl-C after step {step}; {where}")
        return TrainingError(f"stopped by SIGTERM after step {step}; {where}")


@contextmanager
def until_stopped() -> Iterator[StopRequest]:
    """A request that Ctrl-C (SIGINT) or SIGTERM sets, so that the loop can save first.

    A second Ctrl-C raises KeyboardInterrupt at once. A handler of SIGINT that is not Python's own stays in charge.
    Outside the main thread, where signals do not arrive, the request is never set.
    """
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return

    def ask(number: int, _: Any) -> None:
        request.signal = number
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            log.warning("Ctrl-C: the run ends after this step; once more ends it at once")

    before = {signal.SIGTERM: signal.signal(signal.SIGTERM, ask)}
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        before[signal.SIGINT] = signal.signal(signal.SIGINT, ask)
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
