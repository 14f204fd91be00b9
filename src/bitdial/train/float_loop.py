"""Train a float model: the start of every recipe, and the baseline that it is measured against."""

import math
import time
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bitdial.errors import CheckpointError, TrainingError
from bitdial.files.container import read_container, write_container
from bitdial.train import ArrayData, StepReport
from bitdial.train.checkpoint import differences
from bitdial.train.gpu.cuda_graph import StepGraphs
from bitdial.train.gpu.fuse import FastModel
from bitdial.train.optimizers import make_optimizer
from bitdial.train.progress import make_progress
from bitdial.train.state import SavedState, checking, python_random, state_tensors
from bitdial.train.stopping import until_stopped

FLOAT_BITS = 32
SAVE_EVERY = 10  # seconds, at the end of an epoch; epochs of small networks take less than writing to a slow disk
UNFINISHED = "unfinished float"


def train_float(
    model: nn.Module,
    data: ArrayData,
    *,
    epochs: int,
    lr: float,
    weight_decay: float,
    optimizer: str = "adam",
    checkpoint: Path | None = None,
    autocast: str | None = None,
    progress: bool = True,
) -> None:
    """Train `model` in place with a cosine schedule, and leave it in eval mode.

    On a GPU the step runs through fused kernels and as a CUDA graph, as in joint training. With `checkpoint`, the
    trained weights are kept there; if the file is there already, they are taken from it. Until then the run saves
    itself beside it every few epochs, on SIGTERM and Ctrl-C, and goes on from what it finds there.
    """
    settings = {
        "epochs": epochs,
        "lr": lr,
        "weight_decay": weight_decay,
        "optimizer": optimizer,
        "seed": data.seed,
        "samples": data.samples,
        "batch_size": data.batch_size,
        "autocast": autocast,
    }
    device = next(model.parameters()).device
    if checkpoint is not None and checkpoint.exists():
        tensors, manifest, _ = read_container(checkpoint, error=CheckpointError)
        if manifest != {"kind": "float", "settings": settings}:
            raise CheckpointError(f"{checkpoint} was trained with other settings; remove it or use another folder")
        model.load_state_dict(tensors)
        model.eval()
        _unfinished(checkpoint).unlink(missing_ok=True)  # of a run that another one overtook
        return
    stepper = make_optimizer(optimizer, list(model.parameters()), lr=lr, weight_decay=weight_decay)
    graphs, number, total = StepGraphs(), 0, epochs * len(data)
    if checkpoint is not None and _unfinished(checkpoint).exists():
        number = _resume(_unfinished(checkpoint), model, stepper, settings, total)
    last = torch.zeros((), device=device)
    fast = FastModel(model, fused=device.type == "cuda")

    def step(inputs: Tensor, targets: Tensor) -> Tensor:
        for parameter in model.parameters():
            parameter.grad = None
        with torch.autocast(device.type, torch.bfloat16, enabled=autocast is not None):
            loss = F.cross_entropy(fast(inputs), targets)
        fast.backward(loss)
        stepper.step()
        return loss.detach()

    def save() -> Path | None:
        """Write what there is, and say where."""
        if checkpoint is None:
            return None
        if number == total:
            finished = {"kind": "float", "settings": settings}
            write_container(checkpoint, model.state_dict(), finished, error=CheckpointError)
            _unfinished(checkpoint).unlink(missing_ok=True)
            return checkpoint
        tensors = state_tensors(model, {"weights": stepper}, step=number)
        state = {"kind": UNFINISHED, "settings": settings, "step": number, "python_random": python_random()}
        write_container(_unfinished(checkpoint), tensors, state, error=CheckpointError)
        return _unfinished(checkpoint)

    model.train()
    due = time.monotonic() + SAVE_EVERY
    with make_progress(progress, epochs, total) as view, until_stopped() as stop:
        for epoch in range(number // len(data), epochs):
            for batch in data.batches(epoch, start=number % len(data)):
                rate = lr * 0.5 * (1 + math.cos(math.pi * number / total))
                for group in stepper.param_groups:
                    group["lr"] = group["lr"].fill_(rate) if isinstance(group["lr"], Tensor) else rate
                inputs, targets = batch.inputs, batch.targets
                assert isinstance(inputs, Tensor)
                last.copy_(
                    cast(Tensor, graphs.run(step, inputs, targets)) if device.type == "cuda" else step(inputs, targets)
                )
                number += 1
                view.step(epoch, number, StepReport(loss={FLOAT_BITS: last}))
                if stop.is_set():
                    break
            if not bool(torch.isfinite(last)):
                raise TrainingError(f"float training, step {number}: the loss is not finite; lower the learning rate")
            if stop.is_set():
                raise stop.problem(number, save())
            if number == total or time.monotonic() >= due:
                save()
                due = time.monotonic() + SAVE_EVERY
            view.epoch({"epoch": epoch, "loss": {str(FLOAT_BITS): float(last)}})
    model.eval()


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
