"""An optimizer of the user's own for the weights, with its schedule and its part of a checkpoint.

def make(parameters):
    decayed = [p for _, p in parameters if p.dim() > 1]
    others = [p for _, p in parameters if p.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": 1e-4}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.SGD(groups, lr=0.1, momentum=0.9), lambda step: 0.9 ** (step / 1000)
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from bitdial.errors import CheckpointError, ConfigError

Schedule = Callable[[int], float]
OptimizerFactory = Callable[[list[tuple[str, nn.Parameter]]], Any]  # -> an optimizer, or (optimizer, schedule)
_MANAGED = ("params", "param_names", "lr")  # of a parameter group: not settings, or set anew at every step


class OwnOptimizer:
    """What `make` returned for `parameters` [(name, parameter)], checked: an optimizer of exactly these.

    Each parameter group keeps a rate of its own, the one it was made with, times the factor of the schedule.
    """

    def __init__(self, make: OptimizerFactory, parameters: list[tuple[str, nn.Parameter]]):
        if not callable(make):
            raise ConfigError(
                f"optimizer is of type {type(make).__name__}; it must be a function that makes one of the weights it "
                "is given: optimizer=lambda weights: torch.optim.SGD([p for _, p in weights], lr=0.1)"
            )
        made = make(list(parameters))
        pair = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
        self.optimizer: torch.optim.Optimizer = pair[0]
        self.schedule: Schedule | None = pair[1]
        if not isinstance(self.optimizer, torch.optim.Optimizer) or isinstance(self.optimizer, torch.optim.LBFGS):
            raise ConfigError(
                "optimizer must be a function that takes the weights as (name, parameter) pairs and returns a "
                "torch.optim.Optimizer that steps without a closure, or (optimizer, schedule); it returned "
                f"{made!r:.60}"
            )
        if self.schedule is not None and not callable(self.schedule):
            raise ConfigError(f"the schedule {self.schedule!r:.60} must be a function: step -> factor of the rates")
        self._check(parameters)
        self.rates = [float(group["lr"]) for group in self.optimizer.param_groups]
        self._groups_as_made = [dict(group) for group in self.optimizer.param_groups]

    def _check(self, parameters: list[tuple[str, nn.Parameter]]) -> None:
        taken = [p for group in self.optimizer.param_groups for p in group["params"]]
        mine = set(taken)
        if left := [name for name, parameter in parameters if parameter not in mine]:
            raise ConfigError(
                f"the optimizer leaves out {left[0]!r}" + (f" and {len(left) - 1} more" if left[1:] else "") + "; give "
                "it a group, or keep it as it is with requires_grad_(False)"
            )
        if len(taken) != len(parameters):
            raise ConfigError("the optimizer has other parameters than the weights it was given; scales have their own")

    def factor(self, step: int) -> float | None:
        """What the schedule says of `step`; None if there is no schedule."""
        if self.schedule is None:
            return None
        value = float(self.schedule(step))
        if not (math.isfinite(value) and value >= 0):
            raise ConfigError(f"the schedule gives {value!r} at step {step}; a factor of the rates is at least 0")
        return value

    def step(self, factor: float) -> None:
        """Update the weights, each group at its own rate times `factor`."""
        for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
            group["lr"] = group["lr"].fill_(rate * factor) if isinstance(group["lr"], Tensor) else rate * factor
        self.optimizer.step()

    # --- its part of a checkpoint: tensors, and JSON values -----------------------------------------

    @property
    def kind(self) -> str:
        """The name of its class."""
        return type(self.optimizer).__name__

    def tensors(self) -> dict[str, Tensor]:
        """The tensors of its state, by parameter and name."""
        state = self.optimizer.state_dict()["state"]
        return {f"{i}.{n}": v for i, one in state.items() for n, v in one.items() if isinstance(v, Tensor)}

    def values(self) -> dict[str, Any]:
        """The rest of it as JSON values; CheckpointError names what is none."""
        state = {
            str(i): {n: self._plain(v, n) for n, v in one.items() if not isinstance(v, Tensor)}
            for i, one in self.optimizer.state_dict()["state"].items()
        }
        groups = [*map(self._settings, self.optimizer.param_groups)]
        return {**self._made(), "groups": groups, "state": state}

    def _made(self) -> dict[str, Any]:
        """What decides how it began."""
        return {"kind": self.kind, "rates": self.rates, "made": [*map(self._settings, self._groups_as_made)]}

    def load(self, tensors: dict[str, Tensor], values: dict[str, Any]) -> Callable[[], None]:
        """What puts a saved state into it, in place, after a look at it; CheckpointError if it is another's."""
        now = self._made()
        if {name: values[name] for name in now} != now:
            raise CheckpointError(
                f"it was written with another optimizer, or other settings of {self.kind}; use the same"
            )
        whole = self.optimizer.state_dict()
        places = {i for group in whole["param_groups"] for i in group["params"]}
        state: dict[int, dict[str, Any]] = {int(i): dict(one) for i, one in values["state"].items()}
        for name, value in tensors.items():
            number, _, field = name.partition(".")
            state.setdefault(int(number), {})[field] = value
        if not set(state) <= places or len(values["groups"]) != len(whole["param_groups"]):
            raise ValueError(f"optimizer {self.kind}: the state of other parameters")
        for group, saved in zip(whole["param_groups"], values["groups"], strict=True):
            for name, value in saved.items():
                group[name] = tuple(value) if isinstance(group[name], tuple) else value
        whole["state"] = state
        return lambda: self.optimizer.load_state_dict(whole)

    def _settings(self, group: dict[str, Any]) -> dict[str, Any]:
        return {name: self._plain(value, name) for name, value in group.items() if name not in _MANAGED}

    def _plain(self, value: Any, name: str) -> Any:
        """`value` as JSON has it."""
        if isinstance(value, list | tuple):
            return [self._plain(one, name) for one in value]
        if value is None or isinstance(value, str | bool | int) or (isinstance(value, float) and math.isfinite(value)):
            return value
        raise CheckpointError(
            f"a checkpoint cannot hold what the optimizer {self.kind} keeps as {name!r}, a {type(value).__name__}; "
            "only tensors, finite numbers and text. Train without a checkpoint, or with another optimizer"
        )
