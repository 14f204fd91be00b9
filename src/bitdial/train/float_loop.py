"""Train a float model: the start of every recipe, and the baseline that it is measured against."""

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bitdial.errors import CheckpointError, TrainingError
from bitdial.files.container import read_container, write_container
from bitdial.kernels.cuda_graph import StepGraphs
from bitdial.train import StepReport
from bitdial.train.checkpoint import differences
from bitdial.train.data import ArrayData, Sample, TrainingData
from bitdial.train.gpu.fuse import FastModel
from bitdial.train.optimizers import make_optimizer
from bitdial.train.progress import make_progress
from bitdial.train.state import SavedState, checking, python_random, state_tensors
from bitdial.train.stopping import until_stopped

FLOAT_BITS = 32
SAVE_EVERY = 10  # seconds, at the end of an epoch; epochs of small networks take less than writing to a slow disk
UNFINISHED = "unfinished float"

BatchLoss = Callable[[nn.Module, Sample], Tensor]  # (model in training mode, batch) -> its loss


def train_float(
    model: nn.Module,
    data: ArrayData | TrainingData,
    *,
    epochs: int,
    lr: float,
    weight_decay: float,
    optimizer: str = "adam",
    checkpoint: Path | None = None,
    autocast: str | None = None,
    batch_loss: BatchLoss | None = None,
    clip_norm: float | None = None,
    progress: bool = True,
) -> None:
    """Train `model` in place with a cosine schedule, and leave it in eval mode.

    On a GPU the step runs through fused kernels and as a CUDA graph, as in joint training. With `checkpoint`, the
    trained weights are kept there; if the file is there already, they are taken from it. Until then the run saves
    itself beside it every few epochs, on SIGTERM and Ctrl-C, and goes on from what it finds there. `batch_loss` is for
    models and data of any form; without it the loss is cross-entropy. Such steps run as they are written.
    """
    settings: dict[str, Any] = {
        "epochs": epochs,
        "lr": lr,
        "weight_decay": weight_decay,
        "optimizer": optimizer,
        "seed": getattr(data, "seed", None),
        "samples": data.samples,
        "batch_size": getattr(data, "batch_size", None),
        "autocast": autocast,
    }
    if clip_norm is not None:
        settings["clip_norm"] = clip_norm
    if checkpoint is not None and checkpoint.exists():
        _take_finished(checkpoint, model, settings)
        return
    run = _FloatRun(model, data, settings, checkpoint, batch_loss)
    run.resume()
    model.train()
    due = time.monotonic() + SAVE_EVERY
    with make_progress(progress, epochs, run.total) as view, until_stopped() as stop:
        for epoch in range(run.number // len(data), epochs):
            for batch in data.batches(epoch, start=run.number % len(data)):
                loss = run.step(batch)
                view.step(epoch, run.number, StepReport(loss={FLOAT_BITS: loss}))
                if stop.is_set():
                    break
            run.check_loss()
            if stop.is_set():
                raise stop.problem(run.number, run.save())
            if run.number == run.total or time.monotonic() >= due:
                run.save()
                due = time.monotonic() + SAVE_EVERY
            view.epoch({"epoch": epoch, "loss": {str(FLOAT_BITS): float(run.loss)}})
    model.eval()


class _FloatRun:
    """A float training: its state, one step of it, and how it is kept. `number` steps of `total` are taken."""

    def __init__(
        self,
        model: nn.Module,
        data: TrainingData,
        settings: dict[str, Any],
        checkpoint: Path | None,
        batch_loss: BatchLoss | None,
    ):
        self.model, self.settings, self.checkpoint, self.batch_loss = model, settings, checkpoint, batch_loss
        self.device = next(model.parameters()).device
        rates = {"lr": settings["lr"], "weight_decay": settings["weight_decay"]}
        self.learned = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.optimizer = make_optimizer(settings["optimizer"], self.learned, **rates)
        self.fast = FastModel(model, fused=self.device.type == "cuda" and batch_loss is None)
        self.graphs = StepGraphs()
        self.number, self.total = 0, settings["epochs"] * len(data)
        self.loss = torch.zeros((), device=self.device)  # of the last step

    def resume(self) -> None:
        """Go on from what an earlier run left, if it left something."""
        if self.checkpoint is not None and (path := _unfinished(self.checkpoint)).exists():
            self.number = _resume(path, self.model, self.optimizer, self.settings, self.total)

    def step(self, batch: Sample) -> Tensor:
        """Train on one batch; returns the loss, in a tensor that the next step overwrites."""
        rate = self.settings["lr"] * 0.5 * (1 + math.cos(math.pi * self.number / self.total))
        for group in self.optimizer.param_groups:
            group["lr"] = group["lr"].fill_(rate) if isinstance(group["lr"], Tensor) else rate
        inputs, targets = batch.inputs, batch.targets
        if self.batch_loss is not None:
            loss: Any = self._own_update(batch, self.batch_loss)
        else:
            assert isinstance(inputs, Tensor)
            on_gpu = self.device.type == "cuda"
            loss = self.graphs.run(self._update, inputs, targets) if on_gpu else self._update(inputs, targets)
        self.loss.copy_(cast(Tensor, loss))
        self.number += 1
        return self.loss

    def _update(self, inputs: Tensor, targets: Tensor) -> Tensor:
        for parameter in self.model.parameters():
            parameter.grad = None
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.settings["autocast"] is not None):
            loss = F.cross_entropy(self.fast(inputs), targets)
        self.fast.backward(loss)
        self.optimizer.step()
        return loss.detach()

    def _own_update(self, batch: Sample, batch_loss: BatchLoss) -> Tensor:
        for parameter in self.model.parameters():
            parameter.grad = None
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.settings["autocast"] is not None):
            loss = batch_loss(self.model, batch)
        loss.backward()
        if (limit := self.settings.get("clip_norm")) is not None:
            nn.utils.clip_grad_norm_(self.learned, limit)
        self.optimizer.step()
        return loss.detach()

    def check_loss(self) -> None:
        """Raise TrainingError unless the last loss is finite."""
        if not bool(torch.isfinite(self.loss)):
            raise TrainingError(f"float training, step {self.number}: the loss is not finite; lower the learning rate")

    def save(self) -> Path | None:
        """Write what there is, and say where."""
        if self.checkpoint is None:
            return None
        unfinished = _unfinished(self.checkpoint)
        if self.number == self.total:
            finished = {"kind": "float", "settings": self.settings}
            write_container(self.checkpoint, self.model.state_dict(), finished, error=CheckpointError)
            unfinished.unlink(missing_ok=True)
            return self.checkpoint
        tensors = state_tensors(self.model, {"weights": self.optimizer}, step=self.number)
        state = {
            "kind": UNFINISHED,
            "settings": self.settings,
            "step": self.number,
            "python_random": python_random(),
        }
        write_container(unfinished, tensors, state, error=CheckpointError)
        return unfinished


def _take_finished(checkpoint: Path, model: nn.Module, settings: dict[str, Any]) -> None:
    """Give `model` the trained weights at `checkpoint`, in place, and leave it in eval mode."""
    tensors, manifest, _ = read_container(checkpoint, error=CheckpointError)
    if manifest != {"kind": "float", "settings": settings}:
        raise CheckpointError(f"{checkpoint} was trained with other settings; remove it or use another folder")
    model.load_state_dict(tensors)
    model.eval()
    _unfinished(checkpoint).unlink(missing_ok=True)  # of a run that another one overtook


def _unfinished(checkpoint: Path) -> Path:
    """Where the state of a run lies that is to end in `checkpoint`.

    Runs that share a float model and train it at once share this file too. Each of them replaces it whole by its own
    state, of the same course, and each can go on from any of these; `checkpoint` is there before it is removed.
    """
    return checkpoint.with_suffix(".unfinished.ckpt")


def _resume(
    path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, settings: dict[str, Any], total: int
) -> int:
    """Put the state at `path` into `model` and `optimizer`, in place; returns how many of `total` steps it has taken.

    Everything is checked before anything changes.
    """
    try:
        tensors, manifest, _ = read_container(path, error=CheckpointError)
        with checking(path):
            if manifest["kind"] != UNFINISHED:
                raise CheckpointError("it is not the state of a float stage")
            if changed := differences(manifest["settings"], settings):
                raise CheckpointError(f"it was begun with other settings ({changed})")
            number = manifest["step"]
            if type(number) is not int or not 0 < number < total:
                raise CheckpointError(f"step {number!r} does not lie between 0 and {total}")
            saved = SavedState(tensors, manifest["python_random"], model, {"weights": optimizer})
    except CheckpointError as problem:
        raise CheckpointError(
            f"{problem}; remove {path} to begin the float stage anew, or use another folder"
        ) from problem
    saved.restore()
    return number
