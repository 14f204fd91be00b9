"""Train a float model: the start of every recipe, and the baseline that it is measured against."""

import math
from pathlib import Path
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bitdial.container import read_container, write_container
from bitdial.errors import CheckpointError, TrainingError
from bitdial.train import ArrayData
from bitdial.train.fuse import FastModel
from bitdial.train.graph import StepGraphs
from bitdial.train.optimizers import make_optimizer


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
) -> None:
    """Train `model` in place with a cosine schedule, and leave it in eval mode.

    On a GPU the step runs through fused kernels and as a CUDA graph, as in joint training. With `checkpoint`, the
    trained weights are kept there; if the file is there already, they are taken from it.
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
        return
    stepper = make_optimizer(optimizer, list(model.parameters()), lr=lr, weight_decay=weight_decay)
    graphs, number, total = StepGraphs(), 0, epochs * len(data)
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

    model.train()
    for epoch in range(epochs):
        for batch in data.batches(epoch):
            rate = lr * 0.5 * (1 + math.cos(math.pi * number / total))
            for group in stepper.param_groups:
                group["lr"] = group["lr"].fill_(rate) if isinstance(group["lr"], Tensor) else rate
            inputs, targets = batch.inputs, batch.targets
            assert isinstance(inputs, Tensor)
            last.copy_(
                cast(Tensor, graphs.run(step, inputs, targets)) if device.type == "cuda" else step(inputs, targets)
            )
            number += 1
        if not bool(torch.isfinite(last)):
            raise TrainingError(f"float training, step {number}: the loss is not finite; lower the learning rate")
    model.eval()
    if checkpoint is not None:
        write_container(checkpoint, model.state_dict(), {"kind": "float", "settings": settings}, error=CheckpointError)
