"""Layers that train at several widths: a float master weight, quantised on the way in."""

from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from bitdial.errors import QuantizationError
from bitdial.nn.layer_kinds import (
    CONV1D,
    CONV2D,
    CONV3D,
    CONV_TRANSPOSE2D,
    EMBEDDING,
    LINEAR,
    RECURRENT_WEIGHT,
    LayerKind,
)
from bitdial.nn.quantizers import ActivationQuantizer, WeightQuantizer
from bitdial.nn.recurrent import RecurrentWeight
from bitdial.nn.single_width import count_pass
from bitdial.nn.stand_in import stand_in

UNKNOWN = ""


class QuantLayer(nn.Module):
    """A layer of any kind, with two quantizers and the selected widths. Abstract: each kind has a class below.

    Only `set_bits` changes `weight_bits` and `act_bits`. Without an activation quantizer the layer is weight-only and
    `act_bits` has no effect. `fed_by` is the quantised layer that feeds this one: None if only float modules do,
    UNKNOWN if that could not be followed. `fixed_bits` is the width that the layer stays at unless a plan names it;
    None: it goes by the dial. `name` is its name in the prepared model, for errors.
    """

    kind: ClassVar[LayerKind]
    name: str = UNKNOWN
    fed_by: str | None = UNKNOWN
    fixed_bits: int | None = None
    unset_passes: int | None = None  # see `bitdial.nn.single_width`

    weight: Tensor
    bias: Any  # a tensor or None; PyTorch has different types for it
    bit_choices: tuple[int, ...]
    weight_bits: int
    act_bits: int
    weight_quantizer: WeightQuantizer
    act_quantizer: ActivationQuantizer | None

    @classmethod
    def from_float(
        cls,
        layer: nn.Module,
        weight_quantizer: WeightQuantizer,
        act_quantizer: ActivationQuantizer | None,
        name: str = UNKNOWN,
    ) -> Self:
        """A quantised layer that shares the parameters and attributes of `layer`; its `name` is for errors."""
        made: Any = cls(**cls.kind.arguments(layer), device="meta")
        stand_in(made, layer, name)
        made.weight = layer.weight
        if cls.kind.has_bias:
            made.bias = layer.bias
        made.name, made.weight_quantizer, made.act_quantizer = name, weight_quantizer, act_quantizer
        made.bit_choices = weight_quantizer.bit_choices
        made.weight_bits = made.act_bits = made.bit_choices[0]
        return made.train(layer.training)

    def select_bits(self, weight_bits: int, act_bits: int) -> None:
        """Change the selected widths of this layer."""
        self.weight_bits, self.act_bits, self.unset_passes = weight_bits, act_bits, None

    def active_scales(self) -> tuple[Tensor | None, Tensor | None]:
        """The learned weight scale and activation scale of the selected widths, where there are such."""
        act = None if self.act_quantizer is None else self.act_quantizer.scales[str(self.act_bits)]
        return self.weight_quantizer.learned_scale(self.weight_bits), act

    def weight_rows(self) -> Tensor:
        """The master weight in rows (output channels, inputs, ...): what the weight quantizer takes."""
        return self.kind.to_rows(self, self.weight)

    def quantized_input(self, x: Tensor) -> Tensor:
        """Quantise `x` at the selected width, then dequantise it; a weight-only layer takes it as it is."""
        return x if self.act_quantizer is None else self.act_quantizer(x, self.act_bits)

    def quantized_weight(self) -> Tensor:
        """Quantise the weight at the selected width, then dequantise it; in the layer's own order."""
        if not torch.compiler.is_compiling():
            count_pass(self)
        return self.kind.from_rows(self, self.weight_quantizer(self.weight_rows(), self.weight_bits))

    def forward(self, input: Tensor) -> Tensor:
        """The product of the quantised input with the quantised weight."""
        if self.weight.dtype in (torch.float16, torch.bfloat16):
            raise QuantizationError(
                f"layer {self.name!r}: its weight is {self.weight.dtype}. Weights and scales of a prepared model are "
                "float32: in 16 bits, codes would be others. Go on from before the cast (a checkpoint, or .float() on "
                "rounded values); to train in 16 bits, use TrainConfig(autocast='bfloat16') or torch.autocast"
            )
        return self.kind.product(self, self.quantized_input(input), self.quantized_weight(), self.bias)


class QuantConv1d(QuantLayer, nn.Conv1d):
    """nn.Conv1d at the selected widths."""

    kind = CONV1D


class QuantConv3d(QuantLayer, nn.Conv3d):
    """nn.Conv3d at the selected widths."""

    kind = CONV3D


class QuantConv2d(QuantLayer, nn.Conv2d):
    """nn.Conv2d at the selected widths; any stride, padding, dilation, padding mode and groups."""

    kind = CONV2D


class QuantConvTranspose2d(QuantLayer, nn.ConvTranspose2d):  # type: ignore[misc]  # it takes no output_size
    """nn.ConvTranspose2d at the selected widths; scales per channel are those of its output channels."""

    kind = CONV_TRANSPOSE2D


class QuantLinear(QuantLayer, nn.Linear):
    """nn.Linear at the selected widths."""

    kind = LINEAR


class QuantEmbedding(QuantLayer, nn.Embedding):
    """nn.Embedding whose weight is quantised at the selected width; its input is indices. A row is one embedding."""

    kind = EMBEDDING
    bias = None


class QuantRecurrentWeight(QuantLayer, RecurrentWeight):
    """A matrix of a recurrent network, quantised at the selected width; its output is the dequantised matrix."""

    kind = RECURRENT_WEIGHT
    bias = None


QUANTIZED: dict[LayerKind, type[QuantLayer]] = {
    layer.kind: layer
    for layer in (
        QuantConv1d,
        QuantConv2d,
        QuantConv3d,
        QuantConvTranspose2d,
        QuantLinear,
        QuantEmbedding,
        QuantRecurrentWeight,
    )
}
