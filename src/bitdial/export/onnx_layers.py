"""Quantised layers that trace into ONNX operators: QuantizeLinear and DequantizeLinear around a float operator.

    x -> [Clip] -> QuantizeLinear -> DequantizeLinear -+
                                                       +-> Conv, Gemm or MatMul -> [Add bias] -> ...
    weight codes -> DequantizeLinear -> [Add] ---------+

The input's codes lie in uint8 or int8. Widths below 8 bits have a Clip to the values of their outermost codes in front:
what is clipped divides to within half a step of the outermost code, and nothing else moves, so the codes are ours. The
Add is for the schemes whose values lie beside their codes (`nested`, `centred`, `dorefa`). Scales for groups of inputs
are those of a blocked DequantizeLinear. Where each token has a scale, the graph computes it, as
`bitdial.functional.tokens` says:

    x -> Abs -> ReduceMax -> Mul -> Max -> scale;   x, scale -> Div -> Round -> Clip -> codes;   codes, scale -> Mul

The codes are whole numbers in float32 there. The bias is a node of its own: inside the operator, onnxruntime by default
rounds it to multiples of the product of both scales, which at 2 bits is far too coarse.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bitdial import functional as bf
from bitdial.dial.dial import unwrap
from bitdial.errors import ExportError
from bitdial.live.layers import LiveLayer
from bitdial.live.plain import plain_copy
from bitdial.nn import ActivationSite, SwitchableBatchNorm
from bitdial.nn.hidden_weight import HiddenWeight
from bitdial.nn.layer_kinds import LINEAR
from bitdial.nn.recurrent import Recurrent
from bitdial.nn.stand_in import keep_attributes
from bitdial.nn.swap import swap_modules

# Properties of the ONNX nodes that come from a quantised layer.
LAYER, PART, BITS = "bitdial.layer", "bitdial.part", "bitdial.bits"
WEIGHT, INPUT = "weight", "input"
# Other than in torch, by kind: a file says nothing of memory, so a Linear is one MatMul however its input lies there.
PRODUCTS = {LINEAR: lambda layer, x, weight, bias: F.linear(x, weight, bias)}


def traceable_copy(model: nn.Module, opset: int) -> nn.Module:
    """A copy of the live `model` at its present setting, on the CPU, for torch's ONNX exporter. It cannot run."""
    layers = {name: module for name, module in unwrap(model).named_modules() if isinstance(module, LiveLayer)}
    for name, module in unwrap(model).named_modules():
        if isinstance(module, nn.LSTM | Recurrent) and module.proj_size:
            raise ExportError(
                f"{name!r} is an LSTM with proj_size={module.proj_size}, which ONNX's LSTM does not have; export a "
                "model without projections"
            )
    instead: dict[nn.Module, nn.Module] = {layer: OnnxLayer(layer, name, opset) for name, layer in layers.items()}
    for name, module in unwrap(model).named_modules():
        if isinstance(module, ActivationSite):
            instead[module] = OnnxSite(module, name, opset)
    made = plain_copy(model, instead)
    swap_modules(made, {norm: norm.active for norm in made.modules() if isinstance(norm, SwitchableBatchNorm)})
    return made.cpu().eval().requires_grad_(False)


class OnnxNodes(nn.Module):
    """A part of a model in ONNX operators, which may quantise its input. Abstract."""

    name: str
    opset: int
    weight_bits: int
    act_bits: int
    quantizes_input = is_dynamic = False

    def attach_input(self, scale: Tensor, zero_point: Tensor | None, *, bits: int, signed: bool) -> None:
        """Quantise the input by these from now on."""
        scale = scale.reshape(()).clone()
        self.quantizes_input, self.act_bits = True, bits
        zero = torch.zeros_like(scale) if zero_point is None else zero_point.reshape(())
        self.register_buffer("act_scale", scale)
        self.register_buffer("act_zero_point", zero.to(torch.int8 if signed else torch.uint8))
        least, most = bf.code_range(bits, signed=signed)
        self.register_buffer("act_least", (least - zero) * scale)
        self.register_buffer("act_most", (most - zero) * scale)

    def attach_tokens(self, clip_ratio: Tensor, *, bits: int) -> None:
        """Quantise each token of the input by a scale of its own from now on."""
        self.quantizes_input, self.is_dynamic, self.act_bits = True, True, bits
        factor = bf.token_factor(clip_ratio, bits).reshape(())
        self.register_buffer("token_factor", factor)
        self.register_buffer("least_scale", torch.full_like(factor, bf.LEAST_TOKEN_SCALE))
        least, most = bf.code_range(bits)
        self.register_buffer("act_least", torch.full_like(factor, least))
        self.register_buffer("act_most", torch.full_like(factor, most))

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
        if self.is_dynamic:
            return self._tokens(x)
        if self.act_bits < 8:
            x = self._operator("Clip", (x, self.act_least, self.act_most), x, INPUT)
        codes = self._operator("QuantizeLinear", (x, self.act_scale, self.act_zero_point), x, INPUT)
        return self._operator("DequantizeLinear", (codes, self.act_scale, self.act_zero_point), x, INPUT)

    def _tokens(self, x: Tensor) -> Tensor:
        """`x` by way of its codes, where each token has a scale of its own."""
        one = x[..., :1]  # of the shape of the scale
        magnitude = self._operator("Abs", (x,), x, INPUT)
        axis = torch.tensor([-1])
        largest = self._operator("ReduceMax", (magnitude, axis), one, INPUT, keepdims=1)
        scale = self._operator("Mul", (largest, self.token_factor), one, INPUT)
        scale = self._operator("Max", (scale, self.least_scale), one, INPUT)
        codes = self._operator("Div", (x, scale), x, INPUT)
        codes = self._operator("Round", (codes,), x, INPUT)
        codes = self._operator("Clip", (codes, self.act_least, self.act_most), x, INPUT)
        return self._operator("Mul", (codes, scale), x, INPUT)


class OnnxLayer(OnnxNodes):
    """A live layer in ONNX operators: its codes and scales at the widths that it has selected."""

    weight: Any = property(lambda self: HiddenWeight(self.name, self.weight_shape, self.weight_step))

    def __init__(self, layer: LiveLayer, name: str, opset: int):
        super().__init__()
        self.kind, self.name, self.opset = layer.kind, name, opset
        for key in (*layer.kind.sizes, *layer.kind.settings):
            setattr(self, key, getattr(layer, key))
        self.weight_shape, self.bias = layer.weight_shape, layer.bias
        self.weight_bits, self.act_bits = layer.weight_bits, layer.act_bits
        codes, bits = layer.codes, layer.weight_bits
        at_bits = codes.weight_codes(bits)
        self.register_buffer("weight_codes", at_bits.clone())
        step, self.block_size = _blocks(codes.step(bits), at_bits)
        self.register_buffer("weight_step", step)
        self.offset = codes.offset(bits)
        if self.offset:
            each = step if self.block_size else bf.spread(step.reshape(-1), at_bits)
            self.register_buffer("weight_offset", each * self.offset)
        keep_attributes(self, layer)
        if layer.quantizes_input:
            scale, zero_point = codes.act_parameters(layer.act_bits)
            if codes.is_dynamic:
                self.attach_tokens(scale, bits=layer.act_bits)
                return
            self.attach_input(scale, zero_point, bits=layer.act_bits, signed=codes.act_kind == "signed")

    def forward(self, input: Tensor) -> Tensor:
        """The product of the dequantised input with the dequantised weight."""
        weight = self.kind.from_rows(self, self.onnx_weight())
        multiply = PRODUCTS.get(self.kind, self.kind.product)
        y = multiply(self, self.onnx_input(input), weight, None)
        return y if self.bias is None else y + self.kind.over_channels(self.bias)

    def onnx_weight(self) -> Tensor:
        """The weight's values, in rows, from its codes; without a zero-point, which is 0."""
        codes: Any = self.weight_codes
        step: Any = self.weight_step
        how = {"axis": 1, "block_size": self.block_size} if self.block_size else {"axis": 0} if step.dim() else {}
        values = self._operator("DequantizeLinear", (codes, step), codes, WEIGHT, **how)
        if not self.offset:
            return values
        offset: Any = self.weight_offset
        if self.block_size:
            offset = offset.repeat_interleave(self.block_size, dim=1)
        return values + offset


class OnnxSite(OnnxNodes):
    """A quantizer that belongs to no layer, in ONNX operators."""

    def __init__(self, site: ActivationSite, name: str, opset: int):
        super().__init__()
        self.name, self.opset = name, opset
        signed = site.quantizer.kind == "signed"
        self.attach_input(site.active_scale().detach(), None, bits=site.act_bits, signed=signed)

    def forward(self, x: Tensor) -> Tensor:
        """`x` by way of its codes."""
        return self.onnx_input(x)


def _blocks(step: Tensor, codes: Tensor) -> tuple[Tensor, int]:
    """`step` as DequantizeLinear takes it, and how many inputs share one: 0 if all of a row do."""
    if step.dim() < 2:
        return step.reshape(()) if step.numel() == 1 else step.clone(), 0
    rows, groups = step.shape
    blocked = step.view(rows, groups, *(1,) * (codes.dim() - 2)).expand(rows, groups, *codes.shape[2:])
    return blocked.contiguous(), codes.shape[1] // groups
