"""Train a float model: the start of every recipe, and the baseline that it is measured against."""

import math
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from bitdial.container import read_container, write_container
from bitdial.errors import CheckpointError, TrainingError
from bitdial.train import ArrayData


def train_float(
    model: nn.Module, data: ArrayData, *, epochs: int, lr: float, weight_decay: float, checkpoint: Path | None = None
) -> None:
    """Train `model` in place with Adam and a cosine schedule, and leave it in eval mode.

    With `checkpoint`, the trained weights are kept there; if the file is there already, they are taken from it.
    """
    settings = {"epochs": epochs, "lr": lr, "weight_decay": weight_decay, "seed": data.seed, "samples": data.samples}
    if checkpoint is not None and checkpoint.exists():
        tensors, manifest, _ = read_container(checkpoint, error=CheckpointError)
        if manifest != {"kind": "float", "settings": settings}:
            raise CheckpointError(f"{checkpoint} was trained with other settings; remove it or use another folder")
        model.load_state_dict(tensors)
        model.eval()
        return
    optimizer = torch.optim.Adam(model.parameters(), lr=lr, weight_decay=weight_decay)
    step, total = 0, epochs * len(data)
    model.train()
    for epoch in range(epochs):
        for batch in data.batches(epoch):
            for group in optimizer.param_groups:
                group["lr"] = lr * 0.5 * (1 + math.cos(math.pi * step / total))
            loss = F.cross_entropy(model(batch.inputs), batch.targets)
            if not bool(torch.isfinite(loss)):
                raise TrainingError(
                    f"float training, step {step}: the loss is {float(loss):g}; lower the learning rate"
                )
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
    model.eval()
    if checkpoint is not None:
        write_container(checkpoint, model.state_dict(), {"kind": "float", "settings": settings}, error=CheckpointError)
