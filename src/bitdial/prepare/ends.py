"""The ends of a model, by following its tensors: the stems that its inputs reach, the heads that make its outputs.

What counts is where weights multiply (or are looked up, as an embedding's), in a module of any class. A **stem** is a
module whose weights multiply what comes from the model's inputs alone, with no other weights before. A **head** is one
whose product reaches the model's output with no other weights behind it. So a model has as many of both as it has
inputs and outputs, and layers inside that an input also reaches (by a mask, or a skip connection) are no stems.

A product may also reach the output by choosing what is there: the scores that decide which boxes a detector keeps. And
where features are cropped at boxes, what reads the crops has read the features, not the product that made the boxes.
"""

import functools
import itertools
import math
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from bitdial.nn import LayerKind, kind_of
from bitdial.prepare.choosing import split_arguments, written_by
from bitdial.prepare.model_call import Batch, call, evaluating
from bitdial.prepare.weights import Weights

INPUT = -1  # what the tensors of a batch come from; else the numbers of products
PRODUCTS = frozenset(
    {
        *("linear", "bilinear", "matmul", "mm", "bmm", "mv", "addmm", "addbmm", "baddbmm", "addmv", "einsum", "inner"),
        *("__matmul__", "__rmatmul__", "tensordot", "multi_head_attention_forward"),
        *(f"conv{way}{dims}d" for way in ("", "_transpose") for dims in (1, 2, 3)),
        *("embedding", "embedding_bag", "__getitem__", "index_select"),
        *("lstm", "gru", "rnn_tanh", "rnn_relu", "lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell"),
    }
)


class Product(NamedTuple):
    """Weights that multiplied something: the modules that own them, and the products that what they met comes from."""

    names: frozenset[str]
    sources: frozenset[int]


@dataclass(frozen=True)
class Ends:
    """What a pass over a model shows of its weights.

    `by_order` says which of "first" and "last" could not be followed, so that the order of execution decided.
    `multiplying` are the modules whose weights multiply something. `multiply_adds` counts the whole pass, `by_layer`
    the layers of known kinds.
    """

    stems: tuple[str, ...]
    heads: tuple[str, ...]
    by_order: tuple[str, ...]
    multiplying: frozenset[str]
    multiply_adds: int
    by_layer: dict[str, int]


class _WeightFlow(TorchFunctionMode):
    """Follows tensors through every torch function: those that come from parameters alone, and data."""

    def __init__(self, model: nn.Module, weights: Weights) -> None:
        super().__init__()
        self.weights, self.running = weights, list[str]()
        self.products: list[Product] = []
        self.fixed = WeakIdKeyDictionary()  # computed from parameters and buffers alone: the weights among them
        self.data = WeakIdKeyDictionary()  # the products it comes from
        self.chosen = WeakIdKeyDictionary()  # the products that decided where it was taken from
        for tensor in itertools.chain(model.parameters(), model.buffers()):
            self.fixed[tensor] = frozenset((id(tensor),)) if id(tensor) in weights.owners else frozenset()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        unknown = any(t.dim() and t not in self.fixed and t not in self.data for t in tensors)
        places = {id(leaf) for leaf in tree_leaves(split_arguments(func, args, kwargs)[1])}
        choosing = [self.data[t] for t in tensors if t in self.data and id(t) in places]
        sources = [self.data[t] for t in tensors if t in self.data and id(t) not in places] or choosing
        met = frozenset[int]().union(*(self.fixed.get(t, frozenset()) for t in tensors))
        if met and (sources or unknown) and getattr(func, "__name__", "") in PRODUCTS:
            names = frozenset(self._owner(self.weights.owners[key]) for key in met)
            self.products.append(Product(names, frozenset().union(*sources)))
            self._mark(self.data, out, frozenset((len(self.products) - 1,)))
        elif sources:
            written = written_by(func, args, kwargs)
            chosen = [*choosing, *(self.chosen[t] for t in tensors if t in self.chosen)]
            for table, found in ((self.data, sources), (self.chosen, chosen)):
                if found:
                    self._mark(table, out, frozenset().union(*found))
                    for tensor in written:
                        table[tensor] = frozenset().union(table.get(tensor, frozenset()), *found)
        elif not unknown and tensors:
            self._mark(self.fixed, out, met)
        return out

    def _mark(self, table: WeakIdKeyDictionary, values: object, what: frozenset[int]) -> None:
        for leaf in tree_leaves(values):
            if isinstance(leaf, Tensor):
                table[leaf] = what

    def _owner(self, names: list[str]) -> str:
        """Which of the modules that share a weight is running."""
        return next((name for name in reversed(self.running) if name in names), names[0])

    def leave(self, module: nn.Module, args: Any, out: Any) -> None:
        """A hook: the module that was entered last has run."""
        self.running.pop()

    def start(self, batch: Batch) -> None:
        """Let the tensors of `batch` be the model's inputs."""
        self._mark(self.data, batch, frozenset((INPUT,)))

    def reaching(self, output: Any) -> frozenset[int]:
        """The products that the tensors of an output, or of the fields of its objects, come from or were chosen by."""
        leaves = tree_leaves(output)
        objects = [vars(leaf) for leaf in leaves if not isinstance(leaf, Tensor) and hasattr(leaf, "__dict__")]
        tensors = [leaf for leaf in (*leaves, *tree_leaves(objects)) if isinstance(leaf, Tensor)]
        tables = (self.data, self.chosen)
        return frozenset[int]().union(*(table.get(t, frozenset()) for t in tensors for table in tables)) - {INPUT}


def find_ends(model: nn.Module, weights: Weights, layers: Mapping[str, nn.Module], batch: Batch) -> Ends:
    """Run `batch` and see where the weights of `model` multiply; `layers` are those of known kinds."""
    flow, counts = _WeightFlow(model, weights), dict.fromkeys(layers, 0)

    def count(name: str, module: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
        kind, x = cast(LayerKind, kind_of(module)), args[0] if args else next(iter(kwargs.values()))
        counts[name] += kind.multiply_adds(module, x, out)

    with ExitStack() as stack:
        for name, module in weights.modules.items():
            enter = module.register_forward_pre_hook(lambda m, a, name=name: flow.running.append(name))
            leave = module.register_forward_hook(flow.leave)
            stack.callback(enter.remove)
            stack.callback(leave.remove)
        for name, layer in layers.items():
            hook = layer.register_forward_hook(functools.partial(count, name), with_kwargs=True)
            stack.callback(hook.remove)
        for parameter in [p for p in model.parameters() if p.requires_grad]:  # the counter would put hooks on them
            parameter.requires_grad_(False)
            stack.callback(parameter.requires_grad_, True)
        counter = _OperationCounter(_operation_counts())
        with evaluating(model), counter, flow:
            flow.start(batch)
            output = call(model, batch)
    stems, heads, by_order = _ends(flow.products, flow.reaching(output))
    multiplying = frozenset[str]().union(*(product.names for product in flow.products))
    return Ends(stems, heads, by_order, multiplying, max(counter.total // 2, sum(counts.values())), counts)


def _ends(
    products: list[Product], reaching: frozenset[int]
) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    """Stems, heads, and which of both are by the order of execution because the flow was lost."""
    stems = {name: None for p in products if p.sources == {INPUT} for name in sorted(p.names)}
    read = {s for p in products for s in p.sources if s != INPUT and p.names != products[s].names}
    heads = {name: None for number in sorted(reaching - read) for name in sorted(products[number].names)}
    by_order = []
    if not stems and products:
        stems, by_order = dict.fromkeys(sorted(products[0].names)), ["first"]
    if not heads and products:
        heads = dict.fromkeys(sorted(products[-1].names))
        by_order.append("last")
    return tuple(stems), tuple(heads), tuple(by_order)


class _OperationCounter(TorchDispatchMode):
    """Counts operations by `functions` of PyTorch's operators: what `FlopCounterMode` does, in a tenth of the time.

    That one imports PyTorch's compiler for it, which takes seconds.
    """

    def __init__(self, functions: Mapping[Any, Callable[..., int]]):
        super().__init__()
        self.functions, self.total = functions, 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Whether the compiler is to be told to leave this alone, for which it would be imported."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if (count := self.functions.get(func._overloadpacket)) is not None:
            self.total += count(*args, **(kwargs or {}), out_val=out)
        return out


@functools.cache
def _operation_counts() -> Mapping[Any, Callable[..., int]]:
    """PyTorch's functions that count, two operations for a multiply-add; with those that it leaves out."""
    from torch.utils.flop_counter import FlopCounterMode  # brings triton

    def attention(q: Any, k: Any, v: Any, *others: Any, **named: Any) -> int:
        *leading, queries, size = q  # several heads of queries may share one of keys: torch 2.11 counts none of these
        return 2 * math.prod(leading) * queries * k[-2] * (size + v[-1])

    def mkldnn_rnn(x: Any, w_in: Any, w_hidden: Any, *others: Any, **named: Any) -> int:
        return 2 * x[0] * x[1] * (w_in[0] * w_in[1] + w_hidden[0] * w_hidden[1])

    def cudnn_rnn(x: Any, weights: Any, *others: Any, **named: Any) -> int:
        return 2 * x[0] * x[1] * sum(w[0] * w[1] for w in weights if len(w) == 2)

    def bilinear(x: Any, weight: Any, other: Any, *others: Any, **named: Any) -> int:
        return 2 * x[0] * weight[0] * weight[1] * weight[2]

    more = {
        torch.ops.aten._trilinear: bilinear,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: attention,
        torch.ops.aten._scaled_dot_product_flash_attention: attention,
        torch.ops.aten._scaled_dot_product_efficient_attention: attention,
        torch.ops.aten._scaled_dot_product_cudnn_attention: attention,
        torch.ops.aten.mkldnn_rnn_layer: mkldnn_rnn,
        torch.ops.aten._cudnn_rnn: cudnn_rnn,
    }
    return FlopCounterMode(display=False, custom_mapping=more).flop_registry
