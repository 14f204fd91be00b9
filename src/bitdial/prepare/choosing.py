"""Functions of torch that take values from places, or write into tensors: which of their arguments are what.

What says where to look is no part of what is found there. A detector crops its features at the boxes that it has
found, and keeps the boxes of the best scores: the crops come from the features, not from the boxes.

What is written into a tensor is found there afterwards. A detector collects the crops of all levels in one tensor.
"""

from typing import Any, NamedTuple

from torch import Tensor
from torch.utils._pytree import tree_leaves


class _Places(NamedTuple):
    """The argument that says the places: its position and its names."""

    position: int
    names: tuple[str, ...]


_CHOOSING = {
    "__getitem__": _Places(1, ()),
    "__setitem__": _Places(1, ()),
    "gather": _Places(2, ("index",)),
    "grid_sample": _Places(1, ("grid",)),
    "grid_sampler": _Places(1, ("grid",)),
    "index_copy": _Places(2, ("index",)),
    "index_put": _Places(1, ("indices",)),
    "index_select": _Places(2, ("index",)),
    "masked_fill": _Places(1, ("mask",)),
    "masked_select": _Places(1, ("mask",)),
    "ps_roi_align": _Places(1, ("rois", "boxes")),
    "ps_roi_pool": _Places(1, ("rois", "boxes")),
    "roi_align": _Places(1, ("rois", "boxes")),
    "roi_pool": _Places(1, ("rois", "boxes")),
    "scatter": _Places(2, ("index",)),
    "take_along_dim": _Places(1, ("indices",)),
    "where": _Places(0, ("condition",)),
}


def split_arguments(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """The arguments of a call of `func` that are values, and those that say where values are taken from."""
    name = getattr(func, "__name__", "")
    found = _CHOOSING.get(name) or _CHOOSING.get(name.removesuffix("_"))
    if found is None:
        return (args, kwargs), ()
    values = [argument for position, argument in enumerate(args) if position != found.position]
    named = [argument for name, argument in kwargs.items() if name not in found.names]
    places = [kwargs[name] for name in found.names if name in kwargs]
    return (values, named), (*args[found.position : found.position + 1], *places)


def written_by(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors that a call of `func` has written into; of a view, what it is a view of too."""
    name = getattr(func, "__name__", "")
    in_place = name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
    found = [
        leaf for leaf in tree_leaves((args[:1] if in_place else (), kwargs.get("out"))) if isinstance(leaf, Tensor)
    ]
    return found + [leaf._base for leaf in found if leaf._base is not None]
