"""The Hessian trace of each quantised layer's weight, by Hutchinson's estimate.

Rounding moves a layer's weight by a small d. At a minimum, where the gradient is gone, the loss rises by d^T H d / 2,
with H the second derivative of the loss in that weight: on average over directions, by trace(H) / n * |d|^2 / 2. So
trace(H) / n, the `normalized` trace of a layer of n weights, says which layers need their bits (HAWQ-V2; Section 3.3 of
the paper).

H is far too large to write down, but v^T H v costs two more backward passes. With entries of v that are +1 or -1 at
random (Rademacher),

    E[v^T H v] = trace(H)        Var[v^T H v] = 2 * (sum of squares of H off its diagonal)

so the mean over some v estimates the trace, and their spread says how well. Each layer has vectors of its own, and only
its own block of the Hessian enters. One vector over all layers would be right on average too, but adds the squares of
every block that couples the layer with another: many times the variance where a small trace meets large ones. Products
for one layer share the first two passes and end at that layer, so they are cheap, and a layer that is known well enough
takes no more of them.
"""

import copy
import logging
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_leaves

from bitdial.dial.dial import is_live, set_bits, unwrap
from bitdial.errors import ConfigError
from bitdial.nn import ActivationSite, QuantLayer
from bitdial.nn.decompose import DECOMPOSED
from bitdial.nn.stand_in import keep_attributes
from bitdial.nn.swap import swap_modules
from bitdial.prepare.labels import classes_of, find_odd_label, ignored_label, label_problem, pairs
from bitdial.prepare.model_call import Batch, call, sample_count, sample_lists
from bitdial.prepare.model_output import Output, selected
from bitdial.prepare.own_losses import OwnLosses, with_targets
from bitdial.sensitivity.grouped_conv import GroupsAtOnce
from bitdial.sensitivity.result import LayerSensitivity, Sensitivity, check_count

log = logging.getLogger(__name__)

LEAST_SAMPLES = 16  # from fewer, the spread itself is not known well enough to stop by it
TOGETHER = 8  # vectors that share one forward and one backward pass

Loss = Callable[[Any, Any], Tensor]


def hessian_trace(
    model: nn.Module,
    batches: Iterable[tuple[Batch, Any]],
    *,
    layers: Sequence[str] | None = None,
    loss: Loss = F.cross_entropy,
    output: Output = None,
    tolerance: float = 0.1,
    most_samples: int = 200,
    generator: torch.Generator | None = None,
    progress: bool = True,
) -> Sensitivity:
    """Estimate the trace of the loss's Hessian in each quantised layer's weight; `model` is left as it is.

    `batches` are (inputs, targets), about 1,000 training samples in all; `loss(output, targets)` is the mean over a
    batch and has two derivatives; `output` selects a part of what the model returns, as in training, and OwnLosses() is
    for a model that returns its losses. A prepared model
    runs without its quantizers, on its float weights and with the norms of its highest width, in eval mode: the Hessian
    of a rounded function says nothing. Of a float model, name the `layers`. Layers that share a weight are taken apart,
    each with the trace of its own use.

    A layer is done when its standard error is within `tolerance` of the absolute trace, or after `most_samples` random
    vectors; what is then still less certain is logged. Memory is that of one batch, with its graph. The vectors are
    drawn from `generator` (by default one with seed 0): the same seed gives the same result, on a GPU up to rounding.
    """
    if not isinstance(tolerance, int | float) or not 0 <= tolerance < math.inf:
        raise ConfigError(f"tolerance={tolerance!r} must be a number of at least 0, such as 0.1 for 10 %")
    check_count("most_samples", most_samples, 2)
    if generator is not None and not isinstance(generator, torch.Generator):
        raise ConfigError(f"generator={generator!r} must be a torch.Generator: torch.Generator().manual_seed(0)")
    data = _Data(list(pairs(batches)), loss, output)
    view, weights = _float_copy(model, layers)
    if isinstance(loss, OwnLosses):
        _ask_for_losses(view)
    generator = torch.Generator().manual_seed(0) if generator is None else generator
    forms: dict[str, list[float]] = {name: [] for name in weights}
    active, taken = dict(weights), 0
    with _bar(progress, most_samples * len(data.batches)) as advance, torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
        while active and taken < most_samples:
            count = min(TOGETHER, most_samples - taken)
            vectors = {name: _rademacher(weight, count, generator) for name, weight in active.items()}
            for name, found in data.quadratic_forms(view, active, vectors, advance).items():
                forms[name] += found
            taken += count
            active = {n: w for n, w in active.items() if taken < LEAST_SAMPLES or not _settled(forms[n], tolerance)}
    if active:
        worst = max(active, key=lambda name: _relative(forms[name]))
        log.warning(
            "%d of %d layers are not within the tolerance of %g after %d samples; the worst is %r with %.2g; "
            "raise most_samples or accept it",
            len(active), len(weights), tolerance, taken, worst, _relative(forms[worst]),
        )  # fmt: skip
    found_layers = {
        name: LayerSensitivity(
            trace=statistics.fmean(found), error=_error(found), parameters=weights[name].numel(), samples=len(found)
        )
        for name, found in forms.items()
    }
    return Sensitivity(layers=found_layers, images=data.images)


def _error(forms: list[float]) -> float:
    return statistics.stdev(forms) / math.sqrt(len(forms))


def _settled(forms: list[float], tolerance: float) -> bool:
    return _error(forms) <= tolerance * abs(statistics.fmean(forms))


def _relative(forms: list[float]) -> float:
    mean = abs(statistics.fmean(forms))
    return _error(forms) / mean if mean else math.inf


def _rademacher(weight: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """`count` vectors of +1 and -1 in the shape of `weight`, as int8 to save space; the same on every device."""
    shape = (count, *weight.shape)
    bits = torch.randint(0, 2, shape, generator=generator, device=generator.device, dtype=torch.int8)
    return bits.mul_(2).sub_(1).to(weight.device)


class _Data:
    """The batches, how many samples each has, and the loss over all of them: the mean over the samples."""

    def __init__(self, batches: list[tuple[Batch, Any]], loss: Loss, output: Output = None):
        if not batches:
            raise ConfigError("there are no batches; pass (inputs, targets) of about 1,000 samples")
        self.batches, self.loss, self.output = batches, loss, output
        self.sizes = [_samples(number, *batch) for number, batch in enumerate(batches)]
        self.images = sum(self.sizes)

    def quadratic_forms(
        self, view: nn.Module, weights: dict[str, Tensor], vectors: dict[str, Tensor], advance: Callable[[int], None]
    ) -> dict[str, list[float]]:
        """v^T H v for each of a layer's `vectors` (count, *shape), H being its block of the whole loss's Hessian.

        H is linear in the loss, so the batches' forms add up, and one batch's graph is all that is kept.
        """
        slopes: dict[str, Tensor] = {}
        count = len(next(iter(vectors.values())))
        totals = {name: torch.zeros(count, dtype=w.dtype, device=w.device) for name, w in weights.items()}
        for number, (inputs, targets) in enumerate(self.batches):
            with GroupsAtOnce():
                loss = self._checked_loss(view, number, inputs, targets)
            gradients = _differentiate(
                loss, list(weights.values()), None, f"batch {number}: the loss cannot be differentiated"
            )
            seen: set[Any] = set()
            for (name, weight), gradient in zip(weights.items(), gradients, strict=True):
                if gradient is None:
                    continue
                _check_graph(name, gradient, seen)
                slope = gradient.detach().abs().amax()
                slopes[name] = torch.maximum(slopes.get(name, slope), slope)
                for i, vector in enumerate(vectors[name].to(weight.dtype) if gradient.requires_grad else ()):
                    (product,) = _differentiate(
                        gradient, [weight], vector, f"layer {name!r}: the loss cannot be differentiated twice"
                    )
                    if product is not None:
                        form = torch.dot(vector.reshape(-1), product.reshape(-1))
                        totals[name][i] += form * (self.sizes[number] / self.images)
            advance(count)
        found = {name: [float(form) for form in total.cpu()] for name, total in totals.items()}
        for name, forms in found.items():
            _check_forms(name, forms, slopes.get(name))
        return found

    def _checked_loss(self, view: nn.Module, number: int, inputs: Batch, targets: Any) -> Tensor:
        output = selected(call(view, with_targets(inputs, targets, self.loss)), self.output)
        ignored, classes = ignored_label(self.loss), classes_of(output)
        if ignored is not None and classes and (odd := find_odd_label(targets, classes, ignored)) is not None:
            raise ConfigError(f"batch {number}: {label_problem(odd, classes)}")
        value = self.loss(output, targets)
        if not isinstance(value, Tensor) or value.numel() != 1:
            shape = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise ConfigError(f"batch {number}: the loss must be one number, the mean over the batch; got {shape}")
        if not bool(torch.isfinite(value.detach()).all()):
            raise ConfigError(f"batch {number}: the loss is {value.item():g}; check the data and the model's weights")
        if not value.requires_grad:
            raise ConfigError(
                f"batch {number}: the loss does not depend on any of the layers' weights; is the output detached?"
            )
        return value.reshape(())


def _differentiate(
    value: Tensor, weights: list[Tensor], vector: Tensor | None, problem: str
) -> tuple[Tensor | None, ...]:
    """The gradient of `value` (times `vector`) in `weights`; with a graph if it is the first one."""
    try:
        return torch.autograd.grad(
            value, weights, vector, retain_graph=True, create_graph=vector is None, allow_unused=True
        )
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as cause:
        raise ConfigError(
            f"{problem}: {cause}; use a loss and modules made of operations that have two derivatives, "
            "such as cross_entropy"
        ) from cause


def _check_graph(name: str, gradient: Tensor, seen: set[Any]) -> None:
    """Refuse a gradient that passes something once-differentiable; `seen` collects the nodes that were looked at.

    autograd replaces such a derivative by a node that raises when it is reached, but leads nowhere: on the way to a
    weight it is never reached, and the terms behind it would be missing without a word.
    """
    pending = [gradient.grad_fn]
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        if node.name() == "torch::autograd::Error":
            raise ConfigError(
                f"layer {name!r}: the loss cannot be differentiated twice: the model or the loss has a function that "
                "is marked once_differentiable, such as a quantizer; use one with two derivatives"
            )
        seen.add(node)
        pending += [inner for inner, _ in node.next_functions]


def _check_forms(name: str, forms: list[float], slope: Tensor | None) -> None:
    if slope is None:
        raise ConfigError(
            f"layer {name!r}: the loss does not depend on its weight on any batch; leave it out with layers=[...], or "
            "pass batches that run it"
        )
    if not all(math.isfinite(form) for form in forms):
        raise ConfigError(f"layer {name!r}: its second derivative is not finite; check the data and the weights")
    if not any(forms) and float(slope) > 0:
        raise ConfigError(
            f"layer {name!r}: the loss is not twice differentiable there: it has a slope, but its second derivative is "
            "0 everywhere, as with an L1 or hinge loss; use one such as cross_entropy or mse_loss"
        )


def _ask_for_losses(view: nn.Module) -> None:
    """Put the modules of `view` that are made of others in training mode, in place; norms and dropout stay in eval."""
    for module in view.modules():
        module.training = any(True for _ in module.children()) and not isinstance(module, DECOMPOSED)


def _samples(number: int, inputs: Batch, targets: Any) -> int:
    if sample_lists(inputs) and (count := sample_count(inputs)):
        return count
    tensors = [leaf for leaf in tree_leaves((targets, inputs)) if isinstance(leaf, Tensor) and leaf.dim()]
    if not tensors or len(tensors[0]) == 0:
        raise ConfigError(f"batch {number} is empty: neither its targets nor its inputs hold a sample")
    return len(tensors[0])


def _float_copy(model: nn.Module, layers: Sequence[str] | None) -> tuple[nn.Module, dict[str, Tensor]]:
    """A copy of `model` in eval mode that quantises nothing, and the weights of its chosen `layers`.

    Only these take gradients; each is a tensor of its own, so a weight that layers share is one for each of them.
    """
    model = unwrap(model)
    if is_live(model):
        raise ConfigError("the model is live: it holds integers, no float weights; use load_trainable(path) instead")
    quantised = {name: module for name, module in model.named_modules() if isinstance(module, QuantLayer)}
    names = list(quantised) if layers is None else list(layers)
    if isinstance(layers, str) or len(set(names)) < len(names):
        raise ConfigError(f"layers={layers!r} must be a list of layer names, each once")
    if not names:
        raise ConfigError(
            "the model has no quantised layer; call prepare(model, config, ...) first, or name a float model's layers "
            "with layers=[...]"
        )
    view = copy.deepcopy(model).eval()
    if quantised:
        set_bits(view, next(iter(quantised.values())).bit_choices[0])  # the norms' set
        swap_modules(view, {m: _float_layer(m) for m in view.modules() if isinstance(m, QuantLayer)})
        swap_modules(view, {m: nn.Identity() for m in view.modules() if isinstance(m, ActivationSite)})
    view.requires_grad_(False)
    modules = dict(view.named_modules())
    weights: dict[str, Tensor] = {}
    for name in names:
        weight = modules[name]._parameters.get("weight") if name in modules else None
        if weight is None:
            kind = f"a {type(modules[name]).__name__} without one" if name in modules else "not in the model"
            raise ConfigError(f"layer {name!r}: expected a module with a weight of its own, but it is {kind}")
        if weight.dtype not in (torch.float32, torch.float64):
            raise ConfigError(f"layer {name!r}: its weight is {weight.dtype}; use model.float()")
        modules[name].weight = nn.Parameter(weight.detach())
        weights[name] = cast(Tensor, modules[name].weight)
    return view, weights


def _float_layer(layer: QuantLayer) -> nn.Module:
    """The layer without its quantizers; its weight is what they round: for schemes of the DoReFa family, tanh(W)."""
    kind = layer.kind
    made = kind.module(**kind.arguments(layer), device="meta")
    rounded = layer.weight_quantizer.rule.source(layer.weight)
    made.weight = nn.Parameter(rounded.detach())
    if kind.has_bias:
        made.bias = layer.bias
    keep_attributes(made, layer)
    return made.eval()


@contextmanager
def _bar(show: bool, total: int) -> Iterator[Callable[[int], None]]:
    """A progress bar if asked for and rich is there; yields what advances it. It leaps to its end on an early stop."""
    bar: Any = None
    if show:
        try:
            from rich.console import Console
            from rich.progress import Progress

            bar = Progress(console=Console(stderr=True))
        except ImportError:
            log.info("rich is not installed, so there is no progress bar; pip install 'bitdial[cli]' brings it")
    if bar is None:
        yield lambda count: None
        return
    with bar:
        task = bar.add_task("Hessian trace", total=total)
        yield lambda count: bar.update(task, advance=count)
        bar.update(task, completed=total)
