"""Quantised layers that trace into ONNX operators: QuantizeLinear and DequantizeLinear around a float operator.

    x -> [Clip] -> QuantizeLinear -> DequantizeLinear -+
                                                       +-> Conv, Gemm or MatMul -> [Add bias] -> ...
    weight codes -> DequantizeLinear -> [Add] ---------+

The input's codes lie in uint8 or int8. Widths below 8 bits have a Clip to the values of their outermost codes in front:
what is clipped divides to within half a step of the outermost code, and nothing else moves, so the codes are ours. The
Add is for the schemes whose values lie beside their codes (`nested`, `centred`, `dorefa`). The bias is a node
of its own: inside the operator, onnxruntime by default rounds it to multiples of the product of both scales, which at 2
bits is far too coarse.
"""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from bitdial import functional as bf
from bitdial.dial.dial import unwrap
from bitdial.live.hidden_weight import HiddenWeight
from bitdial.live.layers import PackedConv2d, PackedLayer, PackedLinear
from bitdial.nn import SwitchableBatchNorm
from bitdial.nn.layer_kinds import CONV2D

# Properties of the ONNX nodes that come from a quantised layer.
LAYER, PART, BITS = "bitdial.layer", "bitdial.part", "bitdial.bits"
WEIGHT, INPUT = "weight", "input"


def traceable_copy(model: nn.Module, opset: int) -> nn.Module:
    """A copy of the live `model` at its present setting, on the CPU, for torch's ONNX exporter. It cannot run."""
    model = unwrap(model)
    instead: dict[int, nn.Module] = {}
    for name, module in model.named_modules():
        if isinstance(module, PackedConv2d):
            instead[id(module)] = OnnxConv2d(module, name, opset)
        elif isinstance(module, PackedLinear):
            instead[id(module)] = OnnxLinear(module, name, opset)
        elif isinstance(module, SwitchableBatchNorm):
            instead[id(module)] = copy.deepcopy(module.active)
    return copy.deepcopy(model, instead).cpu().eval().requires_grad_(False)


class OnnxLayer(nn.Module):
    """What OnnxConv2d and OnnxLinear share: a packed layer's codes and scales at its selected widths. Abstract."""

    weight: Any = property(lambda self: HiddenWeight(self.name, self.weight_codes.shape, self.weight_step))

    def _attach(self, layer: PackedLayer, name: str, opset: int) -> None:
        del self.weight
        self.name, self.opset = name, opset
        self.weight_bits, self.act_bits = layer.weight_bits, layer.act_bits
        codes, step = layer.weight_codes(layer.weight_bits)
        self.register_buffer("weight_codes", codes.clone())
        self.register_buffer("weight_step", step.reshape(()) if step.numel() == 1 else step.clone())
        offset = bf.scheme_of(layer.scheme).offset(layer.shift(layer.weight_bits))
        self.register_buffer("weight_offset", bf.spread(step * offset, codes) if offset else None)
        self.quantizes_input = layer.act_scale is not None
        if self.quantizes_input:
            self._attach_input(layer)

    def _attach_input(self, layer: PackedLayer) -> None:
        scale, zero_point = (None if part is None else part.reshape(()).clone() for part in layer.act_parameters())
        assert scale is not None
        signed = layer.act_kind == "signed"
        zero = torch.zeros_like(scale) if zero_point is None else zero_point
        self.register_buffer("act_scale", scale)
        self.register_buffer("act_zero_point", zero.to(torch.int8 if signed else torch.uint8))
        least, most = bf.code_range(layer.act_bits, signed=signed)
        self.register_buffer("act_least", (least - zero) * scale)
        self.register_buffer("act_most", (most - zero) * scale)

    def _operator(self, name: str, inputs: tuple[Any, ...], like: Tensor, part: str, **attributes: Any) -> Tensor:
        """The ONNX operator `name`, whose result has the shape of `like` and is float, or codes if it quantises."""
        return torch.onnx.ops.symbolic(
            name,
            inputs,
            attributes,
            dtype=inputs[2].dtype if name == "QuantizeLinear" else torch.float32,
            shape=like.shape,
            version=self.opset,
            metadata_props={
                LAYER: self.name,
                PART: part,
                BITS: str(self.weight_bits if part == WEIGHT else self.act_bits),
            },
        )

    def onnx_input(self, x: Tensor) -> Tensor:
        """`x` by way of its codes, where the layer quantises its input."""
        if not self.quantizes_input:
            return x
        if self.act_bits < 8:
            x = self._operator("Clip", (x, self.act_least, self.act_most), x, INPUT)
        codes = self._operator("QuantizeLinear", (x, self.act_scale, self.act_zero_point), x, INPUT)
        return self._operator("DequantizeLinear", (codes, self.act_scale, self.act_zero_point), x, INPUT)

    def onnx_weight(self) -> Tensor:
        """The weight's values from its codes; without a zero-point, which is 0."""
        codes: Any = self.weight_codes
        axis = {"axis": 0} if self.weight_step.dim() else {}  # type: ignore[operator]
        values = self._operator("DequantizeLinear", (codes, self.weight_step), codes, WEIGHT, **axis)
        offset: Any = self.weight_offset
        return values if offset is None else values + offset


class OnnxConv2d(OnnxLayer, nn.Conv2d):
    """A PackedConv2d in ONNX operators."""

    def __init__(self, layer: PackedConv2d, name: str, opset: int):
        super().__init__(**CONV2D.arguments(layer), device="meta")
        self.bias = layer.bias
        self._attach(layer, name, opset)

    def forward(self, input: Tensor) -> Tensor:
        """The convolution of the dequantised input with the dequantised weight."""
        y = self._conv_forward(self.onnx_input(input), self.onnx_weight(), None)
        return y if self.bias is None else y + self.bias.view(-1, 1, 1)


class OnnxLinear(OnnxLayer, nn.Linear):
    """A PackedLinear in ONNX operators."""

    def __init__(self, layer: PackedLinear, name: str, opset: int):
        super().__init__(layer.in_features, layer.out_features, layer.bias is not None, device="meta")
        self.bias = layer.bias
        self._attach(layer, name, opset)

    def forward(self, input: Tensor) -> Tensor:
        """The product of the dequantised input with the dequantised weight."""
        y = functional.linear(self.onnx_input(input), self.onnx_weight())
        return y if self.bias is None else y + self.bias
