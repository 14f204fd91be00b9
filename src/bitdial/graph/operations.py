"""What a model computes, as text: a line for each operation, in the order in which `forward` calls them.

    'stem'(in0; stride=(1, 1), ...)      a module of the model, by its path; its settings, if it is PyTorch's own
    ReLU(%0)                             a module without tensors, by its class; %0 is the result of line 0
    add(%1, %0)                          a function or a method

It is the same for a float model and for the prepared one: layers and norms are not looked into. Modes, hooks, dropout,
and the order of keyword arguments do not matter, nor whether an operation works in place.

`torch.fx.Tracer` changes `nn.Module` itself while it traces, which disturbs models that run in other threads. So here a
copy of the modules records what is called with proxies, and nothing outside of that copy changes.
"""

import copy
import functools
import inspect
import logging
import warnings
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.proxy import GraphAppendingTracer

log = logging.getLogger(__name__)

MOST_OPERATIONS = 10_000  # a longer forward is not followed
CONTAINERS = (nn.Module, nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
SKIPPED = {"identity", "dropout", "dropout1d", "dropout2d", "dropout3d", "alphadropout", "featurealphadropout"}
IN_PLACE = {"iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "imatmul", "iand", "ior", "ixor"}
SETTINGS = (
    "kernel_size", "stride", "padding", "output_padding", "dilation", "groups", "padding_mode", "output_size",
    "ceil_mode", "count_include_pad", "eps", "num_groups", "normalized_shape", "negative_slope", "alpha", "beta",
    "lambd", "threshold", "value", "min_val", "max_val", "approximate", "dim", "start_dim", "end_dim", "size",
    "scale_factor", "mode", "align_corners", "upscale_factor",
)  # fmt: skip


def operations(model: nn.Module, leaves: Collection[str] = ()) -> list[str] | None:
    """The lines of `model`, None if its forward cannot be followed: by control flow on values, for example.

    `leaves` names modules not to look into. The other ones are bitdial's layers and norms, and PyTorch's modules.
    """
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]), torch.no_grad():
        warnings.simplefilter("ignore")
        try:
            recorder = _Recorder(model, leaves)
            return _Lines(recorder).all(recorder.run())
        except Exception as problem:  # whatever the model's code does with a proxy
            log.debug("the model cannot be traced, so its operations are not compared: %s", problem)
            return None


class _Recorder(GraphAppendingTracer):
    """Runs the forward of a copy of `model`, on proxies; the copy shares the tensors."""

    def __init__(self, model: nn.Module, leaves: Collection[str]):
        super().__init__(fx.Graph())
        tensors = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
        self.model: nn.Module = copy.deepcopy(model, dict(tensors))
        self.modules = dict(self.model.named_modules())
        self.leaves = {name for name, m in self.modules.items() if name and (name in leaves or _is_leaf(m))}
        self.compared = set(leaves)  # what is compared elsewhere
        self.count = 0
        names: dict[int, str] = {}
        for name, module in self.modules.items():
            record = functools.partial(self.create_proxy, "call_module", name)
            called = (lambda *a, record=record, **k: record(a, k)) if name in self.leaves else module.forward
            module.__dict__.update(training=False, _compiled_call_impl=None, _call_impl=called)
            for key, tensor in (*module._parameters.items(), *module._buffers.items()):
                if tensor is not None:
                    path = names.setdefault(id(tensor), f"{name}.{key}".removeprefix("."))
                    module.__dict__[key] = self.create_proxy("get_attr", path, (), {})

    def run(self) -> fx.Node:
        """The output node; arguments that need not be given are not."""
        given = inspect.signature(self.model.forward).parameters.values()
        plain = [p for p in given if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        needed = [p for p in plain if p.default is p.empty] or plain[:1]
        proxies = {p.name: self.create_proxy("placeholder", f"in{i}", (), {}) for i, p in enumerate(needed)}
        positional = [proxies[p.name] for p in needed if p.kind != p.KEYWORD_ONLY]
        named = {p.name: proxies[p.name] for p in needed if p.kind == p.KEYWORD_ONLY}
        return self.create_node("output", "output", (self.create_arg(self.model.forward(*positional, **named)),), {})

    def create_node(self, kind: str, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        self.count += kind.startswith("call_")
        if self.count > MOST_OPERATIONS:
            raise ValueError(f"its forward has more than {MOST_OPERATIONS} operations")
        return super().create_node(kind, target, *args, **kwargs)

    def create_arg(self, a: Any) -> Any:
        if isinstance(a, Tensor):  # one that the model does not keep, or that it does not call by its name
            return self.create_node("get_attr", f"{a.dtype} {tuple(a.shape)}", (), {})
        return super().create_arg(a)


def _is_leaf(module: nn.Module) -> bool:
    """Whether `module` is a layer or norm of ours, or a module of PyTorch, or of a class that is derived from one."""
    package = type(module).__module__
    if package.startswith("bitdial.") and not package.startswith("bitdial.models."):
        return True
    bases = [base for base in type(module).__mro__ if base not in CONTAINERS]
    return any(base.__module__.startswith("torch.nn.") for base in bases)


class _Lines:
    """Writes the nodes of a recording as text."""

    def __init__(self, recorder: _Recorder):
        self.recorder = recorder
        self.words: dict[fx.Node, str] = {}  # by which a node is spoken of

    def all(self, output: fx.Node) -> list[str]:
        lines: list[str] = []
        for node in self.recorder.graph.nodes:
            if node.op in ("placeholder", "get_attr"):
                self.words[node] = node.target if node.op == "placeholder" else repr(node.target)
                continue
            name = "output" if node is output else self._name(node)
            if name.lower() in SKIPPED and node.args:
                self.words[node] = self._text(node.args[0])
                continue
            self.words[node] = f"%{len(lines)}"
            lines.append(f"{name}({self._arguments(node)})")
        return lines

    def _name(self, node: fx.Node) -> str:
        if node.op == "call_module":
            module = self.recorder.modules[str(node.target)]
            return type(module).__name__ if _has_no_tensors(module) else repr(node.target)
        name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "function")
        name = name.strip("_") if not name.startswith("__") else name
        return name[1:] if name in IN_PLACE else name

    def _arguments(self, node: fx.Node) -> str:
        named = {key: value for key, value in node.kwargs.items() if key != "inplace"}
        texts = [self._text(value) for value in node.args]
        texts += [f"{key}={self._text(named[key])}" for key in sorted(named)]
        return ", ".join(texts) + self._settings(node)

    def _settings(self, node: fx.Node) -> str:
        """Those of PyTorch's own modules; of layers and norms in a file, the file has them."""
        module = self.recorder.modules.get(str(node.target)) if node.op == "call_module" else None
        if module is None or node.target in self.recorder.compared or not type(module).__module__.startswith("torch."):
            return ""
        if isinstance(module, nn.RNNBase) or next(module.children(), None) is not None:  # these become others of ours
            return ""
        found = [f"{key}={self._text(vars(module)[key])}" for key in SETTINGS if key in vars(module)]
        return f"; {', '.join(found)}" if found else ""

    def _text(self, value: Any) -> str:
        if isinstance(value, fx.Node):
            return self.words[value]
        if isinstance(value, tuple | list):
            return f"({', '.join(self._text(each) for each in value)})"
        if isinstance(value, dict):
            return f"({', '.join(f'{key}={self._text(value[key])}' for key in sorted(value, key=str))})"
        if isinstance(value, slice):
            return ":".join(self._text(each) for each in (value.start, value.stop, value.step))
        if value is None or value is ... or isinstance(value, bool | int | float | complex | str):
            return repr(value)
        return str(value) if isinstance(value, torch.dtype | torch.device) else type(value).__name__


def _has_no_tensors(module: nn.Module) -> bool:
    plain = type(module).__module__.startswith("torch.nn.")
    return plain and not module._parameters and not module._buffers and not module._modules
