"""What goes into an ONNX file and what comes out: the names of inputs and outputs, and the axes whose size is free.

An argument `input_ids` of the forward is an input "input_ids". What is returned as `{"logits": a, "hidden": (b, c)}`
becomes the outputs "logits", "hidden_0" and "hidden_1".
"""

import dataclasses
import inspect
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.utils._pytree import tree_leaves, tree_map_only

from bitdial.errors import ConfigError
from bitdial.prepare.model_call import Batch

# {input: {axis: its name}}; inputs and axes of one name have one size. A Dim may have a least and a greatest size.
Axes = Mapping[str, Mapping[int, str | Dim]]
AXES_EXAMPLE = "{'input_ids': {1: 'sequence'}}"
FIXED = (type(None), bool, int, float, str)  # what a sample may hold besides tensors: the file is made for these values


def named_leaves(value: object, name: str = "") -> Iterator[tuple[str, Any]]:
    """The parts of `value`, named by keys, fields and places; None is left out."""
    if isinstance(value, Mapping):
        parts: Iterable[tuple[Any, Any]] = value.items()
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = ((field.name, getattr(value, field.name)) for field in dataclasses.fields(value))
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        parts = zip(value._fields, value, strict=True)
    elif isinstance(value, list | tuple):
        parts, name = enumerate(value), name or "output"
    else:
        if value is not None:
            yield name or "output", value
        return
    for key, part in parts:
        yield from named_leaves(part, f"{name}_{key}" if name else str(key))


def named_outputs(value: object) -> dict[str, Any]:
    """The parts of what a model returns by the names that they have in a file; the only part of a tuple is "output"."""
    found = list(named_leaves(value))
    if len(found) == 1 and isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        return {"output": found[0][1]}
    names: dict[str, Any] = {}
    for name, part in found:
        names[_unused(name, names)] = part
    return names


def _unused(name: str, taken: Iterable[str]) -> str:
    while name in taken:
        name += "_out"
    return name


def output_names(names: Iterable[str], inputs: Iterable[str]) -> list[str]:
    """`names`, changed where an input has the same."""
    taken = set(inputs)
    return [_unused(name, taken) for name in names]


@dataclass(frozen=True)
class Inputs:
    """A sample as arguments of the model, its tensors by their names in the file, and the free axes of each."""

    arguments: tuple[tuple[Any, ...], dict[str, Any]]
    tensors: dict[str, Tensor]
    axes: dict[str, dict[int, Dim]]

    def filled(self, tensors: Iterable[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with `tensors` in the places of the sample's; what is no tensor stays."""
        following = iter(tensors)
        filled: tuple[tuple[Any, ...], dict[str, Any]] = tree_map_only(
            Tensor, lambda _: next(following), self.arguments
        )
        return filled

    def axis_names(self) -> tuple[dict[int, str], ...] | None:
        """{axis: name} of each input, in their order; None if every size is fixed."""
        if not any(self.axes.values()):
            return None
        return tuple({axis: dim.__name__ for axis, dim in axes.items()} for axes in self.axes.values())


def bind(model: nn.Module, sample: Batch, *, dynamic_batch: bool, dynamic_axes: Axes | None) -> Inputs:
    """`sample`, which fits `model`, as inputs of a file; ConfigError if an axis or an input cannot be as asked."""
    args, kwargs = _arguments(model, sample)
    by_name = {**inspect.signature(model.forward).bind_partial(*args).arguments, **kwargs}
    for name, value in by_name.items():
        for part in tree_leaves(value):
            if not isinstance(part, (Tensor, *FIXED)):
                raise ConfigError(
                    f"input {name!r} holds a {type(part).__name__}; a file takes tensors, in tuples, lists or dicts"
                )
    tensors = {name: part for name, part in named_leaves(by_name) if isinstance(part, Tensor)}
    axes = _axes(tensors, dynamic_batch, dynamic_axes or {})
    for name, tensor in tensors.items():
        alone = 0 in axes[name] and tensor.shape[0] == 1  # torch.export takes a size of one for a constant
        tensors[name] = (torch.cat([tensor, tensor]) if alone else tensor).detach().cpu()
    return Inputs((args, kwargs), tensors, axes)


def _arguments(model: nn.Module, sample: Batch) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments, the latter in the order in which the model declares them."""
    if not isinstance(sample, dict):
        return (sample if isinstance(sample, tuple) else (sample,)), {}
    order = list(inspect.signature(model.forward).parameters)
    return (), dict(sorted(sample.items(), key=lambda item: order.index(item[0]) if item[0] in order else len(order)))


def _axes(tensors: dict[str, Tensor], dynamic_batch: bool, asked: Axes) -> dict[str, dict[int, Dim]]:
    _check_form(asked, tensors)
    names: dict[str, dict[int, str | Dim]] = {
        name: {0: "batch"} if dynamic_batch and tensor.dim() else {} for name, tensor in tensors.items()
    }
    for name, axes in asked.items():
        dimensions = tensors[name].dim()
        for axis, label in axes.items():
            if not -dimensions <= axis < dimensions:
                raise ConfigError(f"dynamic_axes: {name!r} has {dimensions} axes, and axis {axis} is none of them")
            names[name][axis % dimensions] = label
    dims = {d.__name__: d for axes in names.values() for d in axes.values() if isinstance(d, Dim)}
    for label in (d for axes in names.values() for d in axes.values() if isinstance(d, str)):
        dims.setdefault(label, Dim(label))
    found = {
        n: {a: dims[d if isinstance(d, str) else d.__name__] for a, d in sorted(axes.items())}
        for n, axes in names.items()
    }
    _check_sizes(found, tensors)
    return found


def _check_form(asked: Axes, tensors: dict[str, Tensor]) -> None:
    form = f"give names of axes by input, as in {AXES_EXAMPLE}"
    if not isinstance(asked, Mapping):
        raise ConfigError(f"dynamic_axes={asked!r}: {form}")
    for name, axes in asked.items():
        if name not in tensors:
            raise ConfigError(f"dynamic_axes names the input {name!r}; the sample has {', '.join(map(repr, tensors))}")
        if not isinstance(axes, Mapping) or not all(
            type(axis) is int and (isinstance(label, Dim) or (isinstance(label, str) and label.isidentifier()))
            for axis, label in axes.items()
        ):
            raise ConfigError(f"dynamic_axes[{name!r}]={axes!r}: {form}; a name is a word without spaces")


def _check_sizes(axes: dict[str, dict[int, Dim]], tensors: dict[str, Tensor]) -> None:
    places: dict[str, list[tuple[str, int, int]]] = {}
    for name, found in axes.items():
        for axis, dim in found.items():
            places.setdefault(dim.__name__, []).append((name, axis, tensors[name].shape[axis]))
    for label, uses in places.items():
        if len({size for *_, size in uses}) > 1:
            sizes = ", ".join(f"{size} in axis {axis} of {name!r}" for name, axis, size in uses)
            way = "dynamic_batch=False, and dynamic_axes for the axes that are free" if label == "batch" else (
                "give axes of different sizes different names"
            )  # fmt: skip
            raise ConfigError(f"axis {label!r} has several sizes in the sample: {sizes}; {way}")
        for name, axis, size in uses:
            if size < 2 and axis > 0:
                raise ConfigError(f"axis {label!r}, {axis} of {name!r}, has size {size} in the sample; give 2 or more")
