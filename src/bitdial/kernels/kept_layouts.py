"""What a backend has made of packed words, kept beside them: one layout for each tensor of words.

A layout is made at the first product of these words at a width, and replaced at the first one at another width. It
goes with the words, or by `forget`. So a model has at most one a layer, whatever it was switched to before.
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol, TypeVar, cast

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary


class Layout(Protocol):
    """Something made of words and scales."""

    def tensors(self) -> list[Tensor]:
        """What it holds."""
        ...


class Use(NamedTuple):
    """How words are read: the arguments of the operator that its layout depends on."""

    fields: tuple[int, ...]
    bits: int
    high: int
    offset: float


Made = TypeVar("Made", bound=Layout)


class _Kept(NamedTuple):
    use: Use
    scales: tuple[Tensor | None, Tensor | None]
    versions: tuple[int | None, ...]
    layout: Layout


_kept: WeakIdKeyDictionary = WeakIdKeyDictionary()  # by words


def kept_layout(words: Tensor, scale: Tensor, group_scale: Tensor | None, use: Use, make: Callable[[], Made]) -> Made:
    """The layout of `words` for this `use` with these scales; made anew where any of them has changed."""
    versions = _version(words), _version(scale), _version(group_scale)
    found: _Kept | None = _kept.get(words)
    if (
        found is None
        or found.use != use
        or found.scales[0] is not scale
        or found.scales[1] is not group_scale
        or found.versions != versions
        or versions[0] is None
    ):
        _kept.pop(words, None)  # before the new one takes its memory
        found = _kept[words] = _Kept(use, (scale, group_scale), versions, make())
    return cast(Made, found.layout)


def forget(words: Tensor) -> None:
    """Drop the layout of `words`, if there is one."""
    _kept.pop(words, None)


def held_for(words: Tensor) -> list[Tensor]:
    """What the layout of `words` holds now."""
    found: _Kept | None = _kept.get(words)
    return [] if found is None else found.layout.tensors()


def _version(tensor: Tensor | None) -> int | None:
    """How often it was changed in place; None for tensors of inference mode, which do not count that."""
    if tensor is None:
        return 0
    return None if tensor.is_inference() else tensor._version
