"""Layers that train at several widths: a float master weight, quantised on the way in."""

from typing import Any

from torch import Tensor, nn

from bitdial.nn.quantizers import ActivationQuantizer, WeightQuantizer

UNKNOWN = ""


class QuantLayer(nn.Module):
    """What QuantConv2d and QuantLinear share: two quantizers and the selected widths. Abstract.

    Only `set_bits` changes `weight_bits` and `act_bits`. Without an activation quantizer the layer is weight-only and
    `act_bits` has no effect. `fed_by` is the quantised layer that feeds this one: None if only float modules do,
    UNKNOWN if that could not be followed.
    """

    fed_by: str | None = UNKNOWN

    weight: Tensor
    weight_quantizer: WeightQuantizer
    act_quantizer: ActivationQuantizer | None

    def _attach(self, weight_quantizer: WeightQuantizer, act_quantizer: ActivationQuantizer | None) -> None:
        self.weight_quantizer = weight_quantizer
        self.act_quantizer = act_quantizer
        self.bit_choices = weight_quantizer.bit_choices
        self.weight_bits = self.act_bits = self.bit_choices[0]

    def select_bits(self, weight_bits: int, act_bits: int) -> None:
        """Change the selected widths of this layer."""
        self.weight_bits, self.act_bits = weight_bits, act_bits

    def active_scales(self) -> tuple[Tensor | None, Tensor | None]:
        """The learned weight scale and activation scale of the selected widths, where there are such."""
        act = None if self.act_quantizer is None else self.act_quantizer.scales[str(self.act_bits)]
        return self.weight_quantizer.learned_scale(self.weight_bits), act

    def quantized(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Input and weight as their codes at the selected widths say them."""
        if self.act_quantizer is not None:
            x = self.act_quantizer(x, self.act_bits)
        return x, self.weight_quantizer(self.weight, self.weight_bits)


class QuantConv2d(QuantLayer, nn.Conv2d):
    """nn.Conv2d at the selected widths; any stride, padding, dilation, padding mode and groups."""

    @classmethod
    def from_float(
        cls, conv: nn.Conv2d, weight_quantizer: WeightQuantizer, act_quantizer: ActivationQuantizer | None
    ) -> "QuantConv2d":
        """A quantised layer that shares the parameters of `conv`."""
        layer = cls(**conv_arguments(conv), device="meta")
        layer.weight, layer.bias = conv.weight, conv.bias
        layer._attach(weight_quantizer, act_quantizer)
        return layer.train(conv.training)

    def forward(self, input: Tensor) -> Tensor:
        """The convolution of the quantised input with the quantised weight."""
        x, weight = self.quantized(input)
        return self._conv_forward(x, weight, self.bias)


class QuantLinear(QuantLayer, nn.Linear):
    """nn.Linear at the selected widths."""

    @classmethod
    def from_float(
        cls, linear: nn.Linear, weight_quantizer: WeightQuantizer, act_quantizer: ActivationQuantizer | None
    ) -> "QuantLinear":
        """A quantised layer that shares the parameters of `linear`."""
        layer = cls(linear.in_features, linear.out_features, linear.bias is not None, device="meta")
        layer.weight, layer.bias = linear.weight, linear.bias
        layer._attach(weight_quantizer, act_quantizer)
        return layer.train(linear.training)

    def forward(self, input: Tensor) -> Tensor:
        """The product of the quantised input with the quantised weight."""
        x, weight = self.quantized(input)
        return nn.functional.linear(x, weight, self.bias)


def conv_arguments(conv: nn.Conv2d) -> dict[str, Any]:
    """The constructor arguments that give another convolution of the same shape."""
    return {
        "in_channels": conv.in_channels,
        "out_channels": conv.out_channels,
        "kernel_size": conv.kernel_size,
        "stride": conv.stride,
        "padding": conv.padding,
        "dilation": conv.dilation,
        "groups": conv.groups,
        "bias": conv.bias is not None,
        "padding_mode": conv.padding_mode,
    }
