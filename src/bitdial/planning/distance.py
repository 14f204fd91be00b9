"""How far a model's outputs at a plan are from those of a reference, on samples without labels."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from bitdial.dial.dial import dialled_layers, set_bits
from bitdial.dial.plan import BitPlan, shortened
from bitdial.errors import ConfigError, QuantizationError
from bitdial.prepare.layer_outputs import compared
from bitdial.prepare.model_call import INPUTS_ALONE, Batch, evaluating, sample_count, sample_lists
from bitdial.prepare.model_output import Output

Distance = Callable[[Any, Any], Any]  # (output, the reference's output) of a batch -> a number, the mean of its samples
OWN_DISTANCE = (
    "let `output` be a function that makes it (samples, classes), such as "
    "output=lambda y: y.movedim(1, -1).flatten(0, -2), or pass a distance(output, reference) of your own"
)


def kl_divergence(output: Tensor, reference: Tensor) -> float:
    """KL(reference || output) in nats, the mean over samples; both are class logits of shape (samples, classes)."""
    _check_logits(output, reference)
    found, wanted = (F.log_softmax(logits.double(), dim=1) for logits in (output, reference))
    return float(F.kl_div(found, wanted, reduction="batchmean", log_target=True))


def relative_error(output: Any, reference: Any) -> float:
    """|output - reference|^2 / |reference|^2, of several tensors the mean of each one's; for outputs of any shape."""
    pairs = list(zip(tree_leaves(output), tree_leaves(reference), strict=False))
    shapes = [[tuple(one.shape) for one in tree_leaves(each) if isinstance(one, Tensor)] for each in (output, reference)]
    if shapes[0] != shapes[1] or not shapes[0]:
        raise ConfigError(
            f"the outputs to compare are of shapes {shapes[0]!s:.80} and {shapes[1]!s:.80}. What a detector keeps "
            "differs from setting to setting: compare what its predictors put out, output=LayerOutputs('head.classes')"
        )
    found = [(x.double(), y.double()) for x, y in pairs if isinstance(x, Tensor)]
    errors = [(x - y).square().sum() / y.square().sum().clamp_min(1e-30) for x, y in found]
    return float(sum(errors)) / len(errors)


class OutputDistance:
    """The distance of `model`'s outputs from the reference's, averaged over samples; call it with a plan.

    model      prepared or live; it is switched, and runs as it is: put it in eval mode and without gradients before
    batches    inputs only: tensors, tuples of positional or dicts of keyword arguments; a tensor or dict is one batch
    reference  a model, its outputs in a list with one entry for each batch, or None for `model` at its highest width
    distance   a function (output, reference's output) of a batch that returns a number
    output     the part of what a model returns that is compared
    """

    def __init__(
        self,
        model: nn.Module,
        batches: Batch | Iterable[Batch],
        reference: nn.Module | Sequence[Any] | None,
        *,
        distance: Distance = kl_divergence,
        output: Output = None,
    ):
        if not callable(distance):
            raise ConfigError(f"distance={distance!r} must be a function distance(output, reference) of a batch")
        self.model, self.distance, self.output = model, distance, output
        self.batches = [batches] if isinstance(batches, Tensor | dict) else list(batches)
        self.sizes = [_samples(batch, number) for number, batch in enumerate(self.batches, start=1)]
        if not self.sizes:
            raise ConfigError(f"there is no batch to measure on; pass some inputs without labels. {INPUTS_ALONE}")
        self.reference, self.wanted = self._reference_outputs(reference)
        for number, wanted in enumerate(self.wanted, start=1):
            _check_finite(wanted, f"the reference's output on batch {number}")

    @property
    def samples(self) -> int:
        """How many samples there are."""
        return sum(self.sizes)

    def __call__(self, plan: BitPlan) -> float:
        """Switch the model to `plan` and measure."""
        set_bits(self.model, plan)
        total = []
        for number, (batch, size, wanted) in enumerate(zip(self.batches, self.sizes, self.wanted, strict=True), 1):
            found = compared(self.model, batch, self.output)
            _check_finite(found, f"the model's output on batch {number} at {plan!r:.200}")
            total.append(size * self._number(found, wanted))
        return math.fsum(total) / self.samples

    def from_plan(self, plan: BitPlan) -> "OutputDistance":
        """The distance from the model's own outputs at `plan`, on the same samples."""
        set_bits(self.model, plan)
        outputs = [self._kept(self.model, batch) for batch in self.batches]
        return OutputDistance(self.model, self.batches, outputs, distance=self.distance, output=self.output)

    def _reference_outputs(self, reference: nn.Module | Sequence[Any] | None) -> tuple[str, list[Any]]:
        """What the reference is, in words, and its output on each batch."""
        if reference is None:
            layers = dialled_layers(self.model)
            set_bits(self.model, BitPlan({name: layer.bit_choices[0] for name, layer in layers.items()}))
            return "the model at its highest width", [self._kept(self.model, batch) for batch in self.batches]
        if reference is self.model:
            raise ConfigError(
                "reference is the model itself; pass the float model, or leave it out to compare with the highest width"
            )
        if isinstance(reference, nn.Module):
            with evaluating(reference):
                return "the given model", [self._kept(reference, batch) for batch in self.batches]
        if isinstance(reference, Tensor | str) or not isinstance(reference, Sequence):
            kind = type(reference).__name__
            raise ConfigError(
                f"reference is a {kind}; pass a float model, or its outputs in a list, one for each batch"
            )
        if len(reference) != len(self.batches):
            raise ConfigError(f"reference has {len(reference)} outputs, and there are {len(self.batches)} batches")
        return "the given outputs", list(reference)

    def _kept(self, model: nn.Module, batch: Batch) -> Any:
        found = compared(model, batch, self.output)
        return found.clone() if isinstance(found, Tensor) else found  # a model may use its memory again

    def _number(self, found: Any, wanted: Any) -> float:
        value = self.distance(found, wanted)
        try:
            if isinstance(value, str | bytes) or (isinstance(value, Tensor) and value.numel() != 1):
                raise TypeError(type(value).__name__)
            number = float(value)
        except (TypeError, ValueError) as problem:
            raise ConfigError(f"the distance returned {value!r:.80} where a number is wanted") from problem
        if not math.isfinite(number):
            raise ConfigError(f"the distance returned {number}; it must be finite")
        return number


def _check_logits(output: Any, reference: Any) -> None:
    for what, value in (("the model's output", output), ("the reference's output", reference)):
        if not isinstance(value, Tensor):
            raise ConfigError(
                f"{what} is a {type(value).__name__}; the KL divergence compares tensors of class logits. Say which "
                "part they are: output='logits'; or pass a distance(output, reference) of your own"
            )
        if value.dim() != 2 or value.shape[1] < 2:
            raise ConfigError(
                f"{what} has the shape {tuple(value.shape)}, which does not say along which axis the classes lie: "
                f"the KL divergence takes class logits of shape (samples, classes). For others, {OWN_DISTANCE}"
            )
    if output.shape != reference.shape:
        raise ConfigError(
            f"the model's output has the shape {tuple(output.shape)}, the reference's {tuple(reference.shape)}; "
            "they must be outputs for the same inputs"
        )


def _check_finite(value: Any, what: str) -> None:
    for leaf in tree_leaves(value):
        if isinstance(leaf, Tensor) and leaf.is_floating_point() and not bool(leaf.isfinite().all()):
            raise QuantizationError(f"{what} holds NaN or infinity; check the inputs and the model")


def _samples(batch: Any, number: int) -> int:
    """The length of the first tensor in a batch, or that of a list of images."""
    if sample_lists(batch) and (count := sample_count(batch)):
        return count
    parts = batch.values() if isinstance(batch, dict) else batch if isinstance(batch, tuple) else [batch]
    first = next((part for part in parts if isinstance(part, Tensor)), None)
    if first is None or first.dim() == 0:
        kinds = shortened([type(part).__name__ for part in parts])
        raise ConfigError(f"batch {number} has no tensor of samples, but {kinds}; give inputs as the model takes them")
    if len(first) == 0:
        raise ConfigError(f"batch {number} is empty; leave it out")
    return len(first)
