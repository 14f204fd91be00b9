"""Code-exact evaluation: the definition that every kernel and backend must equal, bit for bit.

A float convolution adds in whatever order its library likes, so two backends agree only nearly, and a value near the
border between two codes may land on either side. Here every sum is a sum of integers, which has no order:

- a quantised layer sums products of activation codes (less their zero-point) and weight integers. The weight integer is
  the code, or 2 * code + 1 for schemes whose values lie at (code + 1/2). With group scales of two levels it is that
  times the multiplier of its group, a whole number from 1 to 15, so that a row still has one step;
- an unquantised layer, a weight-only layer's input and an average pool are first rounded to fixed point: integers of
  B bits times the smallest power of two that fits, one for each sample of the input and one for the whole weight. B is
  the most that keeps sums of `terms` products below 2^53, at most 24: floor((52 - ceil(log2 terms)) / 2) for a float
  layer, 43 - ceil(log2 terms) beside integer weights (4 less beside those with multipliers), and for a pool
  52 - ceil(log2 of the image's pixels), not capped. A float layer so rounded is about as precise as float32 at 64
  terms, and ten times coarser at thousands. A sample that holds NaN or infinity becomes NaN throughout;
- plain float scales for groups are for weight-only layers: each group of inputs has an exact sum, which is multiplied
  with its step in float64; these products are added in float64 in the order of the groups, and the total is rounded
  to float32 once;
- a layer that picks rows (an embedding), or gives its weight to a recurrent network, sums nothing: its values are
  integer * step, rounded once;
- what follows is float32, one rounding per operation, in this order:

      y = float32(sum) * float32(act_scale * weight_step)      per channel; where each token has its own scale
                                                               (dynamic): y = float32(sum) * weight_step * token_scale
      y = y + bias                                             if the layer has one
      y = y * multiplier + offset                              if a batch norm follows
      ...                                                      what the model does next (ReLU, additions, max pool)
      code = clip(round_half_even(y / act_scale) + zero_point) the next layer's quantizer

  with weight_step = weight_scale * 2^shift (half of it where the integer is 2 * code + 1), and for a norm
  multiplier = float32(weight / sqrt(var + eps)), offset = float32(bias - mean * weight / sqrt(var + eps)), both
  computed in float64 from left to right.

Sums are carried in float64, where integers below 2^53 are exact. Modules of other kinds run as they are, so do norms of
a class that changes how a batch norm computes; sums that a model takes by function (`x.mean(...)`, attention, recurrent
networks) are float32 sums and outside this definition. So that they have one order on one machine, images are laid out
as kernels lay them out, channels last.

This file judges the others: nothing here comes from another engine, and no engine inherits from it.
"""

import math
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from bitdial import functional as bf
from bitdial.dial.dial import dialled_layers
from bitdial.errors import ConfigError, QuantizationError
from bitdial.functional.fixed_point import fixed_point, mean_of_images
from bitdial.live.layers import LiveLayer
from bitdial.live.plain import plain_copy, take_over
from bitdial.nn.layer_kinds import CONV2D, LINEAR, LayerKind
from bitdial.nn.norms import batch_norm_type
from bitdial.nn.stand_in import keep_attributes
from bitdial.nn.swap import swap_modules

_SUM_BITS = 52
_MOST_BITS = 24
_WEIGHT_BITS = 9  # of a weight integer, 2 * code + 1 at 8 bits
_MULTIPLIER_BITS = 4  # of what it is multiplied with in groups


def code_exact(model: nn.Module) -> nn.Module:
    """A copy of the live `model` (from `load`) whose every sum is an integer sum; `set_bits` works on it as well."""
    for name, layer in dialled_layers(model).items():
        if not isinstance(layer, LiveLayer):
            kind = type(layer).__name__
            raise ConfigError(f"layer {name!r} is a {kind}; code_exact takes a live model: load(path)")
    return run_exactly(plain_copy(model))


def run_exactly(model: nn.Module) -> nn.Module:
    """Change the live `model`, whose layers have no engine, in place so that every sum is exact."""
    new: dict[nn.Module, nn.Module] = {}
    for name, module in list(model.named_modules()):
        if isinstance(module, LiveLayer):
            module.run_on(ExactEngine())
        elif (make := _EXACT.get(type(module))) is not None:
            new[module] = make(module)
        elif batch_norm_type(module) is not None:
            _check_statistics(name, module)
            new[module] = ExactNorm(module)
    swap_modules(model, new)
    return model.eval()


# --- layers on codes ------------------------------------------------------------------------------


class ExactEngine(nn.Module):
    """Multiplies by exact sums. It makes nothing of the codes beforehand."""

    name = "exact sums"

    def select(self, layer: LiveLayer, weight_bits: int, act_bits: int) -> None:
        """Nothing is to be done: the codes of a width are taken when the layer runs."""

    def refresh(self, layer: LiveLayer) -> None:
        """Nothing is to be done."""

    def multiply(self, layer: LiveLayer, x: Tensor) -> Tensor:
        """The layer's output by its definition."""
        return quantized_forward(layer, x)

    def tensors(self) -> dict[str, list[Tensor]]:
        """It holds nothing."""
        return {}

    def switched(self) -> list[Tensor]:
        """It holds nothing."""
        return []


def quantized_forward(layer: LiveLayer, x: Tensor) -> Tensor:
    """The output of a layer on codes at the selected widths."""
    layer.check_input(x)
    kind, codes = layer.kind, layer.codes
    integers, step = codes.weight_integers(layer.weight_bits), codes.integer_step(layer.weight_bits)
    if not kind.multiplies:
        values = bf.values_by_scale(integers.float(), step)
        return kind.product(layer, x, kind.from_rows(layer, values), None)
    whole = integers.double()
    if not codes.has_row_steps:
        y = _grouped_forward(layer, x, whole, step)
    elif not layer.quantizes_input:
        y = _float_input_forward(layer, x, whole, step)
    else:
        scale, zero_point = codes.act_parameters(layer.act_bits)
        a = bf.quantize_activation(x, scale, zero_point, bits=layer.act_bits, kind=codes.act_kind).double()
        if zero_point is not None:
            a -= zero_point.double()
        y = _sum(layer, a, whole).float()
        if codes.is_dynamic:
            y = y * step * bf.token_scale(x.float(), bf.token_factor(scale, layer.act_bits))
        else:
            y = y * kind.over_channels(scale * step)
    y = y if layer.bias is None else y + kind.over_channels(layer.bias)
    return _as_images(y) if kind.image_dims == 2 else y


def _sum(layer: Any, x: Tensor, rows: Tensor) -> Tensor:
    """Sums of products with a weight in rows, in float64; exact for integers whose sums stay below 2^53."""
    kind: LayerKind = layer.kind
    with torch.backends.cudnn.flags(enabled=False):  # it may choose transforms that are not exact
        return kind.product(layer, x, kind.from_rows(layer, rows), None)


def _as_images(y: Tensor) -> Tensor:
    """Images `y` as kernels lay them out, channels last: what a model sums by function depends on that."""
    return y.contiguous(memory_format=torch.channels_last) if y.dim() == 4 else y


def _fixed_point_input(layer: LiveLayer, x: Tensor, terms: int) -> tuple[Tensor, Tensor]:
    """A float input in fixed point, beside weight integers."""
    weight_bits = _WEIGHT_BITS + (0 if layer.codes.multipliers is None else _MULTIPLIER_BITS)
    bits = min(_SUM_BITS - weight_bits - math.ceil(math.log2(terms)), _MOST_BITS)
    return fixed_point(x, bits, by_sample=layer.kind.is_batch(x))


def _float_input_forward(layer: LiveLayer, x: Tensor, integers: Tensor, step: Tensor) -> Tensor:
    """Float input times integer weights."""
    a, power = _fixed_point_input(layer, x, _terms(integers))
    y = (_sum(layer, a, integers) * power).float()
    return y * layer.kind.over_channels(step)


def _grouped_forward(layer: LiveLayer, x: Tensor, integers: Tensor, step: Tensor) -> Tensor:
    """Float input times integer weights whose groups have steps (rows, groups) of their own."""
    if layer.quantizes_input:
        raise ConfigError(
            f"layer {layer.name!r} has plain float scales for groups and quantises its input, so its sums are no "
            "integer sums; use scales of two levels, or activations='float'"
        )
    a, power = _fixed_point_input(layer, x, _terms(integers))
    total: Tensor | None = None
    groups = step.shape[1]
    size = integers.shape[1] // groups
    for group in range(groups):
        own = torch.zeros_like(integers)
        inputs = slice(group * size, (group + 1) * size)
        own[:, inputs] = integers[:, inputs]
        part = (_sum(layer, a, own) * power) * layer.kind.over_channels(step[:, group].double())
        total = part if total is None else total + part
    assert total is not None
    return total.float()


def _terms(rows: Tensor) -> int:
    return rows[0].numel()


# --- unquantised layers ---------------------------------------------------------------------------


class ExactLayer(nn.Module):
    """An unquantised layer in fixed point; it has the float layer's parameters, settings and hooks."""

    weight: Tensor
    bias: Tensor | None

    def __init__(self, layer: nn.Module):
        super().__init__()
        take_over(self, layer)
        self.kind = FLOAT_KINDS[type(layer)]

    def forward(self, input: Tensor) -> Tensor:
        """The product of the rounded input and weight, exactly."""
        return float_forward(self, input)

    def plain(self) -> nn.Module:
        """The float layer."""
        return plain_layer(self)


def float_forward(layer: Any, x: Tensor) -> Tensor:
    """The output of an unquantised layer: input and weight in fixed point."""
    kind: LayerKind = layer.kind
    a, power = fixed_point(x, float_layer_bits(layer), by_sample=kind.is_batch(x))
    w, weight_power = fixed_point_weight(layer)
    y = _sum(layer, a, w) * power
    y = (y * weight_power.reshape(())).float()
    y = y if layer.bias is None else y + kind.over_channels(layer.bias.detach())
    return _as_images(y) if kind.image_dims == 2 else y


def float_layer_bits(layer: Any) -> int:
    """Bits of the fixed-point numbers of an unquantised layer, those of its input and those of its weight."""
    terms = _terms(layer.kind.to_rows(layer, layer.weight))
    return min((_SUM_BITS - math.ceil(math.log2(max(terms, 1)))) // 2, _MOST_BITS)


def fixed_point_weight(layer: Any) -> tuple[Tensor, Tensor]:
    """The weight of an unquantised layer, in rows, as whole numbers and their power, both float64."""
    weight = layer.kind.to_rows(layer, layer.weight.detach())
    return fixed_point(weight, float_layer_bits(layer), by_sample=False)


def plain_layer(layer: Any) -> nn.Module:
    """The float layer of which `layer` has the kind, the settings and the parameters."""
    made = layer.kind.module(**layer.kind.arguments(layer), device="meta")
    made.weight, made.bias = layer.weight, layer.bias
    keep_attributes(made, layer)
    return cast(nn.Module, made.eval())


# --- norms ----------------------------------------------------------------------------------------


def _check_statistics(name: str, norm: Any) -> None:
    """Refuse a batch norm whose outputs depend on the batch."""
    if norm.running_mean is None or norm.running_var is None:
        raise QuantizationError(
            f"norm {name.split('.sets.')[0]!r} keeps no running statistics, so there is no code-exact evaluation "
            "and no integer kernel for it: build it with track_running_stats=True, or run on load(..., kernels='float')"
        )


class ExactNorm(nn.Module):
    """Batch norm as one multiplication and one addition, each rounded once."""

    statistics_are_fixed = True
    running_mean: Tensor | None

    def __init__(self, norm: nn.Module):
        super().__init__()
        take_over(self, norm)
        self.plain_type = batch_norm_type(norm)

    def forward(self, input: Tensor) -> Tensor:
        """y * multiplier + offset."""
        shape = (1, -1, *(1,) * (input.dim() - 2))
        multiplier, offset = (line.to(input.device).view(shape) for line in norm_affine(self))
        return _as_images(input * multiplier + offset)

    def plain(self) -> nn.Module:
        """The batch norm."""
        return plain_norm(self)


def norm_affine(norm: Any) -> Tensor:
    """Multiplier and offset (2, channels) of a batch norm, float32, on the CPU."""
    mean, variance = _float64(norm.running_mean), _float64(norm.running_var)
    weight = np.ones_like(mean) if norm.weight is None else _float64(norm.weight)
    bias = np.zeros_like(mean) if norm.bias is None else _float64(norm.bias)
    deviation = np.sqrt(variance + norm.eps)
    lines = np.stack([weight / deviation, bias - mean * weight / deviation])
    return torch.from_numpy(lines.astype(np.float32))


def _float64(values: Tensor) -> np.ndarray:
    """`values` for numpy, whose square root is rounded correctly; torch's on the CPU is not always."""
    return values.detach().double().cpu().numpy()


def plain_norm(norm: Any) -> nn.Module:
    """The batch norm of which `norm` has the settings, the parameters and the statistics."""
    made = norm.plain_type(
        norm.num_features, norm.eps, norm.momentum, norm.affine, norm.track_running_stats, device="meta"
    )
    for part in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked"):
        setattr(made, part, getattr(norm, part))
    return cast(nn.Module, made.eval())


# --- pools ----------------------------------------------------------------------------------------


class ExactPool(nn.Module):
    """An average pool in fixed point."""

    def __init__(self, pool: nn.Module):
        super().__init__()
        self.pool = pool

    @property
    def is_global(self) -> bool:
        """Whether each image becomes one pixel."""
        return getattr(self.pool, "output_size", None) in (1, (1, 1))

    def forward(self, input: Tensor) -> Tensor:
        """The rounded quotient of an exact sum."""
        return pool_forward(mean_of_images if self.is_global else self.pool, input)

    def plain(self) -> nn.Module:
        """The pool."""
        return self.pool


def pool_forward(average: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """The `average` of images, whose sums are exact."""
    a, power = fixed_point(x, pool_bits(x), by_sample=x.dim() > 3)
    return (average(a) * power).float()


def pool_bits(x: Tensor) -> int:
    """Bits of the fixed-point numbers that an average pool adds."""
    return _SUM_BITS - math.ceil(math.log2(x.shape[-1] * x.shape[-2]))


FLOAT_KINDS: dict[type[nn.Module], LayerKind] = {kind.module: kind for kind in (CONV2D, LINEAR)}
_EXACT: dict[type[nn.Module], Callable[[nn.Module], nn.Module]] = {
    **dict.fromkeys(FLOAT_KINDS, ExactLayer),
    **dict.fromkeys((nn.AvgPool2d, nn.AdaptiveAvgPool2d), ExactPool),
}
