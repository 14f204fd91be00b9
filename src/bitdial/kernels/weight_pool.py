"""The weights of a whole model in one buffer, switched by one launch.

`PackedWeightPool` holds two flat buffers of packed words (`word_layout` draws them): the master, every layer at its
highest width, which never changes; and the active words, every layer at the width it is set to. A switch reads the
master once and writes the words of the layers that change. It allocates nothing, and every layer's words begin at the
same address at every width, so a recorded CUDA graph of the switch, or of the layers at these widths, stays valid.

Widths come from a table on the device. Each block of the kernel keeps the width that it wrote last and returns at once
when that is the one asked for, so switching to what is set already costs a launch and a few bytes.
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bitdial import functional as bf
from bitdial.errors import ConfigError, PlanError
from bitdial.kernels.ops import repack_
from bitdial.kernels.repack import REPACK_BLOCK
from bitdial.kernels.switch import send
from bitdial.kernels.word_layout import pack_words, packed_fields, unpack_words, words_shape


class PackedWeightPool:
    """Weights by name, stored at `high` bits, each active at one of `bit_choices`.

    The active buffer has room for the widest choice. Leaving `high` out of `bit_choices` saves memory where the highest
    width is not to be run.
    """

    on_device: tuple[str, ...] = ("master", "active", "_blocks", "_layers", "_bits", "_held")

    def __init__(
        self,
        codes: Mapping[str, Tensor],
        *,
        high: int,
        bit_choices: Sequence[int],
        scheme: str = "double_rounding",
        ties: str = "even",
        device: str | torch.device = "cpu",
        joined: Sequence[Sequence[str]] = (),
    ):
        """`codes`: int8 at `high` bits, (rows, columns) each.

        `joined` names layers of as many columns and whole row tiles whose words lie together: at one width, those of
        a single layer that has all their rows.
        """
        if not bf.scheme_of(scheme).narrows:
            raise ConfigError(f"scheme {scheme!r} has no codes to repack: it rounds the float weight at each width")
        if not codes or not bit_choices or not 2 <= min(bit_choices) <= max(bit_choices) <= high <= 8:
            raise ConfigError(f"a pool needs layers and bit_choices from 2 to high={high}, got {tuple(bit_choices)}")
        self.high, self.bit_choices = high, tuple(sorted(bit_choices, reverse=True))
        self.scheme, self.ties, self.device = scheme, ties, torch.device(device)
        self.names = {name: i for i, name in enumerate(codes)}
        self._shapes = [(matrix.shape[0], matrix.shape[1]) for matrix in codes.values()]
        self._tiles = [words_shape((), *matrix.shape)[1:] for matrix in codes.values()]
        counts = [prod(tiles) for tiles in self._tiles]
        widest = self.bit_choices[0]
        self._spans = layers = self._placed(counts, high, widest, joined)
        blocks = [(i, b) for i, count in enumerate(counts) for b in range(-(-count // REPACK_BLOCK))]
        self._layers = torch.tensor(layers, dtype=torch.int64, device=device)
        self._blocks = torch.tensor(blocks, dtype=torch.int32, device=device)
        self._held = torch.zeros(len(blocks), dtype=torch.int32, device=device)
        self._bits = torch.zeros(len(codes), dtype=torch.int32, device=device)
        self.master = self._empty_master(high * sum(counts), high * max(counts))
        for (begin, _, count, _), matrix in zip(layers, codes.values(), strict=True):
            self.master[begin : begin + high * count] = pack_words(matrix.to(device), packed_fields(high)).view(-1)
        self.active = torch.zeros(widest * sum(counts), dtype=torch.int32, device=device)
        self.bits = dict.fromkeys(codes, 0)
        self._views: dict[tuple[str, int], Tensor] = {}  # those that `words` has given
        self.set_bits(widest)

    def _placed(
        self, counts: list[int], high: int, widest: int, joined: Sequence[Sequence[str]]
    ) -> list[tuple[int, int, int, int]]:
        """For each layer: where it begins in the master and in the active buffer, its words a plane, and the stride."""
        of = dict(zip(self.names, counts, strict=True))
        first_of = {name: group[0] for group in joined for name in group}
        parts = {name: [name] for name in self.names if name not in first_of} | {g[0]: list(g) for g in joined}
        begins = dict(zip(self.names, accumulate(counts, initial=0), strict=False))
        targets, strides, total = {}, {}, 0
        for names in (parts[name] for name in self.names if name in parts):
            stride = sum(of[name] for name in names)
            for name, before in zip(names, accumulate((of[name] for name in names), initial=0), strict=False):
                targets[name], strides[name] = widest * total + before, stride
            total += stride
        return [(high * begins[name], targets[name], of[name], strides[name]) for name in self.names]

    def set_bits(self, plan: int | Mapping[str, int]) -> None:
        """Switch, in place, to one width or to the widths of the layers that `plan` names."""
        wanted = dict.fromkeys(self.names, plan) if isinstance(plan, int) else {**self.bits, **plan}
        for name, bits in wanted.items():
            if name not in self.names:
                raise PlanError(f"layer {name!r} is not in the pool; it has {', '.join(self.names)}")
            if bits not in self.bit_choices:
                raise PlanError(f"layer {name!r}: bits={bits} is not in bit_choices {self.bit_choices}")
        changed = [name for name in self.names if wanted[name] != self.bits[name]]
        send(np.fromiter(wanted.values(), np.int32, len(wanted)), self._bits)
        self.bits = wanted
        self._upload(changed)

    def _empty_master(self, words: int, words_of_largest: int) -> Tensor:
        """Room for the master; `words_of_largest` is what the largest layer has of it."""
        return torch.empty(words, dtype=torch.int32, device=self.device)

    def _upload(self, changed: Sequence[str]) -> None:
        """Bring the active words of the layers whose width changed to that of the table."""
        self.repack()

    def repack(self) -> None:
        """Bring the active words to the widths of the table, in place: one launch, which can be recorded."""
        repack_(
            self.master, self.active, self._blocks, self._layers, self._bits, self._held,
            self.high, self.bit_choices[0], self.scheme, self.ties,
        )  # fmt: skip

    def move(self, device: torch.device) -> None:
        """Move everything to `device`, in place; words taken before are of the old place."""
        if self.active.device == device:
            return
        self.device = device
        self._views.clear()
        for part in self.on_device:
            setattr(self, part, getattr(self, part).to(device))

    def words(self, name: str) -> Tensor:
        """The active words of a layer, (bits, row tiles, column tiles, 128): a view; joined ones have gaps."""
        key = name, self.bits[name]
        if key not in self._views:
            layer, bits = self.names[name], self.bits[name]
            (_, begin, _, stride), (down, across, words) = self._spans[layer], self._tiles[layer]
            # Of `.data`: a switch of other layers does not count as a change of these words.
            strides = stride, across * words, words, 1
            self._views[key] = self.active.data.as_strided((bits, down, across, words), strides, begin)
        return self._views[key]

    def fixed(self) -> list[Tensor]:
        """The tensors that no switch changes: copies of a pool may share them."""
        return [self.master, self._blocks, self._layers]

    def forget(self) -> None:
        """Take no words for what they should be: the next switch, which must name all layers, writes all of them."""
        self.bits = dict.fromkeys(self.bits, 0)
        self._held.zero_()

    def stored_codes(self, name: str) -> Tensor:
        """The codes of a layer at `high` bits, (rows, columns) int8, read back from the master."""
        layer = self.names[name]
        (begin, _, count, _), tiles = self._spans[layer], self._tiles[layer]
        words = self.master[begin : begin + self.high * count].view(self.high, *tiles)
        return unpack_words(words, packed_fields(self.high), self.high, *self._shapes[layer])

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_views": {}}  # a copy has words of its own
