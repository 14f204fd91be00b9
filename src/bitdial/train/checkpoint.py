"""Checkpoints: everything that decides what happens next, in one safetensors file, written atomically.

Model, optimizers, schedule position, distillation targets, scale floors and random states (torch's of every rank,
numpy's and Python's of rank 0). A resumed run equals one that never stopped, provided that the data repeats itself
(`ArrayData` does).
"""

import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from bitdial.container import read_container, write_container
from bitdial.errors import CheckpointError, TrainingError
from bitdial.plan import unwrap
from bitdial.train import distributed
from bitdial.train.steps import JointStep

VERSION = 1
_OPERATIONAL = ("checkpoint_every", "cuda_graph", "fused")  # settings that do not change what is trained


def save_checkpoint(path: str | os.PathLike[str], step: JointStep, extra: dict[str, Any] | None = None) -> None:
    """Write the state of `step`, with `extra` (JSON values) beside it. Every rank calls; rank 0 writes."""
    model = unwrap(step.model)
    _check_finite(model, step.step)
    tensors: dict[str, Tensor] = {}
    for name, value in model.state_dict().items():
        if not isinstance(value, Tensor):
            raise CheckpointError(f"the model's state {name!r} is not a tensor; bitdial does not write objects")
        tensors[f"model.{name}"] = value
    for key, optimizer in _optimizers(step).items():
        for i, state in optimizer.state_dict()["state"].items():
            for name, value in state.items():
                if value is not None:
                    tensors[f"optimizer.{key}.{i}.{name}"] = torch.as_tensor(value)
    step.distiller.share()
    tensors |= {f"distiller.{name}": value for name, value in step.distiller.tensors().items()}
    tensors |= {f"floor.{i}": value for i, value in enumerate(step.guard.floors)}
    tensors |= _random_tensors()
    if distributed.rank() == 0:
        manifest = {
            "kind": "checkpoint",
            "version": VERSION,
            "step": step.step,
            "epoch": step.distiller.epoch,
            "run": _run(step),
            "config": step.config.to_dict(),
            "layers": _layers(step),
            "python_random": _python_random(),
            "extra": extra or {},
        }
        write_container(path, tensors, manifest, error=CheckpointError)
    distributed.barrier()


def load_checkpoint(path: str | os.PathLike[str], step: JointStep) -> dict[str, Any]:
    """Put the saved state into `step` and its model, in place; returns `extra`.

    Everything is checked before anything changes.
    """
    path = Path(path)
    tensors, manifest, _ = read_container(path, error=CheckpointError)
    if manifest.get("kind") != "checkpoint" or manifest.get("version") != VERSION:
        raise CheckpointError(f"{path} is not a checkpoint of version {VERSION}")
    try:
        _compare_run(manifest, step)
        saved = _model_state(tensors, unwrap(step.model))
        optimizers = {key: _optimizer_state(tensors, key, o) for key, o in _optimizers(step).items()}
        floors = [_like(tensors[f"floor.{i}"], f) for i, f in enumerate(step.guard.floors)]
        targets = _distiller_state(tensors, step)
        randoms = _RandomStates(tensors, manifest["python_random"])
        number, epoch, extra = int(manifest["step"]), int(manifest["epoch"]), dict(manifest["extra"])
    except CheckpointError as problem:
        raise CheckpointError(f"{path}: {problem}") from problem
    except (KeyError, IndexError, TypeError, ValueError, RuntimeError) as problem:
        raise CheckpointError(f"{path} lacks or garbles a part of the state: {problem!r}") from problem
    unwrap(step.model).load_state_dict(saved)
    for key, optimizer in _optimizers(step).items():
        optimizer.load_state_dict(optimizers[key])
    step.distiller.load(targets, epoch)
    step.guard.floors = floors
    step.graphs.clear()
    if step.seats is not None:
        step.seats.adopt()
    step.loss_sum.zero_()
    step.step = number
    randoms.restore()
    return extra


def _check_finite(model: nn.Module, step: int) -> None:
    """Refuse to replace a good checkpoint by a spoilt one. Other buffers may be infinite on purpose (masks)."""
    statistics = (
        (f"{name}.{key}", value)
        for name, module in model.named_modules()
        if isinstance(module, nn.modules.batchnorm._BatchNorm)
        for key, value in module.named_buffers()
    )
    for name, value in (*model.named_parameters(), *statistics):
        if value.is_floating_point() and not bool(torch.isfinite(value).all()):
            raise TrainingError(f"step {step}: {name!r} holds NaN or infinity; the last checkpoint is kept as it is")


def _run(step: JointStep) -> dict[str, Any]:
    return {
        "total_steps": step.total_steps,
        "samples": step.samples,
        "processes": distributed.world_size(),
        "sensitivity": step.sensitivity,
    }


def _layers(step: JointStep) -> dict[str, list[Any]]:
    """What decides the codes of each layer, and which norms share parameters: it shows in no tensor."""
    norms = unwrap(step.model).named_modules()
    shared = {n: [m.transitions] for n, m in norms if getattr(m, "transitions", None) == "statistics"}
    return shared | {
        name: [
            layer.weight_quantizer.scheme,
            layer.weight_quantizer.ties,
            list(layer.bit_choices),
            layer.act_quantizer.kind if layer.act_quantizer is not None else "float",
        ]
        for name, layer in step.layers.items()
    }


def _compare_run(manifest: dict[str, Any], step: JointStep) -> None:
    for what, saved, now in (
        ("settings", manifest["config"], step.config.to_dict()),
        ("data, processes or sensitivity", manifest["run"], _run(step)),
        ("layers", manifest["layers"], _layers(step)),
    ):
        if differences := _differences(saved, now):
            raise CheckpointError(
                f"it was written by a run with other {what} ({differences}); use the same, or another checkpoint file"
            )


def _differences(saved: dict[str, Any], now: dict[str, Any]) -> str:
    names = [n for n in sorted(saved.keys() | now.keys()) if n not in _OPERATIONAL and saved.get(n) != now.get(n)]
    shown = ", ".join(f"{n}: {saved.get(n)!r} then, {now.get(n)!r} now" for n in names[:3])
    return f"{shown} and {len(names) - 3} more" if len(names) > 3 else shown


def _under(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name[len(prefix) :]: value for name, value in tensors.items() if name.startswith(prefix)}


def _like(saved: Tensor, own: Tensor) -> Tensor:
    if saved.shape != own.shape or saved.dtype != own.dtype:
        raise ValueError(f"{saved.dtype} {tuple(saved.shape)} in place of {own.dtype} {tuple(own.shape)}")
    return saved.to(own.device)


def _model_state(tensors: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    saved, own = _under(tensors, "model."), model.state_dict()
    for name in sorted(saved.keys() | own.keys()):
        fits = name in saved and name in own and saved[name].shape == own[name].shape
        if not fits or saved[name].dtype != own[name].dtype:
            raise CheckpointError(f"it does not fit the model: {name!r} is missing or has another shape or type")
    return saved


def _optimizers(step: JointStep) -> dict[str, torch.optim.Optimizer]:
    scales = step.scale_optimizers
    named = {f"scales{bits}": o for bits, o in scales.items()} if step.config.scale_state == "per_bits" else {}
    if step.config.scale_state == "shared" and scales:
        named = {"scales": scales[step.bit_choices[0]]}
    return {"weights": step.weight_optimizer, **named}


def _optimizer_state(tensors: dict[str, Tensor], key: str, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    fields = {"momentum_buffer"} if isinstance(optimizer, torch.optim.SGD) else {"step", "exp_avg", "exp_avg_sq"}
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    state: dict[int, dict[str, Tensor]] = {}
    for name, value in _under(tensors, f"optimizer.{key}.").items():
        number, field = name.split(".")
        state.setdefault(int(number), {})[field] = value
    for i, entry in state.items():
        if set(entry) != fields or not 0 <= i < len(parameters):
            raise ValueError(f"optimizer {key!r}, parameter {i}: {sorted(entry)}")
        for field, value in entry.items():
            if field != "step":  # laid out in memory as the parameter is, which fused optimizers insist on
                own = parameters[i].detach()
                entry[field] = torch.empty_like(own).copy_(_like(value, own))
            elif value.numel() != 1:
                raise ValueError(f"optimizer {key!r}, parameter {i}: a step of shape {tuple(value.shape)}")
    return {"state": state, "param_groups": optimizer.state_dict()["param_groups"]}


def _distiller_state(tensors: dict[str, Tensor], step: JointStep) -> dict[str, Tensor]:
    saved = _under(tensors, "distiller.")
    for name, value in saved.items():
        if name not in ("previous", "current") or value.dim() != 2 or len(value) != step.distiller.samples:
            raise ValueError(f"distillation targets {name!r} of shape {tuple(value.shape)}")
    return saved


# --- random states --------------------------------------------------------------------------------


def _random_tensors() -> dict[str, Tensor]:
    """States of torch's generators (of every rank) and numpy's (of rank 0)."""
    states = {f"random.cpu.{i}": s for i, s in enumerate(distributed.gather(torch.get_rng_state()))}
    if torch.cuda.is_available():
        mine = torch.cuda.get_rng_state()
        states |= {f"random.cuda.{i}": s for i, s in enumerate(distributed.gather(mine))}
    _, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    states["random.numpy.keys"] = torch.from_numpy(np.asarray(keys, dtype=np.int64))
    states["random.numpy.rest"] = torch.tensor([position, has_gauss, gauss], dtype=torch.float64)
    return states


def _python_random() -> list[Any]:
    version, internal, gauss = random.getstate()
    return [version, list(internal), gauss]


class _RandomStates:
    """Saved random states, tried on generators of their own before they may replace the global ones."""

    def __init__(self, tensors: dict[str, Tensor], python_random: list[Any]):
        mine = distributed.rank()
        self.cpu = tensors[f"random.cpu.{mine}"]
        torch.Generator().set_state(self.cpu)
        self.cuda = tensors.get(f"random.cuda.{mine}") if torch.cuda.is_available() else None
        if self.cuda is not None:
            torch.Generator("cuda").set_state(self.cuda)
        keys = tensors["random.numpy.keys"].numpy().astype(np.uint32)
        position, has_gauss, gauss = tensors["random.numpy.rest"].tolist()
        self.numpy = ("MT19937", keys, int(position), int(has_gauss), gauss)
        np.random.RandomState().set_state(self.numpy)
        version, internal, next_gauss = python_random
        self.python = (version, tuple(internal), next_gauss)
        random.Random().setstate(self.python)

    def restore(self) -> None:
        """Make them the states of the global generators."""
        torch.set_rng_state(self.cpu)
        if self.cuda is not None:
            torch.cuda.set_rng_state(self.cuda)
        np.random.set_state(self.numpy)
        random.setstate(self.python)
