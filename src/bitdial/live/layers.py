"""Layers that run: integer codes instead of a float master, narrowed when the dial turns.

This is the reference run time. Selecting a width narrows the stored codes and writes their values into `active`, the
weight that the float kernels use, so its outputs are those of the trained model, bit for bit.
"""

from typing import Any

import torch
from torch import Tensor, nn

from bitdial import functional as bf
from bitdial.errors import QuantizationError
from bitdial.live.hidden_weight import HiddenWeight, HidesWeight
from bitdial.nn.layer_kinds import CONV2D


class PackedLayer(HidesWeight, nn.Module):
    """What PackedConv2d and PackedLinear share. Abstract.

    Buffers: `stored`, int8 codes of the highest width (for schemes that cannot narrow: the float weight);
    `weight_scale` (widths or 1, channels); `act_scale` and `act_zero_point` (widths,), where they exist; `active`.
    """

    name: str
    stored: Tensor
    weight_scale: Tensor
    act_scale: Tensor | None
    act_zero_point: Tensor | None
    active: Tensor
    weight: Any = property(lambda self: HiddenWeight(self.name, self.stored.shape, self.active))

    def _attach(
        self,
        *,
        name: str,
        stored: Tensor,
        weight_scale: Tensor,
        act_kind: str,
        act_scale: Tensor | None,
        act_zero_point: Tensor | None,
        bit_choices: tuple[int, ...],
        scheme: str,
        ties: str,
    ) -> None:
        del self.weight
        self.name, self.act_kind = name, act_kind
        self.bit_choices, self.scheme, self.ties = bit_choices, scheme, ties
        self.register_buffer("stored", stored)
        self.register_buffer("weight_scale", weight_scale)
        self.register_buffer("act_scale", act_scale)
        self.register_buffer("act_zero_point", act_zero_point)
        self.register_buffer("active", torch.empty(stored.shape, dtype=weight_scale.dtype), persistent=False)
        self.weight_bits = self.act_bits = bit_choices[0]
        self.select_bits(bit_choices[0], bit_choices[0])
        self.register_load_state_dict_post_hook(_refresh)

    def select_bits(self, weight_bits: int, act_bits: int) -> None:
        """Narrow the stored codes to `weight_bits` into `active`, in place."""
        self.active.copy_(self.weight_values(weight_bits))
        self.weight_bits, self.act_bits = weight_bits, act_bits

    def refresh(self) -> None:
        """Bring what is made from the stored codes up to date after these have changed."""
        self.select_bits(self.weight_bits, self.act_bits)

    def weight_codes(self, bits: int) -> tuple[Tensor, Tensor]:
        """Integer codes (int8) at `bits` and the scale (channels,) of one step between them."""
        if not bf.scheme_of(self.scheme).narrows:
            scale = self.weight_scale[self.bit_choices.index(bits)]
            return bf.quantize(self.stored, scale, bits=bits, scheme=self.scheme), scale
        high = self.bit_choices[0]
        codes = bf.narrow(self.stored, high=high, low=bits, scheme=self.scheme, ties=self.ties)
        return codes, self.weight_scale[0] * 2.0 ** (high - bits)

    def shift(self, bits: int) -> int:
        """How many bits below the stored codes those of `bits` are."""
        return self.bit_choices[0] - bits if bf.scheme_of(self.scheme).narrows else 0

    def weight_values(self, bits: int) -> Tensor:
        """The weight at `bits`, multiplied out."""
        codes, step = self.weight_codes(bits)
        offset = bf.scheme_of(self.scheme).offset(self.shift(bits))
        return bf.values_by_scale(codes.to(step.dtype).add_(offset), step)

    def weight_integers(self, bits: int) -> tuple[Tensor, Tensor]:
        """The weight at `bits` as integers (int16) and the step (channels,) between them."""
        codes, step = self.weight_codes(bits)
        factor, addend = bf.scheme_of(self.scheme).integers(self.shift(bits))
        integers = codes.to(torch.int16) * factor + addend
        if step.dim() < 2:
            return integers, step / factor
        rows, multipliers = bf.split_scale(step)
        if not torch.equal(bf.join_scale(rows, multipliers), step):
            raise QuantizationError(f"layer {self.name!r}: the scales of its groups are floats; it has no integer sums")
        return bf.values_by_scale(integers, multipliers.to(torch.int16)), rows / factor

    def act_parameters(self, bits: int | None = None) -> tuple[Tensor, Tensor | None]:
        """Scale and zero-point (1,) of the activations at `bits`, or at the selected width."""
        assert self.act_scale is not None
        i = self.bit_choices.index(self.act_bits if bits is None else bits)
        zero_point = self.act_zero_point
        scale = self.act_scale[i : i + 1]
        return scale, None if zero_point is None else zero_point[i : i + 1].to(scale.dtype)

    def quantized_input(self, x: Tensor) -> Tensor:
        """`x` as its codes at the selected width say it; refuses what is not finite."""
        self.check_input(x)
        if self.act_scale is None:
            return x
        scale, zero_point = self.act_parameters()
        with torch.no_grad():
            return bf.fake_quantize_activation(x, scale, zero_point, bits=self.act_bits, kind=self.act_kind)

    def check_input(self, x: Tensor) -> None:
        """Raise QuantizationError naming this layer if `x` holds NaN or infinity.

        torch.export cannot follow a branch on values: there the check becomes an assertion of the program.
        """
        if x.numel():
            low, high = x.aminmax()
            finite = (low > -float("inf")) & (high < float("inf"))  # also false for NaN
            problem = f"layer {self.name!r}: its input holds NaN or infinity; check what goes in"
            if torch.compiler.is_exporting():
                torch._assert_async(finite, problem)
            elif not bool(finite):
                raise QuantizationError(problem)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {self.scheme}, w{self.weight_bits}a{self.act_bits}"


def _refresh(layer: PackedLayer, keys: object) -> None:
    """After other codes were loaded into a layer, what is made from them must follow."""
    layer.refresh()


class PackedConv2d(PackedLayer, nn.Conv2d):
    """nn.Conv2d on stored integer codes."""

    @classmethod
    def from_float(cls, conv: nn.Conv2d, **parts: object) -> "PackedConv2d":
        """A layer of the shape and with the bias of `conv`, and the stored `parts`."""
        layer = cls(**CONV2D.arguments(conv), device="meta")
        layer.bias = conv.bias
        layer._attach(**parts)  # type: ignore[arg-type]
        return layer

    def forward(self, input: Tensor) -> Tensor:
        """The convolution at the selected widths."""
        return self._conv_forward(self.quantized_input(input), self.active, self.bias)


class PackedLinear(PackedLayer, nn.Linear):
    """nn.Linear on stored integer codes."""

    @classmethod
    def from_float(cls, linear: nn.Linear, **parts: object) -> "PackedLinear":
        """A layer of the shape and with the bias of `linear`, and the stored `parts`."""
        layer = cls(linear.in_features, linear.out_features, linear.bias is not None, device="meta")
        layer.bias = linear.bias
        layer._attach(**parts)  # type: ignore[arg-type]
        return layer

    def forward(self, input: Tensor) -> Tensor:
        """The product at the selected widths."""
        return nn.functional.linear(self.quantized_input(input), self.active, self.bias)
