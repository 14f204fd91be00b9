"""The float model that a file's content goes into: built or copied without its weights, which are about to be replaced.

Its parameters are allocated and not written. Memory that nobody writes is never taken.
"""

from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from bitdial.artifact import Artifact, fit
from bitdial.dial.dial import copy_unwrapped
from bitdial.errors import ArtifactError, ConfigError
from bitdial.models import build_model
from bitdial.prepare.copies import check_plain


class NoInitialValues(TorchFunctionMode):
    """Leaves parameters as they are allocated."""

    names = frozenset(
        {
            "normal_",
            "uniform_",
            "kaiming_uniform_",
            "kaiming_normal_",
            "trunc_normal_",
            "xavier_uniform_",
            "xavier_normal_",
        }
    )

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        target = args[0] if args else (kwargs or {}).get("tensor")
        if isinstance(target, nn.Parameter) and getattr(func, "__name__", "") in self.names:
            return target
        return func(*args, **(kwargs or {}))


def built(artifact: Artifact) -> nn.Module:
    """The float model that the file names, if it is one of ours; tried without memory before it is built."""
    architecture, layers = artifact.manifest["architecture"], len(artifact.tensors)
    if architecture is None:
        raise ArtifactError(
            "the file is of a model that bitdial does not build; in Python, pass it: load(path, model). Commands need "
            "a file of a model from build_model()"
        )
    try:
        name, arguments = architecture["name"], architecture["arguments"]
        if set(architecture) != {"name", "arguments"} or any(arguments.get(k, 1) > layers for k in ("blocks", "depth")):
            raise ConfigError("it has unknown parts, or more layers than the file has tensors")
        with torch.random.fork_rng(), NoInitialValues():
            with torch.device("meta"):
                fit(artifact, build_model(name, **arguments))
            return build_model(name, **arguments)
    except (ConfigError, KeyError, TypeError, ValueError, RuntimeError, AttributeError, OverflowError) as problem:
        raise ArtifactError(
            f"the file names the architecture {architecture!r}, which cannot be built: {problem}; "
            "pass a model: load(path, model)"
        ) from problem


def copy_of(model: nn.Module) -> nn.Module:
    """A copy of the user's `model` whose parameters and persistent buffers are allocated and not written."""
    if not isinstance(model, nn.Module):
        what = f"the class {model.__name__}; make one: " if isinstance(model, type) else f"{type(model).__name__}; "
        raise ConfigError(
            f"the model must be a float nn.Module of the architecture that was saved, got {what}load(path, Net())"
        )
    check_plain(model)
    if any(t.is_meta for t in (*model.parameters(), *model.buffers())):
        raise ArtifactError("the model is on the meta device, without memory; build it on the CPU")
    state = model.state_dict(keep_vars=True).values()
    empty = {id(t): _empty_like(t) for t in state if type(t) in (torch.Tensor, nn.Parameter) and t.is_leaf}
    return copy_unwrapped(model, empty)


def _empty_like(tensor: torch.Tensor) -> torch.Tensor:
    made = torch.empty_like(tensor, requires_grad=False)
    return nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made
