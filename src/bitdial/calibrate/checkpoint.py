"""How far a calibration has come, in one safetensors file, written after each block.

It has the model's state and the reports of the blocks that are done. What the blocks give is computed again.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from bitdial.calibrate.config import CalibrateConfig
from bitdial.calibrate.report import BlockReport
from bitdial.errors import CheckpointError
from bitdial.files.container import read_container, write_container

VERSION = 1


class Checkpoint:
    """The file at `path`, or nothing if that is None. Made before anything of the model changes."""

    def __init__(
        self, path: str | os.PathLike[str] | None, model: nn.Module, config: CalibrateConfig, inputs: Sequence[Any]
    ):
        self.path, self.model = None if path is None else Path(path), model
        self.run: dict[str, Any] = {}
        if path is not None:
            self.run = {
                "config": json.loads(json.dumps(config.to_dict())),  # as it is read again: names of widths are text
                "model": _digest(t for _, t in sorted(model.state_dict().items())),
                "inputs": _digest(tree_leaves(inputs)),
            }

    def read(self) -> list[BlockReport]:
        """Put the saved state into the model, in place, if there is a file; the blocks that are done."""
        if self.path is None or not self.path.exists():
            return []
        tensors, manifest, _ = read_container(self.path, error=CheckpointError)
        if manifest.get("kind") != "calibration" or manifest.get("version") != VERSION:
            raise CheckpointError(f"{self.path} is not a calibration of version {VERSION}; choose another file")
        if odd := [key for key, value in self.run.items() if manifest["run"].get(key) != value]:
            raise CheckpointError(
                f"{self.path} is of a calibration with another {' and '.join(odd)}; start with the same prepared "
                "model, batches and settings, or remove the file"
            )
        try:
            reports = [BlockReport.from_dict(values) for values in manifest["blocks"]]
            self.model.load_state_dict(tensors, strict=True)
        except (RuntimeError, KeyError, TypeError, ValueError) as problem:
            raise CheckpointError(f"{self.path} does not fit the model: {problem}") from problem
        return reports

    def write(self, reports: list[dict[str, Any]]) -> None:
        """Save the model's state after the blocks of `reports`."""
        if self.path is not None:
            state = dict(self.model.state_dict())
            manifest = {"kind": "calibration", "version": VERSION, "run": self.run, "blocks": reports}
            write_container(self.path, state, manifest, error=CheckpointError)


def _digest(tensors: Iterable[Any]) -> str:
    total = hashlib.sha256()
    for tensor in tensors:
        if isinstance(tensor, Tensor):
            plain = tensor.detach().cpu().contiguous()
            total.update(f"\n{plain.dtype} {tuple(plain.shape)}\n".encode())
            if plain.numel():
                total.update(plain.reshape(-1).view(torch.uint8).numpy().data)
        else:
            total.update(repr(tensor).encode())
    return total.hexdigest()
