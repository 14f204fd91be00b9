"""Several processes, one model: what joint training needs beyond DistributedDataParallel.

DDP averages the gradients. Norm statistics are averaged here after every pass, so that all ranks hold the same model at
every step and any of them could write the checkpoint. Without a process group every function is a no-op.
"""

import inspect
import os

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from bitdial.dial.dial import unwrap
from bitdial.nn import SwitchableBatchNorm


def active() -> bool:
    """Whether a process group is up."""
    return dist.is_available() and dist.is_initialized()


def rank() -> int:
    """This process's number; 0 when alone."""
    return dist.get_rank() if active() else 0


def world_size() -> int:
    """How many processes train together."""
    return dist.get_world_size() if active() else 1


def join(device: torch.device) -> None:
    """Join the process group that torchrun describes in the environment, if there is one and none is up."""
    if not active() and int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ:
        dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")


def wrap(model: nn.Module) -> nn.Module:
    """`model` under DDP when several processes train, told that each pass leaves some scales and norms unused."""
    if world_size() == 1 or isinstance(model, DistributedDataParallel):
        return model
    for buffer in model.buffers():
        dist.broadcast(buffer, src=0)
    # torch 2.13 renames the setting that keeps DDP from overwriting the norm statistics at each forward.
    known = inspect.signature(DistributedDataParallel).parameters
    sync = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
    return DistributedDataParallel(model, find_unused_parameters=True, **{sync: False})  # type: ignore[arg-type]


def average_norms(model: nn.Module) -> None:
    """Average the running statistics of the norms in use over the ranks, in place; sets at rest stay at rest."""
    if world_size() == 1:
        return
    modules = list(unwrap(model).modules())
    resting = {
        norm
        for module in modules
        if isinstance(module, SwitchableBatchNorm)
        for norm in module.sets.values()
        if norm is not module.active
    }
    norms = [m for m in modules if isinstance(m, nn.modules.batchnorm._NormBase) and m not in resting]
    statistics = [b for m in norms for b in (m.running_mean, m.running_var) if b is not None]
    if not statistics:
        return
    flat = torch.cat([b.reshape(-1) for b in statistics])
    dist.all_reduce(flat)
    flat /= world_size()
    for buffer, part in zip(statistics, flat.split([b.numel() for b in statistics]), strict=True):
        buffer.copy_(part.view_as(buffer))


def mean(value: Tensor) -> Tensor:
    """`value` averaged over the ranks, so that all of them see the same (and all see a NaN)."""
    if world_size() > 1:
        value = value.clone()
        dist.all_reduce(value)
        value /= world_size()
    return value


def total(value: float) -> float:
    """`value` summed over the ranks."""
    if world_size() == 1:
        return value
    summed = torch.tensor(value, dtype=torch.float64)
    if dist.get_backend() == "nccl":
        summed = summed.cuda()
    dist.all_reduce(summed)
    return float(summed)


def any_rank(flag: bool, device: torch.device) -> bool:
    """Whether `flag` is set on any rank; the same answer on all of them."""
    if world_size() == 1:
        return flag
    value = torch.tensor(float(flag), device=device)
    dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return bool(value)


def merge_rows(table: Tensor) -> None:
    """Fill rows that are NaN here with what the rank that knows them has, in place."""
    if world_size() == 1:
        return
    known = ~table.isnan()
    total = torch.where(known, table, torch.zeros_like(table))
    count = known.to(table.dtype)
    dist.all_reduce(total)
    dist.all_reduce(count)
    table.copy_(total / count)  # 0 / 0 stays NaN: nobody saw the row


def gather(value: Tensor) -> list[Tensor]:
    """`value` of every rank (equal shapes), on every rank."""
    if world_size() == 1:
        return [value]
    parts = [torch.empty_like(value) for _ in range(world_size())]
    dist.all_gather(parts, value)
    return parts


def barrier() -> None:
    """Wait for all ranks."""
    if world_size() > 1:
        dist.barrier()
