"""One product for layers that read the same tensor, instead of one for each.

Their words lie one after the other in one buffer, their scales too, so together they are one larger layer. The first
of them makes its product when it is called and hands the others their parts, which take them if they are called with
the very same tensor, unchanged. Whoever is called otherwise multiplies by itself, on its slice of the buffer: with
another input, at another width than its siblings, by itself, in a compiled graph.

Tensors of inference mode do not count their changes. There, and where gradients are asked for, nothing is joined.
"""

import copy
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from bitdial.kernels.kept_layouts import forget, held_for
from bitdial.kernels.packed_ops import product

if TYPE_CHECKING:
    from bitdial.live.layers import LiveLayer


class _Whole(NamedTuple):
    """All layers as one: views of what the layers have."""

    words: Tensor
    scale: Tensor
    group_scale: Tensor | None
    first: Tensor  # the words of the first layer that this was made of


class _Held(NamedTuple):
    """A product: what it was made of, and the parts that nobody has taken yet, by place."""

    x: "weakref.ref[Tensor]"
    version: int
    kind: tuple[int, torch.dtype]
    parts: dict[int, Tensor]


class Joined:
    """The layers of one product, in the order of their calls and of their words."""

    def __init__(self, layers: "Sequence[LiveLayer]"):
        self.layers, self.rows = tuple(layers), [layer.weight_shape[0] for layer in layers]
        self._whole: _Whole | None = None
        self._held: _Held | None = None
        self._together: bool | None = None  # whether layouts are those of the whole
        self.collect()

    def part(self, place: int, bits: int, given: Tensor, x: Tensor) -> Tensor | None:
        """The output (..., rows) of the layer at `place`; None if it has to multiply by itself.

        `given` is what the layer was called with, `x` the same in the type to compute in.
        """
        if torch.compiler.is_compiling() or given.is_inference() or (x.requires_grad and torch.is_grad_enabled()):
            return None
        kind = bits, x.dtype
        if place == 0:
            return self._product(kind, given, x)
        held = self._held
        if held is None or held.x() is not given or held.version != given._version or held.kind != kind:
            return None
        y = held.parts.pop(place, None)
        if not held.parts and self._held is held:
            self._held = None
        return y

    def _product(self, kind: tuple[int, torch.dtype], given: Tensor, x: Tensor) -> Tensor | None:
        """The first layer's output; keeps those of the others for them."""
        bits, layers = kind[0], self.layers
        together = all(layer.weight_bits == bits for layer in layers)
        if together is not self._together:
            self._forget(together)
        if not together:
            return None
        whole = self._whole
        codes, bias = layers[0].codes, None
        source: Any = codes.source
        if whole is None or whole.first is not source.words:
            whole = self.collect()
        if layers[0].bias is not None:
            bias = torch.cat([layer.bias for layer in layers])  # type: ignore[misc]  # all have one
        how = source.fields, bits, codes.bit_choices[0], codes.offset(bits)
        flat = x.reshape(-1, x.shape[-1])
        y = product(flat, whole.words, whole.scale, bias, *how, whole.group_scale).view(*x.shape[:-1], -1)
        shaped = [part.contiguous() for part in y.split(self.rows, dim=-1)]
        self._held = _Held(weakref.ref(given, self._gone), given._version, kind, dict(enumerate(shaped[1:], 1)))
        return shaped[0]

    def _gone(self, x: "weakref.ref[Tensor]") -> None:
        """Nobody has the input any more, so nobody will ask for the parts."""
        held = self._held
        if held is not None and held.x is x:
            self._held = None

    def collect(self) -> _Whole:
        """Lay the words and scales of all layers together, where they are not, and know them as one, in place."""
        sources, engines = self._sources(), [layer.engine for layer in self.layers]
        with torch.inference_mode(False), torch.no_grad():
            words, parts = _one_of([source.words for source in sources], dim=1)
            for source, part in zip(sources, parts, strict=True):
                source.words = part
            scale, parts = _one_of([engine.scale for engine in engines], dim=0)
            for engine, part in zip(engines, parts, strict=True):
                engine.scale = part
            group_scale = None
            if engines[0].group_scale is not None:
                group_scale, parts = _one_of([engine.group_scale for engine in engines], dim=0)
                for engine, part in zip(engines, parts, strict=True):
                    engine.group_scale = part
        self._whole = _Whole(words, scale, group_scale, sources[0].words)
        return self._whole

    def reset(self) -> None:
        """Tensors of the layers were replaced: look at them anew."""
        self._forget(None)
        self._whole = self._held = None

    def tensors(self) -> list[Tensor]:
        """What a backend has made of the words as a whole."""
        return [] if self._whole is None else held_for(self._whole.words)

    def _sources(self) -> list[Any]:
        """What has the words of each layer."""
        return [layer.codes.source for layer in self.layers]

    def _forget(self, together: bool | None) -> None:
        """Drop the layouts of the other way to multiply."""
        self._together = together
        if together:
            for source in self._sources():
                forget(source.words)
        elif self._whole is not None:
            forget(self._whole.words)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Joined":
        """For copies of the layers, which may not be complete yet."""
        new = memo[id(self)] = Joined.__new__(Joined)
        new._whole = new._held = new._together = None
        new.layers, new.rows = copy.deepcopy(self.layers, memo), self.rows
        return new

    def __getstate__(self) -> dict[str, Any]:
        return {"layers": self.layers, "rows": self.rows, "_whole": None, "_held": None, "_together": None}


def _one_of(parts: Sequence[Tensor], dim: int) -> tuple[Tensor, list[Tensor]]:
    """(a tensor that has `parts` one after the other, these as views of it); the parts themselves where they are so."""
    first, begins = parts[0], [0]
    for part in parts:
        begins.append(begins[-1] + part.shape[dim])
    size = [*first.shape[:dim], begins[-1], *first.shape[dim + 1 :]]
    step = first.stride(dim) * first.element_size()
    if all(
        part.device == first.device
        and part.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        and part.data_ptr() == first.data_ptr() + begin * step
        and part.stride() == first.stride()
        for part, begin in zip(parts, begins, strict=False)
    ):
        return first.detach().as_strided(size, first.stride()), list(parts)
    whole = torch.cat(list(parts), dim=dim)
    return whole, list(whole.split([part.shape[dim] for part in parts], dim=dim))
