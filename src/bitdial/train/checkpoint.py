"""Checkpoints: everything that decides what happens next, in one safetensors file, written atomically.

Model, optimizers and random states (see `bitdial.train.state`), schedule position, distillation targets and scale
floors. A resumed run equals one that never stopped, provided that the data repeats itself (`ArrayData` does).
"""

import functools
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from bitdial.dial.dial import unwrap
from bitdial.errors import CheckpointError
from bitdial.files.container import read_container, write_container
from bitdial.files.lock import sole_writer
from bitdial.train import distributed
from bitdial.train.sharding import whole
from bitdial.train.state import SavedState, checking, like, python_random, state_tensors, under
from bitdial.train.steps import JointStep

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")
log = logging.getLogger(__name__)

VERSION = 1
_OPERATIONAL = ("checkpoint_every", "cuda_graph", "fused")  # settings that do not change what is trained
_BEFORE = {
    "accumulate": 1,
    "steps_per_epoch": None,
    "lower_weight": 1.0,
}  # what a file means that was written before there were these


def save_checkpoint(path: str | os.PathLike[str], step: JointStep, extra: dict[str, Any] | None = None) -> None:
    """Write the state of `step`, with `extra` (JSON values) beside it. Every rank calls; rank 0 writes."""
    write_checkpoint(path, step, extra or {}, {})


def write_checkpoint(
    path: str | os.PathLike[str], step: JointStep, extra: dict[str, Any], beside: dict[str, Tensor]
) -> None:
    """As `save_checkpoint`, with the tensors `beside` too."""
    if any(hasattr(value, "to_local") for value in beside.values()):
        raise CheckpointError("a callback keeps tensors that are spread over processes, as Ema does; leave it out")
    tensors = state_tensors(unwrap(step.model), _optimizers(step), step=step.step)
    tensors |= {f"beside.{name}": value for name, value in beside.items()}
    if step.own is not None:
        tensors |= {f"own.{name}": value for name, value in step.own.tensors().items()}
    step.distiller.share()
    tensors |= {f"distiller.{name}": value for name, value in step.distiller.tensors().items()}
    tensors |= {f"floor.{i}": whole(value) for i, value in enumerate(step.guard.floors)}
    if distributed.rank() == 0:
        manifest = {
            "kind": "checkpoint",
            "version": VERSION,
            "step": step.step,
            "epoch": step.distiller.epoch,
            "run": _run(step),
            "config": step.config.to_dict(),
            "layers": _layers(step),
            "python_random": python_random(),
            "extra": extra,
            **({} if step.own is None else {"own_optimizer": step.own.values()}),
        }
        write_container(path, tensors, manifest, error=CheckpointError)
    distributed.barrier()


def load_checkpoint(path: str | os.PathLike[str], step: JointStep) -> dict[str, Any]:
    """Put the saved state into `step` and its model, in place; returns `extra`.

    Everything is checked before anything changes.
    """
    return read_checkpoint(path, step)[0]


def read_checkpoint(path: str | os.PathLike[str], step: JointStep) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """As `load_checkpoint`; returns the tensors beside it too."""
    path = Path(path)
    tensors, manifest, _ = read_container(path, error=CheckpointError)
    if manifest.get("kind") != "checkpoint" or manifest.get("version") != VERSION:
        raise CheckpointError(f"{path} is not a checkpoint of version {VERSION}")
    with checking(path):
        _compare_run(manifest, step)
        saved = SavedState(tensors, manifest["python_random"], unwrap(step.model), _optimizers(step))
        floors = [like(tensors[f"floor.{i}"], f) for i, f in enumerate(step.guard.floors)]
        targets = _distiller_state(tensors, step)
        if ("own_optimizer" in manifest) != (step.own is not None):
            raise CheckpointError("it was written with another optimizer of the weights; use the same")
        load_own = step.own.load(under(tensors, "own."), manifest["own_optimizer"]) if step.own is not None else None
        number, epoch, extra = int(manifest["step"]), int(manifest["epoch"]), dict(manifest["extra"])
    saved.restore()
    if load_own is not None:
        load_own()
    step.distiller.load(targets, epoch)
    step.guard.floors = floors
    step.graphs.clear()
    if step.slots is not None:
        step.slots.rebind()
    step.loss_sum.zero_()
    step.step = number
    return extra, under(tensors, "beside.")


def sole_user(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """`function`, with the file that its argument `checkpoint` names kept to this process while it runs.

    CheckpointError at once if another process has it: two runs would take turns in writing it. Of processes that train
    together, rank 0 writes, and so has the lock.
    """

    @functools.wraps(function)
    def alone(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        path: Any = kwargs.get("checkpoint")
        if path is None or not distributed.is_first():
            return function(*args, **kwargs)
        with sole_writer(path, work="a training", error=CheckpointError):
            return function(*args, **kwargs)

    return alone


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
            *([] if layer.fixed_bits is None else [layer.fixed_bits]),
        ]
        for name, layer in step.layers.items()
    }


def _compare_run(manifest: dict[str, Any], step: JointStep) -> None:
    then, now_there = manifest["run"]["processes"], distributed.world_size()
    if then != now_there:
        log.warning(
            "the checkpoint was written by %s processes and is gone on from in %s: sums round otherwise, and each "
            "process draws other random numbers",
            then,
            now_there,
        )
    for what, saved, now in (
        ("settings", {**_BEFORE, **manifest["config"]}, step.config.to_dict()),
        ("data or sensitivity", manifest["run"] | {"processes": now_there}, _run(step)),
        ("layers", manifest["layers"], _layers(step)),
    ):
        if changed := differences(saved, now):
            raise CheckpointError(
                f"it was written by a run with other {what} ({changed}); use the same, or another checkpoint file"
            )


def differences(saved: dict[str, Any], now: dict[str, Any]) -> str:
    """The settings that differ, up to three of them in words; empty if none does."""
    names = [n for n in sorted(saved.keys() | now.keys()) if n not in _OPERATIONAL and saved.get(n) != now.get(n)]
    shown = ", ".join(f"{n}: {saved.get(n)!r} then, {now.get(n)!r} now" for n in names[:3])
    return f"{shown} and {len(names) - 3} more" if len(names) > 3 else shown


def _optimizers(step: JointStep) -> dict[str, torch.optim.Optimizer]:
    scales = step.scale_optimizers
    named = {f"scales{bits}": o for bits, o in scales.items()} if step.config.scale_state == "per_bits" else {}
    if step.config.scale_state == "shared" and scales:
        named = {"scales": scales[step.bit_choices[0]]}
    return named if step.own is not None else {"weights": step.weight_optimizer, **named}


def _distiller_state(tensors: dict[str, Tensor], step: JointStep) -> dict[str, Tensor]:
    saved = under(tensors, "distiller.")
    for name, value in saved.items():
        if name not in ("previous", "current") or value.dim() != 2 or len(value) != step.distiller.samples:
            raise ValueError(f"distillation targets {name!r} of shape {tuple(value.shape)}")
    return saved
