"""Gradients averaged over processes: one all_reduce of all of them after the backward passes of a width.

DistributedDataParallel hangs hooks on the parameters, which fused kernels would pass by and which a CUDA graph cannot
follow. Here the gradients of a width are copied into one flat tensor (one for each dtype), summed over the processes,
and become views of it. Every collective has the same size at every step, whichever gradients there are, so that it can
be recorded in a CUDA graph where the backend allows (NCCL), and a process that records meets one that does not yet.

As under DDP, a parameter that no process used keeps no gradient, and one that only some used has 0 from the others. For
that the flat tensor ends with one mark per parameter, 1 where there is a gradient: their sums say how many have one.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bitdial.errors import TrainingError
from bitdial.train import distributed

ALIGNED = 4  # elements: each gradient begins where the vector loads of kernels may


class _Bucket:
    """The gradients of parameters of one dtype on one device, laid out one after the other."""

    def __init__(self, parameters: list[nn.Parameter]):
        self.parameters = parameters
        rooms = [-(-parameter.numel() // ALIGNED) * ALIGNED for parameter in parameters]
        self.flat = parameters[0].detach().new_zeros(sum(rooms) + len(parameters))
        self.counts = self.flat[sum(rooms) :]
        self.marks = list(self.counts.unbind())
        self.views: list[Tensor] = []
        start = 0
        for parameter, room in zip(parameters, rooms, strict=True):
            strides = torch.empty_like(parameter.detach(), device="meta").stride()  # as fused optimizers want it
            part = self.flat[start : start + parameter.numel()]
            self.views.append(part.as_strided(parameter.shape, strides))
            start += room

    def fill(self, share: float) -> list[bool]:
        """Copy the gradients, times `share`, and mark them; which parameters have one."""
        present = [parameter.grad is not None for parameter in self.parameters]
        gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        if any(gradient.layout != torch.strided for gradient in gradients):
            raise TrainingError(
                "a gradient is sparse, and several processes average dense ones: build the Embedding with sparse=False"
            )
        there = [view for view, is_there in zip(self.views, present, strict=True) if is_there]
        absent = [view for view, is_there in zip(self.views, present, strict=True) if not is_there]
        self.counts.zero_()
        if gradients:
            torch._foreach_copy_(there, torch._foreach_mul(gradients, share))
            torch._foreach_add_([mark for mark, is_there in zip(self.marks, present, strict=True) if is_there], 1.0)
        if absent:
            torch._foreach_zero_(absent)
        return present

    def give(self, present: list[bool]) -> None:
        """Make the averages the gradients of the parameters that are `present`; the others have none."""
        for parameter, view, is_there in zip(self.parameters, self.views, present, strict=True):
            parameter.grad = view if is_there else None


class GradientReducer:
    """Averages the gradients of `parameters` over the processes, in place; every process calls it at the same points.

    `uniform` turns False when processes had gradients of different parameters, as the Python of some models decides by
    the data. Such a step must not be recorded: a recording has them fixed.
    """

    def __init__(self, parameters: list[nn.Parameter]):
        kinds: dict[tuple[torch.device, torch.dtype], list[nn.Parameter]] = {}
        for parameter in parameters:
            kinds.setdefault((parameter.device, parameter.dtype), []).append(parameter)
        self.buckets = [_Bucket(group) for group in kinds.values()]
        self.uniform = True
        self.disagreed = torch.zeros((), device=parameters[0].device)  # how often, in recorded steps

    @torch.no_grad()
    def reduce(self) -> None:
        """Replace every gradient by its mean over the processes."""
        world = distributed.world_size()
        for bucket in self.buckets:
            present = bucket.fill(1.0 / world)
            dist.all_reduce(bucket.flat)
            if _is_recorded(bucket.flat):  # nobody can look at the counts now: they are kept for `check`
                self.disagreed.add_(((bucket.counts != 0) & (bucket.counts != world)).any())
            else:
                counts = bucket.counts.tolist()
                present = [count > 0 for count in counts]
                self.uniform = self.uniform and all(count in (0, world) for count in counts)
            bucket.give(present)

    def check(self) -> None:
        """Raise TrainingError if in a recorded step processes had gradients of different parameters."""
        if bool(self.disagreed):
            raise TrainingError(
                "the processes had gradients of different parameters in a step recorded as a CUDA graph: what the "
                "model does depends on its data. Train with TrainConfig(cuda_graph=False, fused=False)"
            )


def _is_recorded(tensor: Tensor) -> bool:
    """Whether what happens to `tensor` now is recorded in a CUDA graph."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()
