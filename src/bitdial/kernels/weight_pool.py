"""The weights of a whole model in one buffer, switched by one launch.

`PackedArena` holds two flat buffers of packed words (`layouts` draws them): the master, every layer at its highest
width, which never changes; and the active words, every layer at the width it is set to. A switch reads the master once
and writes the words of the layers that change. It allocates nothing, and every layer's words begin at the same address
at every width, so a recorded CUDA graph of the switch, or of the layers at these widths, stays valid.

Widths come from a table on the device. Each block of the kernel keeps the width that it wrote last and returns at once
when that is the one asked for, so switching to what is set already costs a launch and a few bytes.
"""

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bitdial import functional as bf
from bitdial.errors import ConfigError, PlanError
from bitdial.kernels.fake_quantize import triton_runs
from bitdial.kernels.in_place import in_place_op, send
from bitdial.kernels.width_table import SECOND
from bitdial.kernels.word_layout import pack_words, packed_fields, unpack_words, words_shape

_BLOCK = 512  # places a block of the kernel takes; `triton_repack.BLOCK` is the same, and a test says so


@in_place_op("repack_", mutates=("active", "held"))
def repack_(
    master: Tensor, active: Tensor, blocks: Tensor, layers: Tensor, bits: Tensor, held: Tensor,
    high: int, widest: int, scheme: str, ties: str,
) -> None:  # fmt: skip
    """Write the words of each layer's `bits` into `active` where `held` says that other ones are there, in place.

    `blocks` (blocks, 2): layer, number within the layer. `layers` (layers, 3): where its words begin in the master and
    in the active buffer, words a plane. `bits` (layers,), `held` (blocks,); all int32, starts int64.
    """
    rule = bf.scheme_of(scheme)
    if triton_runs(master):
        from bitdial.kernels.triton.packed import repack as triton_repack

        second = SECOND[rule.second_rounding(ties)]
        triton_repack.repack(master, active, blocks, layers, bits, held, high=high, widest=widest, second=second)
        return
    for layer in {int(owner) for (owner, _), b in zip(blocks, held, strict=True) if b != bits[int(owner)]}:
        (begin, target, count), low = layers[layer].tolist(), int(bits[layer])
        shape = words_shape(packed_fields(high), 16, count * 2)  # any shape of as many tiles does
        words = master[begin : begin + high * count].view(shape)
        codes = unpack_words(words, packed_fields(high), high, 16, count * 2)
        codes = bf.narrow(codes, high=high, low=low, scheme=scheme, ties=ties)
        active[target : target + low * count] = pack_words(codes, packed_fields(low)).view(-1)
    held.copy_(bits[blocks[:, 0].long()])


class PackedArena:
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
    ):
        """`codes`: int8 at `high` bits, (rows, columns) each."""
        if not bf.scheme_of(scheme).narrows:
            raise ConfigError(f"scheme {scheme!r} has no codes to repack: it rounds the float weight at each width")
        if not codes or not bit_choices or not 2 <= min(bit_choices) <= max(bit_choices) <= high <= 8:
            raise ConfigError(f"an arena needs layers and bit_choices from 2 to high={high}, got {tuple(bit_choices)}")
        self.high, self.bit_choices = high, tuple(sorted(bit_choices, reverse=True))
        self.scheme, self.ties, self.device = scheme, ties, torch.device(device)
        self.names = {name: i for i, name in enumerate(codes)}
        self._shapes = [(matrix.shape[0], matrix.shape[1]) for matrix in codes.values()]
        self._tiles = [words_shape((), *matrix.shape)[1:] for matrix in codes.values()]
        counts = [prod(tiles) for tiles in self._tiles]
        starts = [sum(counts[:i]) for i in range(len(counts))]
        widest = self.bit_choices[0]
        layers = [(high * start, widest * start, count) for start, count in zip(starts, counts, strict=True)]
        self._spans = (
            layers  # of each layer: where its words begin in the master and in the active buffer, words a plane
        )
        blocks = [(i, b) for i, count in enumerate(counts) for b in range(-(-count // _BLOCK))]
        self._layers = torch.tensor(layers, dtype=torch.int64, device=device)
        self._blocks = torch.tensor(blocks, dtype=torch.int32, device=device)
        self._held = torch.zeros(len(blocks), dtype=torch.int32, device=device)
        self._bits = torch.zeros(len(codes), dtype=torch.int32, device=device)
        self.master = self._empty_master(high * sum(counts), high * max(counts))
        for (begin, _, count), matrix in zip(layers, codes.values(), strict=True):
            self.master[begin : begin + high * count] = pack_words(matrix.to(device), packed_fields(high)).view(-1)
        self.active = torch.zeros(widest * sum(counts), dtype=torch.int32, device=device)
        self.bits = dict.fromkeys(codes, 0)
        self._views: dict[tuple[str, int], Tensor] = {}  # those that `words` has given
        self.set_bits(widest)

    def set_bits(self, plan: int | Mapping[str, int]) -> None:
        """Switch, in place, to one width or to the widths of the layers that `plan` names."""
        wanted = dict.fromkeys(self.names, plan) if isinstance(plan, int) else {**self.bits, **plan}
        for name, bits in wanted.items():
            if name not in self.names:
                raise PlanError(f"layer {name!r} is not in the arena; it has {', '.join(self.names)}")
            if bits not in self.bit_choices:
                raise PlanError(f"layer {name!r}: bits={bits} is not in bit_choices {self.bit_choices}")
        changed = [name for name in self.names if wanted[name] != self.bits[name]]
        send(np.fromiter(wanted.values(), np.int32, len(wanted)), self._bits)
        self.bits = wanted
        self._bring(changed)

    def _empty_master(self, words: int, words_of_largest: int) -> Tensor:
        """Room for the master; `words_of_largest` is what the largest layer has of it."""
        return torch.empty(words, dtype=torch.int32, device=self.device)

    def _bring(self, changed: Sequence[str]) -> None:
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
        """The active words of a layer, (bits, row tiles, column tiles, 128): a view."""
        key = name, self.bits[name]
        if key not in self._views:
            layer, bits = self.names[name], self.bits[name]
            begin, tiles = self._spans[layer][1], self._tiles[layer]
            self._views[key] = self.active[begin : begin + bits * prod(tiles)].view(bits, *tiles)
        return self._views[key]

    def stored_codes(self, name: str) -> Tensor:
        """The codes of a layer at `high` bits, (rows, columns) int8, read back from the master."""
        layer = self.names[name]
        (begin, _, count), tiles = self._spans[layer], self._tiles[layer]
        words = self.master[begin : begin + self.high * count].view(self.high, *tiles)
        return unpack_words(words, packed_fields(self.high), self.high, *self._shapes[layer])

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_views": {}}  # a copy has words of its own

    def bytes_moved(self, plan: int | Mapping[str, int]) -> int:
        """What a switch to `plan` reads and writes: the master and the new words of the layers that change."""
        wanted = dict.fromkeys(self.names, plan) if isinstance(plan, int) else {**self.bits, **plan}
        changed = [name for name in self.names if wanted[name] != self.bits[name]]
        return sum(4 * prod(self._tiles[self.names[name]]) * (self.high + wanted[name]) for name in changed)

    def bytes_held(self) -> int:
        """What the master, the active words and the tables take on the device."""
        return sum(getattr(self, part).nbytes for part in self.on_device)
