"""Norms that keep statistics: which modules can have a set for each width, and how much bitdial knows of them.

A batch norm of any class can: the module itself is copied for each width, so it computes as its class does. Engines put
something faster in the place of a norm only if it computes as PyTorch's own batch norms do.
"""

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.instancenorm import _InstanceNorm

from bitdial.nn.layer_kinds import FORWARD

BATCH_NORMS: tuple[type[nn.Module], ...] = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
NORM_STATE = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")  # in the order of torch


def is_switchable(module: nn.Module) -> bool:
    """Whether `module` is a norm to have a set per width: a batch norm, or an instance norm that keeps statistics."""
    if isinstance(module, _InstanceNorm):
        return module.track_running_stats
    return isinstance(module, _NormBase)


def keeps_own_statistics(module: nn.Module) -> bool:
    """Whether `module` looks like a norm that learns statistics, of a class that is not derived from PyTorch's.

    A frozen norm, whose weight is a buffer like its statistics, learns none.
    """
    named = {"running_mean", "running_var"} & set(module._buffers)
    return bool(named) and not isinstance(module, _NormBase) and "weight" not in module._buffers


def batch_norm_type(norm: nn.Module) -> type[nn.Module] | None:
    """The batch norm of PyTorch that `norm` computes as: its class, or one it is derived from without changing that."""
    if not isinstance(norm, BATCH_NORMS) or "forward" in vars(norm) or not set(norm.state_dict()) <= set(NORM_STATE):
        return None
    for each in type(norm).__mro__:
        if each in BATCH_NORMS:
            return each
        if any(name in vars(each) for name in (*FORWARD, *NORM_STATE)):
            return None
    return None


def usual_state(norm: _NormBase) -> set[str]:
    """The names of the tensors that a norm of these settings has in PyTorch."""
    affine, statistics = set(NORM_STATE[:2]), set(NORM_STATE[2:])
    return (affine if norm.affine else set()) | (statistics if norm.track_running_stats else set())


def unswitchable_reason(norm: nn.Module) -> str | None:
    """Why a norm cannot have a set per width in a file; None if it can."""
    assert isinstance(norm, _NormBase)
    state = norm.state_dict()
    if any(not isinstance(value, Tensor) for value in state.values()):
        return "its state holds objects that are no tensors; keep them out of get_extra_state"
    if any(nn.utils.parametrize.is_parametrized(module) for module in norm.modules()):
        return "its parameters are computed from others; remove that with torch.nn.utils.parametrize"
    for part in NORM_STATE:
        shape = () if part == "num_batches_tracked" else (norm.num_features,)
        if part in state and tuple(state[part].shape) != shape:
            return f"its {part} is of shape {tuple(state[part].shape)}, where a norm of PyTorch has {shape}"
    return None
