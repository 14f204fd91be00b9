"""Models whose parameters are spread over the processes (PyTorch's FSDP2, `fully_shard`).

A block's parameters are gathered when it runs, and its gradients are averaged over the processes and spread again.
Outside of that each process holds a part of every parameter, a DTensor. Optimizers work on the parts. What looks at a
parameter as a whole goes through the functions below; on plain tensors they do nothing.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bitdial.errors import ConfigError


def shard(model: nn.Module) -> None:
    """Spread the parameters of `model` over the processes, in place: each repeated block by itself, then the rest.

    Every process must hold the same model before. Repeated blocks are the modules of its outermost `nn.ModuleList`s.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(next(model.parameters()).device.type, (dist.get_world_size(),))  # its own, not a free GPU
    lists = {name: module for name, module in model.named_modules() if isinstance(module, nn.ModuleList)}
    outermost = [m for name, m in lists.items() if not any(name.startswith(f"{other}.") for other in lists)]
    for blocks in outermost:
        for block in blocks:
            fully_shard(block, mesh=mesh, reshard_after_forward=True)
    fully_shard(model, mesh=mesh, reshard_after_forward=True)


def is_sharded(model: nn.Module) -> bool:
    """Whether a part of `model` is spread over the processes."""
    kinds = {kind.__name__ for module in model.modules() for kind in type(module).__mro__}
    if "FullyShardedDataParallel" in kinds:
        raise ConfigError(
            "a part of the model is in FullyShardedDataParallel, whose flat parameters joint training cannot read; "
            "use fully_shard of torch.distributed.fsdp"
        )
    return "FSDPModule" in kinds


def local(tensor: Tensor) -> Tensor:
    """The part of `tensor` that this process holds, with the same memory; all of it if it is not sharded."""
    sharded: Any = tensor
    return sharded.detach().to_local() if hasattr(tensor, "to_local") else tensor


def whole(tensor: Tensor) -> Tensor:
    """`tensor` gathered from all processes, which all call; as it is if it is not sharded."""
    sharded: Any = tensor
    return sharded.detach().full_tensor() if hasattr(tensor, "full_tensor") else tensor


def spread_like(value: Tensor, own: Tensor) -> Tensor:
    """`value`, which every process has, spread as `own` is; as it is if `own` is not sharded."""
    if not hasattr(own, "to_local"):
        return value
    from torch.distributed.tensor import distribute_tensor

    sharded: Any = own
    return distribute_tensor(value, sharded.device_mesh, sharded.placements, src_data_rank=None)


def norms(tensors: list[Tensor], order: float) -> Tensor:
    """The norm of each tensor (tensors,), of order 2 or infinity; of sharded ones over the parts of all processes."""
    parts = [local(tensor) for tensor in tensors]
    if all(part is tensor for part, tensor in zip(parts, tensors, strict=True)):
        return torch.stack(torch._foreach_norm(tensors, order))
    filled = [part if part.numel() else part.new_zeros(1) for part in parts]  # there are more processes than rows
    found = torch.stack(torch._foreach_norm(filled, order))
    if order == 2:
        found.square_()
        dist.all_reduce(found)
        return found.sqrt_()
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return found
