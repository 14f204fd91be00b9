"""Several processes, one model: what they agree on and exchange.

Gradients are averaged in `bitdial.train.reduction`, or by DistributedDataParallel around a user's model. Norm
statistics are averaged here after every pass, so that all ranks hold the same model at every step and any of them could
write the checkpoint. Without a process group every function is a no-op.
"""

import hashlib
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from bitdial.dial.dial import unwrap
from bitdial.errors import ConfigError
from bitdial.nn import SwitchableBatchNorm


def active() -> bool:
    """Whether a process group is up."""
    return dist.is_available() and dist.is_initialized()


def rank() -> int:
    """This process's number; 0 when alone."""
    return dist.get_rank() if active() else 0


def is_first() -> bool:
    """Whether this is process 0 of those that torchrun started, also before they join and after they leave."""
    return rank() == 0 if active() else os.environ.get("RANK", "0") == "0"


def world_size() -> int:
    """How many processes train together."""
    return dist.get_world_size() if active() else 1


def join(device: torch.device) -> None:
    """Join the process group that torchrun describes in the environment, if there is one and none is up."""
    if not active() and int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ:
        dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")


@contextmanager
def joined(device: torch.device) -> Iterator[None]:
    """Join as `join` does, and leave the group at the end of the block if it was joined here."""
    before = active()
    join(device)
    yield
    if active() and not before:
        dist.destroy_process_group()


def own_device() -> torch.device:
    """The GPU that torchrun means for this process, made the current one; the CPU where there is none."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    place = int(os.environ.get("LOCAL_RANK", "0"))
    if place >= torch.cuda.device_count():
        raise ConfigError(
            f"process {place} of this machine finds {torch.cuda.device_count()} GPUs; start as many processes as there "
            "are GPUs (torchrun --nproc-per-node)"
        )
    torch.cuda.set_device(place)
    return torch.device("cuda", place)


def backend(kind: str) -> str | None:
    """The backend that serves tensors of this kind of device ("cpu", "cuda"): "gloo", "nccl"; None if none does."""
    if not active():
        return None
    parts = (part.split(":") for part in dist.get_backend_config().split(","))
    return dict(parts).get(kind)


def reduced_by_ddp(model: nn.Module) -> bool:
    """Whether DistributedDataParallel is around the model, or around a part of it, and averages gradients."""
    return any(isinstance(module, DistributedDataParallel) for module in model.modules())


def share_state(model: nn.Module) -> None:
    """Give every rank the parameters and buffers of rank 0, in place; ConfigError if the models do not match."""
    if not active():
        return
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    shape = repr([(name, tuple(value.shape), value.dtype) for name, value in tensors.items()])
    digest = torch.frombuffer(bytearray(hashlib.sha256(shape.encode()).digest()), dtype=torch.uint8)
    digests = gather(digest.to(_exchange_device()))
    if any(not torch.equal(one, digests[0]) for one in digests):
        raise ConfigError("the processes hold different models; build and prepare the same one in all of them")
    for value in tensors.values():
        whole = value.detach().contiguous()
        dist.broadcast(whole.view(torch.uint8) if whole.dtype == torch.bool else whole, src=0)
        value.detach().copy_(whole)


@torch.no_grad()
def average_norms(model: nn.Module, stand_ins: Mapping[nn.Module, nn.Module] | None = None) -> None:
    """Average the running statistics of the norms in use over the ranks, in place; sets at rest stay at rest.

    A switchable norm that `stand_ins` has ran as the norm there.
    """
    if not active():
        return
    modules, replaced = list(unwrap(model).modules()), stand_ins or {}
    switchable = [module for module in modules if isinstance(module, SwitchableBatchNorm)]
    in_sets = {norm for module in switchable for norm in module.sets.values()}
    in_use = [module for module in modules if module not in in_sets]
    in_use += [replaced.get(module, module.active) for module in switchable]
    norms = [module for module in in_use if isinstance(module, nn.modules.batchnorm._NormBase)]
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
    if active():
        value = value.clone()
        dist.all_reduce(value)
        value /= world_size()
    return value


def total(value: float) -> float:
    """`value` summed over the ranks."""
    if world_size() == 1:
        return value
    summed = torch.tensor(value, dtype=torch.float64, device=_exchange_device())
    dist.all_reduce(summed)
    return float(summed)


def _exchange_device() -> torch.device:
    """Where numbers of Python's are exchanged: on the host if that can be, so that nobody waits for a GPU."""
    return torch.device("cpu" if backend("cpu") is not None else "cuda")


def any_rank(flag: bool) -> bool:
    """Whether `flag` is set on any rank; the same answer on all of them."""
    if world_size() == 1:
        return flag
    value = torch.tensor(float(flag), device=_exchange_device())
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
