"""Watch a model run on sample data: which layer runs when, on what input, and which layer feeds which norm."""

import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from bitdial.errors import ConfigError, QuantizationError
from bitdial.plan import unwrap

MOST_SAMPLES = 1 << 16

Batch = Tensor | tuple[Any, ...] | dict[str, Any]
INPUTS_ALONE = "Where inputs alone are wanted, leave out the targets: [x for x, _ in batches]"
_INPUTS = f"give a tensor, a tuple of positional or a dict of keyword arguments of the model. {INPUTS_ALONE}"


@dataclass
class LayerInput:
    """What one layer received: up to MOST_SAMPLES values a call, evenly spaced, and the smallest of all."""

    samples: list[Tensor] = field(default_factory=list)
    minimum: float = float("inf")
    last_call: int = -1


def call(model: Callable[..., Any], batch: Batch) -> Any:
    """Run `model` on a tensor, a tuple of positional or a dict of keyword arguments; ConfigError if it has others."""
    if not isinstance(batch, Tensor | tuple | dict):
        raise ConfigError(f"the inputs are a {type(batch).__name__}; {_INPUTS}")
    args = batch if isinstance(batch, tuple) else () if isinstance(batch, dict) else (batch,)
    kwargs = batch if isinstance(batch, dict) else {}
    try:
        return model(*args, **kwargs)
    except TypeError:
        _check_arguments(model, args, kwargs)
        raise


def _check_arguments(model: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise ConfigError if `model` does not take these arguments; else a TypeError is its own affair."""
    forward = getattr(unwrap(cast(nn.Module, model)), "forward", model)
    try:
        inspect.signature(forward).bind(*args, **kwargs)
    except TypeError as problem:
        raise ConfigError(f"the model does not take these inputs ({problem}); {_INPUTS}") from problem


def pairs(batches: Iterable[Any]) -> Iterator[tuple[Batch, Any]]:
    """`batches` one by one; ConfigError for what is not a pair (inputs, targets)."""
    for number, batch in enumerate(batches):
        if not isinstance(batch, tuple | list) or len(batch) != 2:
            size = f" of {len(batch)}" if isinstance(batch, tuple | list) else ""
            raise ConfigError(
                f"batch {number} is not a pair (inputs, targets) but a {type(batch).__name__}{size}; "
                "batched(inputs, targets) makes pairs of two tensors"
            )
        yield batch[0], batch[1]


def ignored_label(loss: Callable[..., Any]) -> int | None:
    """The label that `loss` leaves out, if it is torch's cross-entropy; None if its targets may be anything else."""
    if loss is F.cross_entropy:
        return -100
    return loss.ignore_index if isinstance(loss, nn.CrossEntropyLoss) else None


def classes_of(output: Any) -> int | None:
    """How many classes cross-entropy sees in `output` (batch, classes, ...) or (classes,); None if it is no tensor."""
    return output.shape[min(output.dim() - 1, 1)] if isinstance(output, Tensor) and output.dim() else None


def find_odd_label(targets: Any, classes: int, ignored: int | None = None) -> int | None:
    """The first of the class numbers in `targets` that is not below `classes`, or negative; None if there is none.

    Targets that are no whole numbers are not looked at. On a GPU this waits for the device.
    """
    if not isinstance(targets, Tensor) or targets.is_floating_point() or targets.is_complex() or not targets.numel():
        return None
    odd = (targets < 0) | (targets >= classes)
    if ignored is not None:
        odd &= targets != ignored
    return int(targets[odd][0]) if bool(odd.any()) else None


def label_problem(label: int, classes: int) -> str:
    """What to say of a label that is no class."""
    return (
        f"the label {label} is none of the model's {classes} classes, 0 to {classes - 1}; "
        "check the targets, or leave such samples out"
    )


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put `model` in eval mode without gradients, then give every module its own mode back."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def observe_inputs(model: nn.Module, layers: Mapping[str, nn.Module], batches: list[Batch]) -> dict[str, LayerInput]:
    """Run `batches` and record each executed layer's input, in the order in which the layers first ran."""
    seen: dict[str, LayerInput] = {}
    calls = itertools.count()

    def record(name: str, x: Tensor) -> None:
        entry = seen.setdefault(name, LayerInput())
        entry.last_call = next(calls)
        flat = x.detach().reshape(-1)
        if flat.numel() == 0:
            raise QuantizationError(f"layer {name!r}: the calibration batch gives it an empty input")
        low, high = (float(v) for v in flat.aminmax())
        if not (low > -float("inf") and high < float("inf")):  # also false for NaN
            raise QuantizationError(
                f"layer {name!r}: its calibration input holds NaN or infinity; check the "
                "calibration batch and the weights of the layers before it"
            )
        entry.minimum = min(entry.minimum, low)
        stride = -(-flat.numel() // MOST_SAMPLES) | 1  # odd, so that it meets every column of an image
        entry.samples.append(flat[::stride].clone())

    def hook_for(name: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            record(name, args[0] if args else kwargs["input"])

        return hook

    handles = [m.register_forward_pre_hook(hook_for(n), with_kwargs=True) for n, m in layers.items()]
    try:
        with evaluating(model):
            for batch in batches:
                call(model, batch)
    finally:
        for handle in handles:
            handle.remove()
    return seen


class _Provenance(TorchFunctionMode):
    """Carries, with each tensor, the names it was computed from, through every torch function."""

    def __init__(self) -> None:
        super().__init__()
        self.names = WeakIdKeyDictionary()

    def of(self, values: object) -> frozenset[str]:
        """All names carried by the tensors in `values`."""
        found: frozenset[str] = frozenset()
        for leaf in tree_leaves(values):
            if isinstance(leaf, Tensor):
                found |= self.names.get(leaf, frozenset())
        return found

    def mark(self, values: object, names: frozenset[str]) -> None:
        """Let the tensors in `values` carry `names` and nothing else."""
        for leaf in tree_leaves(values):
            if isinstance(leaf, Tensor):
                self.names[leaf] = names

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if names := self.of((args, kwargs)):
            self.mark(out, names)
        return out


INPUT = "<input>"  # what the tensors of a batch carry; no module has this name


@dataclass(frozen=True)
class Flow:
    """Which layer each norm follows, and which layer feeds each layer: None if only float modules do.

    A norm follows the layer which feeds it; where several do (after an addition or a concatenation), the one that ran
    last; where none does (after a float stem), the first layer that it feeds. Norms connected to no layer are left out.
    A layer is fed, through norms, additions, concatenations and whatever is not a layer, by the layer that ran last of
    those that reach it. Layers that neither a layer nor the batch reaches are left out.
    """

    leaders: dict[str, str]
    feeders: dict[str, str | None]


def find_flow(model: nn.Module, layers: Mapping[str, nn.Module], norms: Mapping[str, nn.Module], batch: Batch) -> Flow:
    """Run `batch` and follow where tensors go."""
    provenance = _Provenance()
    leaders: dict[str, str] = {}
    feeders: dict[str, str | None] = {}
    started: dict[str, int] = {}
    calls = itertools.count()

    def last_of(sources: frozenset[str]) -> str | None:
        return max((s for s in sources if s in layers), key=lambda s: started[s], default=None)

    def enter_layer(name: str, args: Any) -> None:
        sources = provenance.of(args)
        for source in sources:
            if source in norms:
                leaders.setdefault(source, name)
        feeder = last_of(sources)
        if feeder is not None or INPUT in sources:
            feeders.setdefault(name, feeder)
        started[name] = next(calls)

    def leave_norm(name: str, args: Any, out: Any) -> None:
        sources = provenance.of(args)
        feeder = last_of(sources)
        if feeder is not None:
            leaders.setdefault(name, feeder)
        elif name not in leaders:
            provenance.mark(out, sources | {name})

    handles = []
    for name, layer in layers.items():
        handles.append(
            layer.register_forward_pre_hook(lambda m, a, k, name=name: enter_layer(name, (a, k)), with_kwargs=True)
        )
        handles.append(
            layer.register_forward_hook(lambda m, a, out, name=name: provenance.mark(out, frozenset((name,))))
        )
    for name, norm in norms.items():
        handles.append(
            norm.register_forward_hook(lambda m, a, k, out, name=name: leave_norm(name, (a, k), out), with_kwargs=True)
        )
    try:
        with evaluating(model), provenance:
            provenance.mark(batch, frozenset((INPUT,)))
            call(model, batch)
    finally:
        for handle in handles:
            handle.remove()
    return Flow(leaders, feeders)
