"""The graph of a model with fused nodes: each layer does what follows it, and hands on codes instead of values.

`fuse` traces the model (torch.fx) and puts two kinds of nodes into it. A LayerCall runs a layer, its norm, a residual
addition, a ReLU, and the quantizers of up to two layers that read the result. A ValueCall does the same behind a float
value: the model's input, a pool. A max pool between a call and quantizers alone is one of codes, where a kernel runs
it. Parameters, norms and widths stay in the model's own modules. Where a node meets something that the operators do not
take, it runs the modules that it replaced.
"""

import logging
import math
import operator
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from bitdial.graph.patterns import insert_call, max_pool, module_of, only_user, take_epilogue
from bitdial.graph.trace import ThreadTracer
from bitdial.kernels.dispatch import missing_on
from bitdial.kernels.epilogue import Epilogue, Outputs
from bitdial.kernels.integer import run_epilogue
from bitdial.kernels.max_pool import run_max_pool
from bitdial.live.engines.integer.engine import IntegerEngine
from bitdial.live.engines.integer.float_layers import FixedPointLayer, FixedPointPool
from bitdial.live.engines.integer.norms import IntegerNorm, IntegerSwitchableNorm
from bitdial.live.layers import LiveLayer
from bitdial.nn import SwitchableBatchNorm
from bitdial.nn.decompose import DECOMPOSED

log = logging.getLogger(__name__)

Norm = IntegerNorm | IntegerSwitchableNorm
Kernel = IntegerEngine | FixedPointLayer  # what runs a layer by one operator, together with what follows
MOST_READERS = 2
IN_PLACE_OPERATORS = (
    operator.setitem, operator.delitem, operator.iadd, operator.isub, operator.imul, operator.itruediv,
    operator.ifloordiv, operator.imod, operator.ipow, operator.imatmul, operator.iand, operator.ior, operator.ixor,
    operator.ilshift, operator.irshift, operator.iconcat,
)  # fmt: skip


class Call(nn.Module):
    """What LayerCall and ValueCall share: norm, addition, ReLU, readers. Abstract.

    `relu_max` is the upper bound of the ReLU, None if there is none; `keep_value` says whether the value is needed.
    """

    def __init__(self, norm: Norm | None = None, relu_max: float | None = None):
        super().__init__()
        self._norm = (norm,)  # not a submodule: the model owns it
        self.relu_max, self.keep_value = relu_max, True
        self._readers: tuple[tuple[IntegerEngine, ...]] = ((),)  # nor are these

    @property
    def norm(self) -> Norm | None:
        """The batch norm, the model's own."""
        return self._norm[0]

    @property
    def readers(self) -> tuple[IntegerEngine, ...]:
        """The engines of the layers that read the result as codes."""
        return self._readers[0]

    def read_by(self, *readers: IntegerEngine) -> None:
        """Quantise the result for these."""
        self._readers = (readers,)

    def epilogue(self, residual: Tensor | None) -> Epilogue:
        """What follows, as the operators take it."""
        a, b = (*(engine.quantizer for engine in self.readers), None, None)[:2]
        affine = None if self.norm is None else self.norm.affine_now
        return Epilogue(affine, residual, self.relu_max, a, b, self.keep_value)

    def finish_apart(self, value: Tensor, residual: Tensor | None) -> tuple[Tensor, ...]:
        """Value and codes by the modules themselves, one after the other."""
        if self.norm is not None:
            value = self.norm(value)
        if residual is not None:
            value = value + residual
        if self.relu_max is not None:
            value = F.relu(value) if math.isinf(self.relu_max) else F.hardtanh(value, 0.0, self.relu_max)
        return value, *(engine.codes_of(value) for engine in self.readers)


class LayerCall(Call):
    """Runs a layer, on codes or, if it is unquantised, on values; and what follows."""

    def __init__(self, kernel: Kernel, norm: Norm | None, relu_max: float | None):
        super().__init__(norm, relu_max)
        self._kernel = (kernel,)

    @property
    def kernel(self) -> Kernel:
        """What runs the layer, the model's own."""
        return self._kernel[0]

    def forward(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, ...] | Outputs:
        """(value, codes of the first reader, of the second)."""
        kernel = self.kernel
        if x.dtype not in (torch.int8, torch.float32):  # an unquantised layer, behind something of another type
            return self.finish_apart(cast(FixedPointLayer, kernel)(x), residual)
        kernel.shapes.check(x)
        fits = self.norm is None or kernel.shapes.is_batch(x)
        if fits and (residual is None or _adds(residual, kernel.shapes.output_shape(x))):
            return kernel.run(x, self.epilogue(residual))
        return self.finish_apart(kernel.run(x, Epilogue())[0], residual)


class ValueCall(Call):
    """Does what follows a float value."""

    def forward(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, ...] | Outputs:
        """(value, codes of the first reader, of the second)."""
        fits = x.dtype == torch.float32 and (self.norm is None or x.dim() in (2, 4))
        if fits and (residual is None or _adds(residual, tuple(x.shape))):
            return run_epilogue(x, self.epilogue(residual))
        return self.finish_apart(x, residual)


def _adds(residual: object, shape: tuple[int, ...]) -> bool:
    """Whether the operators can add `residual`."""
    return isinstance(residual, Tensor) and residual.dtype == torch.float32 and tuple(residual.shape) == shape


class _Tracer(ThreadTracer):
    """Does not look into bitdial's layers and norms, nor into those of PyTorch."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return is_leaf(m) or super().is_leaf_module(m, module_qualified_name)


def is_leaf(module: nn.Module) -> bool:
    """Whether `module` is one of bitdial's, into which no graph looks."""
    ours = isinstance(module, LiveLayer | SwitchableBatchNorm | Norm | FixedPointLayer | FixedPointPool | DECOMPOSED)
    return ours or type(module).__module__ == "bitdial.live.engines.exact"


def fuse(model: nn.Module) -> nn.Module:
    """`model` with fused nodes, or `model` itself where that cannot be: then each layer runs on its own."""
    hooks = ("_forward_hooks", "_forward_pre_hooks")
    if any(getattr(module, kind) for module in model.modules() for kind in hooks):
        log.info("layers run one by one: the model has hooks, which fused nodes would pass by")
        return model
    try:
        graph = fx.GraphModule(model, _Tracer().trace(model))
    except Exception as problem:  # whatever the model's code does with a proxy
        log.info("layers run one by one: the model cannot be traced (%s)", problem)
        return model
    for node in list(graph.graph.nodes):
        if (kernel := _kernel(graph, node)) is not None:
            _replace_layer(graph, node, kernel)
    for node in list(graph.graph.nodes):
        if _calls(graph, node, Norm):
            _replace_norm(graph, node)
    if not any(_is_in_place(graph, node) for node in graph.graph.nodes):
        for node in list(graph.graph.nodes):
            if _is_quantizer(graph, node):
                _move_quantizer(graph, node)
        for node in list(graph.graph.nodes):
            _pool_codes(graph, node)
    for node in list(graph.graph.nodes):
        if _calls(graph, node, Call):
            _leave_out_value(graph, node)
    graph.graph.lint()
    graph.recompile()
    return graph


# --- into calls -----------------------------------------------------------------------------------


def _replace_layer(graph: fx.GraphModule, node: fx.Node, kernel: Kernel) -> None:
    """Replace a layer, and what can follow in the same kernel, by a LayerCall, behind a quantizer if it takes codes."""
    source = node.args[0]
    if isinstance(kernel, IntegerEngine):
        quantizer = ValueCall()
        quantizer.read_by(kernel)
        with graph.graph.inserting_before(node):  # what the layer reads is what is there now
            source = graph.graph.call_function(
                operator.getitem, (insert_call(graph, "integer", quantizer, (source, None)), 1)
            )
    norm, chain = None, [node]
    user = only_user(node)
    if user is not None and _calls(graph, user, Norm):
        norm = _norm(graph, user)
        chain.append(user)
    residual, relu_max = take_epilogue(graph, chain)
    _put(graph, LayerCall(kernel, norm, relu_max), (source, residual), chain)


def _replace_norm(graph: fx.GraphModule, node: fx.Node) -> None:
    """Replace a norm that no layer took by a ValueCall."""
    norm, chain, source = _norm(graph, node), [node], node.args[0]
    residual, relu_max = take_epilogue(graph, chain)
    _put(graph, ValueCall(norm, relu_max), (source, residual), chain)


def _put(graph: fx.GraphModule, call: Call, args: tuple[Any, ...], chain: list[fx.Node]) -> None:
    """Put `call` in the place of `chain`, where its last node was: what it adds is there by then."""
    last = chain[-1]
    with graph.graph.inserting_before(last):
        value = graph.graph.call_function(operator.getitem, (insert_call(graph, "integer", call, args), 0))
    last.replace_all_uses_with(value)
    for node in reversed(chain):
        graph.graph.erase_node(node)


# --- codes instead of values ----------------------------------------------------------------------


def _move_quantizer(graph: fx.GraphModule, node: fx.Node) -> None:
    """Let the call that makes the value quantise it; or an earlier quantizer of the same value."""
    source, (reader,) = node.args[0], _call(graph, node).readers
    assert isinstance(source, fx.Node)
    makers = [source.args[0]] if _is_value(graph, source) else []
    makers += [user for user in source.users if user is not node and _is_quantizer(graph, user) and user < node]
    for maker in makers:
        assert isinstance(maker, fx.Node)
        call = _call(graph, maker)
        if reader in call.readers:
            place = call.readers.index(reader)
        elif len(call.readers) < MOST_READERS:
            place = len(call.readers)
            call.read_by(*call.readers, reader)
        else:
            continue
        with graph.graph.inserting_after(maker):
            codes = graph.graph.call_function(operator.getitem, (maker, 1 + place))
        (old,) = node.users
        old.replace_all_uses_with(codes)
        graph.graph.erase_node(old)
        graph.graph.erase_node(node)
        return


def _pool_codes(graph: fx.GraphModule, node: fx.Node) -> None:
    """Let the call that makes a value quantise it before `node`, if that is a max pool whose result only codes need.

    These are by now made by one quantizer, or else have too many readers. Without the kernels the graph stays as it is:
    to quantise more numbers takes longer there than pools of codes spare.
    """
    pool, user = max_pool(graph, node), only_user(node)
    if pool is None or user is None or not _is_quantizer(graph, user) or not _is_value(graph, node.args[0]):
        return
    maker = cast(fx.Node, cast(fx.Node, node.args[0]).args[0])
    call, behind = _call(graph, maker), _call(graph, user).readers
    readers = tuple(dict.fromkeys((*call.readers, *behind)))
    if len(readers) > MOST_READERS or missing_on(behind[0].quantizer.device) is not None:
        return
    call.read_by(*readers)
    for old in list(user.users):
        reader = behind[cast(int, old.args[1]) - 1]
        with graph.graph.inserting_before(old):
            codes = graph.graph.call_function(operator.getitem, (maker, 1 + readers.index(reader)))
            pooled = graph.graph.call_function(run_max_pool, (codes, *pool))
        old.replace_all_uses_with(pooled)
        graph.graph.erase_node(old)
    graph.graph.erase_node(user)
    graph.graph.erase_node(node)


def _leave_out_value(graph: fx.GraphModule, node: fx.Node) -> None:
    """Tell a call whether its value is used, and drop what is not."""
    call = _call(graph, node)
    call.keep_value = False
    for item in list(node.users):
        if item.target is operator.getitem and not item.users:
            graph.graph.erase_node(item)
        elif item.args[1] == 0:
            call.keep_value = True


def _is_value(graph: fx.GraphModule, node: object) -> bool:
    if not isinstance(node, fx.Node):
        return False
    return node.target is operator.getitem and node.args[1:] == (0,) and _calls(graph, node.args[0], Call)


def _is_quantizer(graph: fx.GraphModule, node: fx.Node) -> bool:
    """Whether `node` only quantises."""
    if not _calls(graph, node, ValueCall):
        return False
    call = _call(graph, node)
    return call.norm is None and call.relu_max is None and node.args[1] is None and bool(call.readers)


# --- nodes ----------------------------------------------------------------------------------------


def _calls(graph: fx.GraphModule, node: object, kind: Any) -> bool:
    """Whether `node` calls a module of that kind, with positional arguments only."""
    if not isinstance(node, fx.Node) or node.op != "call_module" or node.kwargs:
        return False
    module = module_of(graph, node)
    return isinstance(module, kind) and (isinstance(module, Call) or len(node.args) == 1)


def _kernel(graph: fx.GraphModule, node: fx.Node) -> Kernel | None:
    """What runs the layer that `node` calls by one operator, if it is such a layer; not where tokens have scales."""
    if not _calls(graph, node, LiveLayer | FixedPointLayer):
        return None
    module = module_of(graph, node)
    kernel = module.engine if isinstance(module, LiveLayer) else module
    if isinstance(kernel, IntegerEngine) and kernel.is_dynamic:
        return None
    return kernel if isinstance(kernel, Kernel) else None


def _norm(graph: fx.GraphModule, node: fx.Node) -> Norm:
    module = module_of(graph, node)
    assert isinstance(module, Norm)
    return module


def _call(graph: fx.GraphModule, node: fx.Node) -> Call:
    module = module_of(graph, node)
    assert isinstance(module, Call)
    return module


def _is_in_place(graph: fx.GraphModule, node: fx.Node) -> bool:
    """Whether `node` may change a tensor that another node reads: then codes must be taken where they are used."""
    if node.op == "call_module":
        return bool(getattr(module_of(graph, node), "inplace", False))
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    if node.op == "call_method":
        return name.endswith("_") and not name.endswith("__")
    if node.op != "call_function":
        return False
    changes = node.target in IN_PLACE_OPERATORS or (name.endswith("_") and not name.endswith("__"))
    flagged = any(argument is True for argument in (*node.args, node.kwargs.get("inplace")))  # F.relu(x, True)
    return changes or flagged or "out" in node.kwargs
