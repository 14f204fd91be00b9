"""Stop a run that has gone wrong, and say where."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from bitdial.errors import TrainingError
from bitdial.nn import ActivationSite, QuantLayer
from bitdial.prepare.labels import classes_of, find_odd_label, ignored_label, label_problem
from bitdial.prepare.model_call import Batch, call
from bitdial.prepare.model_output import no_tensor
from bitdial.train import distributed
from bitdial.train.sharding import is_sharded, local

SMALLEST_SHARE = 2.0**-10


class ScaleGuard:
    """Bounds the updates of the scales, and notices a scale that has collapsed.

    A step of Adam has the size of the learning rate whatever the size of the parameter, and scales span orders of
    magnitude: a rate that is slow for a 2-bit activation scale near 1 carries an 8-bit weight scale near 0.001 past
    zero at once. With `relative`, the optimizer's step is therefore read as a share of the scale: scale * (1 + step).
    In any case an update at most halves a scale; one that falls below 1/1024 of its start, or is not finite, stops the
    run.
    """

    def __init__(self, model: nn.Module, *, relative: bool):
        self.relative = relative
        self.names: list[str] = []
        self.scales: list[Tensor] = []
        for name, module in model.named_modules():
            if isinstance(module, QuantLayer | ActivationSite):
                for key, parameter in module.named_parameters():
                    if "quantizer.scale" in key and not any(parameter is s for s in self.scales):
                        self.names.append(f"{name}.{key}")
                        self.scales.append(parameter)
        self.sharded = is_sharded(model)
        self.floors = [s.detach() * SMALLEST_SHARE for s in self.scales]

    @contextmanager
    def watch(
        self, scales: list[Tensor], *, step: int, bits: int, shares: dict[Tensor, Tensor] | None = None
    ) -> Iterator[None]:
        """Bound the update of `scales` that happens inside the block, then check all; on a GPU that waits for `check`.

        Of the update of a scale that `shares` names, that share is taken.
        """
        parts = [local(scale) for scale in scales]
        with torch.no_grad():
            before = list(torch._foreach_mul(parts, 1.0)) if parts else []
        yield
        if parts:
            with torch.no_grad():
                self._bound(parts, before, shares or {})
        if not self.scales[0].is_cuda:
            self.check(step=step, bits=bits)

    def _bound(self, scales: list[Tensor], before: list[Tensor], shares: dict[Tensor, Tensor]) -> None:
        if self.relative or shares:
            moved = zip(scales, torch._foreach_sub(scales, before), strict=True)
            steps = [step * shares[s] if s in shares else step for s, step in moved]
            if self.relative:
                torch._foreach_mul_(steps, before)
            torch._foreach_copy_(scales, torch._foreach_add(before, steps))
        torch._foreach_maximum_(scales, torch._foreach_mul(before, 0.5))

    def check(self, *, step: int, bits: int) -> None:
        """Raise TrainingError, naming the scale, if one is bad. Looks at the device."""
        if not self.scales:
            return
        with torch.no_grad():
            scales, floors = [local(s) for s in self.scales], [local(f) for f in self.floors]
            now, floor = (torch.cat([part.reshape(-1) for part in parts]) for parts in (scales, floors))
            good = bool(((now > floor) & (now < float("inf"))).all())
        if self.sharded and distributed.any_rank(not good) and good:
            raise TrainingError(f"step {step}, {bits} bits: a scale collapsed; another process says which")
        if good:
            return
        for name, scale, floor in zip(self.names, scales, floors, strict=True):
            if not bool(((scale > floor) & torch.isfinite(scale)).all()):
                smallest, start = float(scale.detach().min()), float(floor.min()) / SMALLEST_SHARE
                raise TrainingError(
                    f"step {step}, {bits} bits: the scale {name!r} collapsed (smallest value {smallest:.3g}, started "
                    f"at {start:.3g}); lower scale_lr, or use scale_step='relative'. The last checkpoint is intact"
                )


def check_loss(loss: Tensor, model: nn.Module, inputs: Batch, *, step: int, bits: int) -> None:
    """Raise TrainingError, naming the layer where it began, if `loss` is not finite."""
    if bool(torch.isfinite(loss)):
        return
    raise TrainingError(
        f"step {step}, {bits} bits: the loss is {float(loss):g}; {find_culprit(model, inputs)}. "
        "The last checkpoint is intact"
    )


def find_culprit(model: nn.Module, inputs: Batch) -> str:
    """Where values that are not finite come from: the input, a parameter, or the first layer that puts them out."""
    seen = _culprit_at_rest(model, inputs)
    if is_sharded(model) and distributed.any_rank(seen is not None):  # or some would wait for others in the pass below
        return seen or "another process says where it is"
    if seen is not None:
        return seen
    found: list[str] = []

    def hook_for(name: str) -> Any:
        def hook(module: nn.Module, args: Any, out: Any) -> None:
            if not found and not all(_finite(leaf) for leaf in torch.utils._pytree.tree_leaves(out)):
                found.append(name)

        return hook

    handles = [m.register_forward_hook(hook_for(n)) for n, m in model.named_modules() if n]
    try:
        with torch.no_grad():  # in the mode of training, where the values appeared
            call(model, inputs)
    finally:
        for handle in handles:
            handle.remove()
    return (
        f"layer {found[0]!r} put out NaN or infinity"
        if found
        else ("every layer's output is finite: check the loss, and what other processes say if there are any")
    )


def _culprit_at_rest(model: nn.Module, inputs: Batch) -> str | None:
    """The input or the parameter that holds such values, in this process."""
    if not all(_finite(leaf) for leaf in torch.utils._pytree.tree_leaves(inputs)):
        return "the input batch holds NaN or infinity"
    for name, parameter in model.named_parameters():
        if not _finite(local(parameter)):
            return f"the parameter {name!r} holds NaN or infinity"
    return None


def _finite(value: object) -> bool:
    return not (isinstance(value, Tensor) and value.is_floating_point()) or bool(torch.isfinite(value).all())


class LabelGuard:
    """Refuses labels that are no class of the model, where `loss` is cross-entropy: on a GPU they end the process.

    The first pass says how many classes there are. It looks at `everything`, the labels of the whole data set, if they
    are at hand, else at those of its batch. From then on each batch is looked at before it is trained on; but on a GPU,
    which would have to be waited for, only the first of an epoch, and none if everything has been looked at.
    """

    def __init__(self, loss: Callable[..., Any]):
        self.ignored = ignored_label(loss)
        self.everything: Tensor | None = None
        self.classes: int | None = None

    def learn(self, output: Any, targets: Any) -> None:
        """Before the loss of `output` is computed: of the first pass, take the number of classes, and look."""
        if self.ignored is None or self.classes is not None:
            return
        if not isinstance(output, Tensor):
            raise TrainingError(no_tensor(output))
        self.classes = classes_of(output)
        self._look(targets if self.everything is None else self.everything)

    def check(self, targets: Any, *, epoch_begins: bool) -> None:
        """Before a step on `targets`."""
        on_gpu = isinstance(targets, Tensor) and targets.is_cuda
        if not on_gpu or (epoch_begins and self.everything is None):
            self._look(targets)

    def _look(self, targets: Any) -> None:
        if self.classes is not None and (odd := find_odd_label(targets, self.classes, self.ignored)) is not None:
            raise TrainingError(label_problem(odd, self.classes))
