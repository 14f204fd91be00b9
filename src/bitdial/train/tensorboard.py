"""A callback that writes for TensorBoard. The only file that imports it; the extra is `tensorboard`."""

import os
from typing import Any

from bitdial.errors import ConfigError, MissingDependencyError
from bitdial.train import distributed
from bitdial.train.callbacks import Callback, Run, flat_rows


class TensorBoard(Callback):
    """Losses every `every` steps, and each epoch's row, as scalars by width: "loss/2 bits", "top1/8 bits".

    A run that goes on from a checkpoint hides what an earlier one wrote beyond it.
    """

    def __init__(self, folder: str | os.PathLike[str], *, every: int = 50):
        if type(every) is not int or every < 1:
            raise ConfigError(f"every={every!r} must be a whole number, at least 1")
        self.folder, self.every = folder, every
        self.writer: Any = None

    def on_start(self, run: Run) -> None:
        """Open the folder; MissingDependencyError if tensorboard is not installed."""
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as problem:
            raise MissingDependencyError.missing("tensorboard", "tensorboard") from problem
        if distributed.rank() == 0:
            self.writer = SummaryWriter(os.fspath(self.folder), purge_step=run.step + 1)

    def on_step(self, run: Run) -> None:
        """Write the losses, now and then: reading them waits for a GPU."""
        if self.writer is None or run.report is None or run.step % self.every:
            return
        self.writer.add_scalar("lr", run.report.lr, run.step)
        for bits, loss in run.report.loss.items():
            self.writer.add_scalar(f"loss/{bits} bits", float(loss), run.step)

    def on_epoch(self, run: Run) -> None:
        """Write the row, under the number of the step."""
        if self.writer is None or run.row is None:
            return
        for line in flat_rows(run.row):
            bits = line.pop("bits")
            for name, value in line.items():
                if name not in ("epoch", "lr", "seconds") and value is not None:
                    self.writer.add_scalar(f"epoch {name}/{bits} bits", value, run.step)
        self.writer.flush()

    def on_end(self, run: Run) -> None:
        """Close the file."""
        if self.writer is not None:
            self.writer.close()
