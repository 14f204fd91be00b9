"""Checkpoints: everything that decides what happens next, in one safetensors file, written atomically.

Model, optimizers, schedule position, distillation targets, scale floors and random states of every rank. A resumed run
equals one that never stopped, provided that the data repeats itself (`ArrayData` does).
"""

import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bitdial.container import read_container, write_container
from bitdial.errors import CheckpointError, TrainingError
from bitdial.plan import unwrap
from bitdial.train import distributed
from bitdial.train.steps import JointStep

VERSION = 1


def save_checkpoint(path: str | os.PathLike[str], step: JointStep, extra: dict[str, Any] | None = None) -> None:
    """Write the state of `step`, with `extra` (JSON values) beside it. Every rank calls; rank 0 writes."""
    tensors: dict[str, Tensor] = {}
    for name, value in unwrap(step.model).state_dict().items():
        if not isinstance(value, Tensor):
            raise CheckpointError(f"the model's state {name!r} is not a tensor; bitdial does not write objects")
        if value.is_floating_point() and not bool(torch.isfinite(value).all()):
            raise TrainingError(
                f"step {step.step}: {name!r} holds NaN or infinity; the last checkpoint is kept as it is"
            )
        tensors[f"model.{name}"] = value
    for key, optimizer in _optimizers(step).items():
        for i, state in optimizer.state_dict()["state"].items():
            for name, value in state.items():
                if value is not None:
                    tensors[f"optimizer.{key}.{i}.{name}"] = torch.as_tensor(value)
    tensors |= {f"distiller.{name}": value for name, value in step.distiller.tensors().items()}
    tensors |= {f"floor.{i}": value for i, value in enumerate(step.guard.floors)}
    tensors |= _random_tensors()
    if distributed.rank() == 0:
        manifest = {
            "kind": "checkpoint",
            "version": VERSION,
            "step": step.step,
            "epoch": step.distiller.epoch,
            "total_steps": step.total_steps,
            "config": step.config.to_dict(),
            "python_random": _python_random(),
            "world_size": distributed.world_size(),
            "extra": extra or {},
        }
        write_container(path, tensors, manifest, error=CheckpointError)
    distributed.barrier()


def load_checkpoint(path: str | os.PathLike[str], step: JointStep) -> dict[str, Any]:
    """Put the saved state into `step` and its model, in place; returns `extra`.

    Nothing changes if the file does not fit.
    """
    path = Path(path)
    tensors, manifest, _ = read_container(path, error=CheckpointError)
    if manifest.get("kind") != "checkpoint" or manifest.get("version") != VERSION:
        raise CheckpointError(f"{path} is not a checkpoint of version {VERSION}")
    if differences := _differences(manifest["config"], step.config.to_dict()):
        raise CheckpointError(
            f"{path} was written by a run with other settings ({differences}); "
            "use the same ones, or another checkpoint file"
        )
    if manifest["total_steps"] != step.total_steps or manifest["world_size"] != distributed.world_size():
        raise CheckpointError(
            f"{path} was written by a run of {manifest['total_steps']} steps on "
            f"{manifest['world_size']} processes, this one has {step.total_steps} on "
            f"{distributed.world_size()}; data and processes must be the same"
        )
    model = unwrap(step.model)
    saved = _under(tensors, "model.")
    own = {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}
    for name in saved.keys() | own.keys():
        if name not in saved or name not in own or saved[name].shape != own[name].shape:
            raise CheckpointError(f"{path} does not fit the model: {name!r} is missing or has another shape")
    model.load_state_dict(saved)
    for key, optimizer in _optimizers(step).items():
        state: dict[int, dict[str, Tensor]] = {}
        for name, value in _under(tensors, f"optimizer.{key}.").items():
            i, field = name.split(".")
            state.setdefault(int(i), {})[field] = value
        optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
    step.distiller.load(_under(tensors, "distiller."), manifest["epoch"])
    device = next(model.parameters()).device
    step.guard.floors = [tensors[f"floor.{i}"].to(device) for i in range(len(step.guard.floors))]
    step.step = manifest["step"]
    _restore_random(tensors, manifest["python_random"])
    return manifest["extra"]


def _optimizers(step: JointStep) -> dict[str, torch.optim.Optimizer]:
    if step.config.scale_state == "shared":
        return {"weights": step.weight_optimizer, "scales": step.scale_optimizers[step.bit_choices[0]]}
    return {"weights": step.weight_optimizer} | {f"scales{b}": o for b, o in step.scale_optimizers.items()}


def _under(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name[len(prefix) :]: value for name, value in tensors.items() if name.startswith(prefix)}


def _differences(saved: dict[str, Any], now: dict[str, Any]) -> str:
    names = [n for n in sorted(saved.keys() | now.keys()) if n != "checkpoint_every" and saved.get(n) != now.get(n)]
    return ", ".join(f"{n}: {saved.get(n)!r} then, {now.get(n)!r} now" for n in names)


# --- random states --------------------------------------------------------------------------------


def _random_tensors() -> dict[str, Tensor]:
    """States of torch's generators (of every rank) and numpy's (of rank 0)."""
    states = {f"random.cpu.{i}": s for i, s in enumerate(distributed.gather(torch.get_rng_state()))}
    if torch.cuda.is_available():
        mine = torch.cuda.get_rng_state().cuda()
        states |= {f"random.cuda.{i}": s.cpu() for i, s in enumerate(distributed.gather(mine))}
    _, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    states["random.numpy.keys"] = torch.from_numpy(np.asarray(keys, dtype=np.int64))
    states["random.numpy.rest"] = torch.tensor([position, has_gauss, gauss], dtype=torch.float64)
    return states


def _python_random() -> list[Any]:
    version, internal, gauss = random.getstate()
    return [version, list(internal), gauss]


def _restore_random(tensors: dict[str, Tensor], python_random: list[Any]) -> None:
    mine = distributed.rank()
    torch.set_rng_state(tensors[f"random.cpu.{mine}"])
    if torch.cuda.is_available() and f"random.cuda.{mine}" in tensors:
        torch.cuda.set_rng_state(tensors[f"random.cuda.{mine}"])
    keys = tensors["random.numpy.keys"].numpy().astype(np.uint32)
    position, has_gauss, gauss = tensors["random.numpy.rest"].tolist()
    np.random.set_state(("MT19937", keys, int(position), int(has_gauss), gauss))
    version, internal, next_gauss = python_random
    random.setstate((version, tuple(internal), next_gauss))
