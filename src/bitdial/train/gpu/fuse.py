"""The fast path of training on a GPU: the same model, called through kernels that do several of its layers at once.

`FastModel` traces the model (torch.fx) and puts two kinds of nodes into the graph: a convolution that quantises its
weight and takes the moments of its output, and a batch norm that goes on with the residual addition, the ReLU and the
activation quantizer of the convolution behind it. Parameters, statistics and the selected widths stay in the model's
own modules, so the dial, the optimizers and checkpoints know nothing of it. Where a node meets something that the
kernels do not serve, it runs the modules that it replaced. A model that cannot be traced is called as it is.

Tracing runs the model's Python once. What its `forward` decides in Python (by a counter, by `random`) is decided then,
as it is in a recorded CUDA graph; such a model wants TrainConfig(fused=False, cuda_graph=False).
"""

import logging
import math
import operator
from collections.abc import Iterable
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from bitdial.graph.patterns import insert_call, module_of, take_epilogue
from bitdial.graph.trace import ThreadTracer
from bitdial.kernels.fake_quantize import quantize_activation_by, quantize_weight_by
from bitdial.kernels.training import (
    Moments,
    NormSettings,
    SideStream,
    can_convolve,
    can_normalize,
    convolve,
    fits,
    normalize,
)
from bitdial.kernels.width_table import ActivationCodes, WeightCodes
from bitdial.nn import QuantConv2d, QuantLayer, SwitchableBatchNorm
from bitdial.nn.decompose import DECOMPOSED
from bitdial.prepare.model_call import Batch

log = logging.getLogger(__name__)


class Slot(Protocol):
    """What says how to quantise instead of the layer, if widths change on the device; see `train.gpu.plan_slots`."""

    def weight_codes(self) -> WeightCodes: ...

    def act_codes(self, x: Tensor) -> ActivationCodes: ...


Slots = dict[nn.Module, Any]  # the Slot of a layer, the norm that stands in for a switchable one


class FusedConv(nn.Module):
    """Calls a convolution; gives its output and, where the kernels served it, the moments of that."""

    def __init__(self, conv: nn.Conv2d, side: SideStream | None, slots: Slots):
        super().__init__()
        self._conv = (conv,)  # not a submodule: the model owns it
        self.side, self.slots = side, slots
        self.takes_quantized = False
        self.served = False  # by the kernels, when it was called last
        self.ready: tuple[Tensor, torch.cuda.Event] | None = None

    @property
    def conv(self) -> nn.Conv2d:
        """The convolution, the model's own."""
        return self._conv[0]

    def quantize_ahead(self) -> None:
        """Start to quantise the weight for the next pass, if the kernels are likely to take it."""
        codes = self.codes() if self.served and fits(self.conv) else None
        if codes is not None and self.side is not None:
            self.ready = self.side.quantize(self.conv.weight, codes)

    def codes(self) -> WeightCodes | None:
        """How the kernels quantise the weight at the selected width; None if they do not, or for a float layer."""
        conv = self.conv
        if not isinstance(conv, QuantConv2d) or not conv.weight_quantizer.learns_row_scales:
            return None
        if conv in self.slots:
            return self.slots[conv].weight_codes()
        return WeightCodes.of(**conv.weight_quantizer.settings(conv.weight, conv.weight_bits))

    def forward(self, x: Tensor) -> tuple[Tensor, Moments | None]:
        """The convolution of x, which is quantised already if `takes_quantized`."""
        conv, ready, self.ready = self.conv, self.ready, None
        if isinstance(conv, QuantConv2d) and not self.takes_quantized:
            x = _quantized_input(conv, x, self.slots.get(conv))
        self.served = can_convolve(conv, x)
        codes = self.codes() if self.served else None
        weight = conv.weight
        if isinstance(conv, QuantConv2d) and codes is None:
            weight = _quantized_weight(conv, self.slots.get(conv))
        if not self.served:
            return conv._conv_forward(x, weight, conv.bias), None
        quantized = None
        if ready is not None:
            quantized, done = ready
            torch.cuda.current_stream().wait_event(done)
        return convolve(x, conv, weight, codes, quantized, self.side)

    def quantizer_kind(self) -> str | None:
        """The kind of its activation quantizer, None if it has none."""
        quantizer = self.conv.act_quantizer if isinstance(self.conv, QuantConv2d) else None
        return None if quantizer is None else quantizer.kind


class FusedLayer(nn.Module):
    """Calls a quantised layer of any other kind, by its slot if it has one."""

    def __init__(self, layer: QuantLayer, slots: Slots):
        super().__init__()
        self._layer = (layer,)  # not a submodule: the model owns it
        self.slots = slots

    @property
    def layer(self) -> QuantLayer:
        """The layer, the model's own."""
        return self._layer[0]

    def forward(self, x: Tensor) -> Tensor:
        """The product of the quantised input with the quantised weight."""
        layer, slot = self.layer, self.slots.get(self.layer)
        x, weight = _quantized_input(layer, x, slot), _quantized_weight(layer, slot)
        return layer.kind.product(layer, x, weight, layer.bias)


def _quantized_input(layer: QuantLayer, x: Tensor, slot: Slot | None) -> Tensor:
    if layer.act_quantizer is None or slot is None:
        return layer.quantized_input(x)
    return quantize_activation_by(x, slot.act_codes(x))


def _quantized_weight(layer: QuantLayer, slot: Slot | None) -> Tensor:
    if slot is None:
        return layer.quantized_weight()
    return layer.kind.from_rows(layer, quantize_weight_by(layer.weight_rows(), slot.weight_codes()))


class FusedNorm(nn.Module):
    """Calls a batch norm and its epilogue: a residual addition, a ReLU, the quantizer of the layer behind.

    `relu_max` is the upper bound of the ReLU, None if there is none; `keep_value` says whether the value itself is
    needed.
    """

    def __init__(
        self, norm: nn.Module, slots: Slots, *, relu_max: float | None, layer: QuantLayer | None, keep_value: bool
    ):
        super().__init__()
        self._owned = (norm, layer)  # not submodules: the model owns them
        self.slots, self.relu_max, self.keep_value = slots, relu_max, keep_value

    def forward(
        self, x: Tensor, moments: Moments | None, residual: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None]:
        """The value (if kept) and what the layer behind takes (if there is one)."""
        norm, layer = self._owned
        slot = None if layer is None else self.slots.get(layer)
        if isinstance(norm, SwitchableBatchNorm):
            norm = self.slots.get(norm, norm.active)
        fits = residual is None or residual.shape == x.shape
        if isinstance(norm, nn.BatchNorm2d) and can_normalize(norm, x) and fits:
            codes = None if layer is None else _activation_codes(layer, x, slot)
            return normalize(x, residual, NormSettings(norm, moments, self.relu_max, codes, self.keep_value))
        value = norm(x)
        if residual is not None:
            value = value + residual
        if self.relu_max is not None:
            value = F.relu(value) if self.relu_max == math.inf else F.hardtanh(value, 0.0, self.relu_max)
        return value, None if layer is None else _quantized_input(layer, value, slot)


def _activation_codes(layer: QuantLayer, x: Tensor, slot: Slot | None) -> ActivationCodes:
    if slot is not None:
        return slot.act_codes(x)
    quantizer, bits = layer.act_quantizer, layer.act_bits
    assert quantizer is not None
    factor = quantizer.gradient_scale(x, bits)
    return ActivationCodes.of(quantizer.scales[str(bits)], bits=bits, kind=quantizer.kind, gradient_scale=factor)


class _Tracer(ThreadTracer):
    """Does not look into bitdial's layers, nor into those of PyTorch."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        ours = isinstance(m, QuantLayer | SwitchableBatchNorm | DECOMPOSED)
        return ours or super().is_leaf_module(m, module_qualified_name)


class FastModel:
    """Calls a model, and runs backward passes, on the fast path if there is one; shares all of the model's modules.

    The fast path lays the model's filters out channels-last, in place.
    """

    def __init__(self, model: nn.Module, *, fused: bool):
        self.side = SideStream() if fused and next(model.parameters()).is_cuda else None
        for parameter in model.parameters() if fused else ():
            if parameter.dim() == 4:  # Module.to(memory_format=...) would stumble over those with 5
                parameter.data = parameter.data.contiguous(memory_format=torch.channels_last)
        self.slots: Slots = {}
        self.model = _fuse(model, self.side, self.slots) if fused else model
        self.convolutions = [module for module in self.model.modules() if isinstance(module, FusedConv)]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The output of the model."""
        for convolution in self.convolutions:
            convolution.quantize_ahead()
        return self.model(*args, **kwargs)

    def covers(self, modules: Iterable[nn.Module]) -> bool:
        """Whether each of `modules` is called by a node of the fast path, which looks for its slot."""
        nodes = list(self.model.modules())
        called: set[nn.Module] = {node.conv for node in nodes if isinstance(node, FusedConv)}
        called |= {node.layer for node in nodes if isinstance(node, FusedLayer)}
        called |= {node._owned[0] for node in nodes if isinstance(node, FusedNorm)}
        return called.issuperset(modules)

    def arranged(self, inputs: Batch) -> Batch:
        """`inputs` in the memory layout that the fast path works in, so that it is not changed at every width."""
        if self.side is not None and isinstance(inputs, Tensor) and inputs.dim() == 4:
            return inputs.contiguous(memory_format=torch.channels_last)
        return inputs

    def backward(self, loss: Tensor) -> None:
        """Fill the gradients of the parameters."""
        loss.backward()
        if self.side is not None:
            self.side.join()


def _fuse(model: nn.Module, side: SideStream | None, slots: Slots) -> nn.Module:
    """`model` with fused nodes, or `model` itself where that cannot be."""
    on_modules = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    on_parameters = ("_backward_hooks", "_post_accumulate_grad_hooks")
    hooked = any(getattr(m, kind) for m in model.modules() for kind in on_modules)
    if hooked or any(getattr(p, kind) for p in model.parameters() for kind in on_parameters):
        log.info("training runs without fused kernels: the model has hooks, which they would pass by")
        return model
    modes = {module: module.training for module in model.modules()}
    try:
        fast = fx.GraphModule(model, _Tracer().trace(model.train()))  # what asks for the mode is answered now
    except Exception as problem:  # whatever the model's code does with a proxy
        log.info("training runs without fused kernels: the model cannot be traced (%s)", problem)
        return model
    finally:
        for module, mode in modes.items():
            module.training = mode
    for node in _plain_calls(fast):
        if type(module_of(fast, node)) in (nn.Conv2d, QuantConv2d):
            _replace_conv(fast, node, side, slots)
        elif isinstance(module_of(fast, node), QuantLayer):
            _replace_layer(fast, node, slots)
    for node in _plain_calls(fast):
        if _is_norm(module_of(fast, node)):
            _replace_norm(fast, node, slots)
    fast.graph.lint()
    fast.recompile()
    return fast


def _replace_layer(fast: fx.GraphModule, node: fx.Node, slots: Slots) -> None:
    layer = module_of(fast, node)
    assert isinstance(layer, QuantLayer)
    with fast.graph.inserting_before(node):
        out = insert_call(fast, "fused", FusedLayer(layer, slots), node.args)
    node.replace_all_uses_with(out)
    fast.graph.erase_node(node)


def _replace_conv(fast: fx.GraphModule, node: fx.Node, side: SideStream | None, slots: Slots) -> None:
    conv = module_of(fast, node)
    assert isinstance(conv, nn.Conv2d)
    with fast.graph.inserting_before(node):
        fused = insert_call(fast, "fused", FusedConv(conv, side, slots), node.args)
        out = fast.graph.call_function(operator.getitem, (fused, 0))
    node.replace_all_uses_with(out)
    fast.graph.erase_node(node)


def _replace_norm(fast: fx.GraphModule, norm: fx.Node, slots: Slots) -> None:
    """Replace `norm`, and what can follow in the same pass."""
    chain = [norm]
    residual, bound = take_epilogue(fast, chain)
    last, source = chain[-1], norm.args[0]
    reader = next((user for user in last.users if _quantizes(fast, user)), None)
    layer = None if reader is None else _fused_conv(fast, reader).conv
    assert layer is None or isinstance(layer, QuantLayer)
    keep = reader is None or len(last.users) > 1
    module = FusedNorm(module_of(fast, norm), slots, relu_max=bound, layer=layer, keep_value=keep)

    with fast.graph.inserting_before(last):
        moments = None
        if isinstance(source, fx.Node) and source.target is operator.getitem and _is_fused_conv(fast, source.args[0]):
            moments = fast.graph.call_function(operator.getitem, (source.args[0], 1))
        fused = insert_call(fast, "fused", module, (source, moments, residual))
        if reader is not None:
            _fused_conv(fast, reader).takes_quantized = True
            reader.args = (fast.graph.call_function(operator.getitem, (fused, 1)),)
        if last.users:
            last.replace_all_uses_with(fast.graph.call_function(operator.getitem, (fused, 0)))
    for node in reversed(chain):
        fast.graph.erase_node(node)


def _plain_calls(fast: fx.GraphModule) -> list[fx.Node]:
    """The nodes that call a module with one positional argument."""
    return [n for n in fast.graph.nodes if n.op == "call_module" and len(n.args) == 1 and not n.kwargs]


def _fused_conv(fast: fx.GraphModule, node: fx.Node) -> FusedConv:
    module = module_of(fast, node)
    assert isinstance(module, FusedConv)
    return module


def _is_fused_conv(fast: fx.GraphModule, node: object) -> bool:
    return isinstance(node, fx.Node) and node.op == "call_module" and isinstance(module_of(fast, node), FusedConv)


def _quantizes(fast: fx.GraphModule, node: fx.Node) -> bool:
    """Whether `node` is a convolution whose activation quantizer the norm before it can do."""
    return _is_fused_conv(fast, node) and _fused_conv(fast, node).quantizer_kind() in ("unsigned", "signed")


def _is_norm(module: nn.Module) -> bool:
    norms = module.sets.values() if isinstance(module, SwitchableBatchNorm) else [module]
    return all(type(norm) is nn.BatchNorm2d and (norm.weight is None) == (norm.bias is None) for norm in norms)
