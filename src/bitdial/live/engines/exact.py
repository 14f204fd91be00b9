"""Code-exact evaluation: the definition that every kernel and backend must equal, bit for bit.

A float convolution adds in whatever order its library likes, so two backends agree only nearly, and a value near the
border between two codes may land on either side. Here every sum is a sum of integers, which has no order:

- a quantised layer sums products of activation codes (less their zero-point) and weight integers. The weight integer is
  the code, or 2 * code + 1 for schemes whose values lie at (code + 1/2);
- a layer kept in float, a weight-only layer's input and an average pool are first rounded to fixed point: integers of
  B bits times the smallest power of two that fits, one for each sample of the input and one for the whole weight. B is
  the most that keeps sums of `terms` products below 2^53, at most 24: floor((52 - ceil(log2 terms)) / 2) for a float
  layer, 43 - ceil(log2 terms) beside integer weights, and for a pool 52 - ceil(log2 of the image's pixels), not capped.
  A float layer so rounded is about as precise as float32 at 64 terms, and ten times coarser at thousands. A sample that
  holds NaN or infinity becomes NaN throughout;
- what follows is float32, one rounding per operation, in this order:

      y = float32(sum) * float32(act_scale * weight_step)      per channel
      y = y + bias                                             if the layer has one
      y = y * multiplier + offset                              if a batch norm follows
      ...                                                      what the model does next (ReLU, additions, max pool)
      code = clip(round_half_even(y / act_scale) + zero_point) the next layer's quantizer

  with weight_step = weight_scale * 2^shift (half of it where the integer is 2 * code + 1), and for a norm
  multiplier = float32(weight / sqrt(var + eps)), offset = float32(bias - mean * weight / sqrt(var + eps)), both
  computed in float64 from left to right.

Sums are carried in float64, where integers below 2^53 are exact. Modules of other kinds run as they are; sums that a
model takes by function (`x.mean(...)`, attention) are float32 sums and outside this definition.
"""

import copy
import math
from collections.abc import Callable
from typing import cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bitdial import functional as bf
from bitdial.dial.dial import SWITCHBOARD, dialled_layers, unwrap
from bitdial.errors import ConfigError, QuantizationError
from bitdial.functional.fixed_point import fixed_point, mean_of_images
from bitdial.live.layers import PackedConv2d, PackedLayer, PackedLinear

_SUM_BITS = 52
_MOST_BITS = 24


def code_exact(model: nn.Module) -> nn.Module:
    """A copy of the live `model` (from `load`) whose every sum is an integer sum; `set_bits` works on it as well."""
    for name, layer in dialled_layers(model).items():
        if not isinstance(layer, PackedLayer):
            kind = type(layer).__name__
            raise ConfigError(f"layer {name!r} is a {kind}; code_exact takes a live model: load(path, kernels='float')")
    model = copy.deepcopy(unwrap(model)).eval()
    vars(model).pop(SWITCHBOARD, None)  # of integer kernels, which the copy does not run on
    for module in model.modules():
        twin = getattr(module, "exact_type", _TWINS.get(type(module)))  # a module on integer kernels names its own
        if twin is not None:
            module.__class__ = twin  # the same state, another forward
    return model


def _bits_for(terms: int, factors: int) -> int:
    """Bits for each of `factors` numbers so that `terms` products of them sum below 2^53."""
    return min((_SUM_BITS - math.ceil(math.log2(max(terms, 1)))) // factors, _MOST_BITS)


def _sum(layer: nn.Module, x: Tensor, weight: Tensor) -> Tensor:
    """The layer's sums of products in float64; exact for integers whose sums stay below 2^53."""
    if isinstance(layer, nn.Conv2d):
        with torch.backends.cudnn.flags(enabled=False):  # it may choose transforms that are not exact
            return layer._conv_forward(x, weight, None)
    return F.linear(x, weight)


def _over_channels(values: Tensor, y: Tensor, layer: nn.Module) -> Tensor:
    """View per-output-channel `values` so that they broadcast over the layer's output `y`."""
    return values.view(-1, 1, 1) if isinstance(layer, nn.Conv2d) else values


def _batched(layer: nn.Module, x: Tensor) -> bool:
    return x.dim() == 4 if isinstance(layer, nn.Conv2d) else x.dim() > 1


def _terms(weight: Tensor) -> int:
    return weight[0].numel()


def _quantized_forward(layer: PackedLayer, x: Tensor) -> Tensor:
    layer.check_input(x)
    integers, step = layer.weight_integers(layer.weight_bits)
    integers = integers.double()
    if layer.act_scale is None:
        y = _float_input_forward(layer, x, integers, step)
    else:
        scale, zero_point = layer.act_parameters()
        a = bf.quantize_activation(x, scale, zero_point, bits=layer.act_bits, kind=layer.act_kind).double()
        if zero_point is not None:
            a -= zero_point.double()
        y = _sum(layer, a, integers).float()
        y = y * _over_channels(scale * step, y, layer)
    bias = cast(Tensor | None, layer.bias)
    return y if bias is None else y + _over_channels(bias, y, layer)


def _float_input_forward(layer: nn.Module, x: Tensor, integers: Tensor, step: Tensor) -> Tensor:
    """Float input times integer weights: the input in fixed point, beside 9 bits of weight."""
    bits = min(_SUM_BITS - 9 - math.ceil(math.log2(_terms(integers))), _MOST_BITS)
    a, power = fixed_point(x, bits, by_sample=_batched(layer, x))
    y = (_sum(layer, a, integers) * power).float()
    return y * _over_channels(step, y, layer)


def _float_forward(layer: nn.Conv2d | nn.Linear, x: Tensor) -> Tensor:
    """A layer kept in float: input and weight in fixed point."""
    a, power = fixed_point(x, float_layer_bits(layer), by_sample=_batched(layer, x))
    w, weight_power = fixed_point_weight(layer)
    y = _sum(layer, a, w) * power
    y = (y * weight_power.reshape(())).float()
    return y if layer.bias is None else y + _over_channels(layer.bias.detach(), y, layer)


def float_layer_bits(layer: nn.Conv2d | nn.Linear) -> int:
    """Bits of the fixed-point numbers of a layer kept in float, those of its input and those of its weight."""
    return _bits_for(_terms(layer.weight), factors=2)


def fixed_point_weight(layer: nn.Conv2d | nn.Linear) -> tuple[Tensor, Tensor]:
    """The weight of a layer kept in float as whole numbers and their power, both float64."""
    return fixed_point(layer.weight.detach(), float_layer_bits(layer), by_sample=False)


class ExactLayer(PackedLayer):
    """What both exact layers on codes share: they take the codes of a width when they run. Abstract."""

    def select_bits(self, weight_bits: int, act_bits: int) -> None:
        """Change the widths; `active` is not used."""
        self.weight_bits, self.act_bits = weight_bits, act_bits


class ExactQuantizedConv2d(ExactLayer, PackedConv2d):
    """PackedConv2d by integer sums."""

    def forward(self, input: Tensor) -> Tensor:
        """The convolution, exactly."""
        return _quantized_forward(self, input)


class ExactQuantizedLinear(ExactLayer, PackedLinear):
    """PackedLinear by integer sums."""

    def forward(self, input: Tensor) -> Tensor:
        """The product, exactly."""
        return _quantized_forward(self, input)


class ExactConv2d(nn.Conv2d):
    """A float convolution in fixed point."""

    def forward(self, input: Tensor) -> Tensor:
        """The convolution of the rounded input and weight, exactly."""
        return _float_forward(self, input)


class ExactLinear(nn.Linear):
    """A float linear layer in fixed point."""

    def forward(self, input: Tensor) -> Tensor:
        """The product of the rounded input and weight, exactly."""
        return _float_forward(self, input)


class ExactBatchNorm(nn.modules.batchnorm._BatchNorm):
    """Batch norm as one multiplication and one addition, each rounded once."""

    statistics_are_fixed = True

    def forward(self, input: Tensor) -> Tensor:
        """y * multiplier + offset."""
        shape = (1, -1, *(1,) * (input.dim() - 2))
        multiplier, offset = (line.to(input.device).view(shape) for line in norm_lines(self))
        return input * multiplier + offset


def norm_lines(norm: nn.modules.batchnorm._BatchNorm) -> Tensor:
    """Multiplier and offset (2, channels) of a batch norm, float32, on the CPU."""
    if norm.running_mean is None or norm.running_var is None:
        raise QuantizationError("code-exact evaluation needs batch norms that keep running statistics")
    mean, variance = _float64(norm.running_mean), _float64(norm.running_var)
    weight = _float64(norm.weight) if norm.affine else np.ones_like(mean)
    bias = _float64(norm.bias) if norm.affine else np.zeros_like(mean)
    deviation = np.sqrt(variance + norm.eps)
    lines = np.stack([weight / deviation, bias - mean * weight / deviation])
    return torch.from_numpy(lines.astype(np.float32))


def _float64(values: Tensor) -> np.ndarray:
    """`values` for numpy, whose square root is rounded correctly; torch's on the CPU is not always."""
    return values.detach().double().cpu().numpy()


class ExactAvgPool2d(nn.AvgPool2d):
    """Average pooling in fixed point."""

    def forward(self, input: Tensor) -> Tensor:
        """The rounded quotient of an exact sum."""
        return _pool(super().forward, input)


class ExactAdaptiveAvgPool2d(nn.AdaptiveAvgPool2d):
    """Adaptive average pooling in fixed point."""

    @property
    def is_global(self) -> bool:
        """Whether each image becomes one pixel."""
        return self.output_size in (1, (1, 1))

    def forward(self, input: Tensor) -> Tensor:
        """The rounded quotient of an exact sum."""
        return _pool(mean_of_images if self.is_global else super().forward, input)


def _pool(average: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    a, power = fixed_point(x, pool_bits(x), by_sample=x.dim() > 3)
    return (average(a) * power).float()


def pool_bits(x: Tensor) -> int:
    """Bits of the fixed-point numbers that an average pool adds."""
    return _SUM_BITS - math.ceil(math.log2(x.shape[-1] * x.shape[-2]))


_TWINS: dict[type[nn.Module], type[nn.Module]] = {
    PackedConv2d: ExactQuantizedConv2d,
    PackedLinear: ExactQuantizedLinear,
    nn.Conv2d: ExactConv2d,
    nn.Linear: ExactLinear,
    nn.BatchNorm1d: ExactBatchNorm,
    nn.BatchNorm2d: ExactBatchNorm,
    nn.BatchNorm3d: ExactBatchNorm,
    nn.SyncBatchNorm: ExactBatchNorm,
    nn.AvgPool2d: ExactAvgPool2d,
    nn.AdaptiveAvgPool2d: ExactAdaptiveAvgPool2d,
}
