"""The part of a checkpoint that every training has: model, optimizers and random states.

Torch's random states are of every rank, numpy's and Python's of rank 0.
"""

import hashlib
import os
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from bitdial.errors import CheckpointError, TrainingError
from bitdial.train import distributed
from bitdial.train.sharding import local, spread_like, whole


def state_tensors(model: nn.Module, optimizers: Mapping[str, torch.optim.Optimizer], *, step: int) -> dict[str, Tensor]:
    """What a file has to hold so that training goes on from here, beside `python_random()`. Every rank calls."""
    _check_finite(model, step)
    tensors: dict[str, Tensor] = {}
    for name, value in model.state_dict().items():
        if not isinstance(value, Tensor):
            raise CheckpointError(f"the model's state {name!r} is not a tensor; bitdial does not write objects")
        tensors[f"model.{name}"] = whole(value)
    for key, optimizer in optimizers.items():
        for i, state in optimizer.state_dict()["state"].items():
            for name, value in state.items():
                if value is not None:
                    tensors[f"optimizer.{key}.{i}.{name}"] = whole(torch.as_tensor(value))
    return tensors | _random_tensors()


class SavedState:
    """Such a state as a file has it, checked against what it is for, which stays as it is until `restore`."""

    def __init__(
        self,
        tensors: dict[str, Tensor],
        python_random: list[Any],
        model: nn.Module,
        optimizers: Mapping[str, torch.optim.Optimizer],
    ):
        self._model, self._optimizers = model, optimizers
        self._model_state = _model_state(tensors, model)
        self._optimizer_states = {key: _optimizer_state(tensors, key, o) for key, o in optimizers.items()}
        self._randoms = _RandomStates(tensors, python_random)

    def restore(self) -> None:
        """Put it into the model, the optimizers and the global generators, in place."""
        self._model.load_state_dict(self._model_state)
        for key, optimizer in self._optimizers.items():
            optimizer.load_state_dict(self._optimizer_states[key])
        self._randoms.restore()


@contextmanager
def checking(path: str | os.PathLike[str]) -> Iterator[None]:
    """Whatever the block finds wrong with the content of `path` becomes a CheckpointError that names the file."""
    try:
        yield
    except CheckpointError as problem:
        raise CheckpointError(f"{path}: {problem}") from problem
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError) as problem:
        raise CheckpointError(f"{path} lacks or garbles a part of the state: {problem!r}") from problem


def under(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Those of `tensors` whose names begin with `prefix`, by the rest of the name."""
    return {name[len(prefix) :]: value for name, value in tensors.items() if name.startswith(prefix)}


def like(saved: Tensor, own: Tensor) -> Tensor:
    """`saved` on the device of `own`, spread as that is, if it has its shape and type."""
    if saved.shape != own.shape or saved.dtype != own.dtype:
        raise ValueError(f"{saved.dtype} {tuple(saved.shape)} in place of {own.dtype} {tuple(own.shape)}")
    return spread_like(saved.to(own.device), own)


def _check_finite(model: nn.Module, step: int) -> None:
    """Refuse to replace a good checkpoint by a spoilt one. Other buffers may be infinite on purpose (masks)."""
    statistics = (
        (f"{name}.{key}", value)
        for name, module in model.named_modules()
        if isinstance(module, nn.modules.batchnorm._NormBase)
        for key, value in module.named_buffers()
    )
    everything = ((name, local(value)) for name, value in (*model.named_parameters(), *statistics))
    spoilt = (name for name, value in everything if value.is_floating_point() and not bool(value.isfinite().all()))
    found = next(spoilt, None)
    if distributed.any_rank(found is not None):
        raise TrainingError(
            f"step {step}: {'a part of another process' if found is None else repr(found)} holds NaN or infinity; the "
            "last checkpoint is kept as it is"
        )


def _model_state(tensors: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    saved, own = under(tensors, "model."), model.state_dict()
    for name in sorted(saved.keys() | own.keys()):
        fits = name in saved and name in own and saved[name].shape == own[name].shape
        if not fits or saved[name].dtype != own[name].dtype:
            raise CheckpointError(f"it does not fit the model: {name!r} is missing or has another shape or type")
    return {name: spread_like(value, own[name]) for name, value in saved.items()}


def _optimizer_state(tensors: dict[str, Tensor], key: str, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    fields = {"momentum_buffer"} if isinstance(optimizer, torch.optim.SGD) else {"step", "exp_avg", "exp_avg_sq"}
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    state: dict[int, dict[str, Tensor]] = {}
    for name, value in under(tensors, f"optimizer.{key}.").items():
        number, field = name.split(".")
        state.setdefault(int(number), {})[field] = value
    for i, entry in state.items():
        if set(entry) != fields or not 0 <= i < len(parameters):
            raise ValueError(f"optimizer {key!r}, parameter {i}: {sorted(entry)}")
        for field, value in entry.items():
            if field != "step":  # laid out in memory as the parameter is, which fused optimizers insist on
                own = parameters[i].detach()
                entry[field] = torch.empty_like(own).copy_(like(value, own))
            elif value.numel() != 1:
                raise ValueError(f"optimizer {key!r}, parameter {i}: a step of shape {tuple(value.shape)}")
    if isinstance(optimizer, torch.optim.SGD) and len(state) < len(parameters):  # the fused one needs all or none
        raise ValueError(f"optimizer {key!r}: {len(state)} momenta for {len(parameters)} parameters")
    return {"state": state, "param_groups": optimizer.state_dict()["param_groups"]}


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


def python_random() -> list[Any]:
    """The state of Python's generator as JSON values."""
    version, internal, gauss = random.getstate()
    return [version, list(internal), gauss]


def _own_state(tensors: dict[str, Tensor], device: str) -> Tensor:
    """The saved state of this process's generator; a state of its own if there were fewer processes then."""
    first, mine = tensors[f"random.{device}.0"], distributed.rank()
    if (saved := tensors.get(f"random.{device}.{mine}")) is not None:
        return saved
    digest = hashlib.sha256(first.numpy().tobytes() + mine.to_bytes(8)).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest[:7])).get_state()


class _RandomStates:
    """Saved random states, tried on generators of their own before they may replace the global ones."""

    def __init__(self, tensors: dict[str, Tensor], python_random: list[Any]):
        self.cpu = _own_state(tensors, "cpu")
        torch.Generator().set_state(self.cpu)
        self.cuda = _own_state(tensors, "cuda") if torch.cuda.is_available() and "random.cuda.0" in tensors else None
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
