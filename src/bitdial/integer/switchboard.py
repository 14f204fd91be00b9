"""The operands of a whole model in a few flat buffers, so that a switch of all of it is one launch.

    master    the stored codes of all layers, in the order of the kernels; the layers' `stored` are views of it
    active    the integers at the widths in use, laid out alike; the layers' `integers` are views of it
    table     every other operand of layers and norms at every choice of widths, in rows
    words     the rows in use; the operands are views of it

A switch sends the numbers of the choices to the device in one small copy and launches `bitdial::switch_`. Nothing is
allocated there, and no operand moves, so recorded CUDA graphs stay valid and follow the dial. Moving the model to
another device does move them: the views are then gone, which is seen by looking, and everything is laid out anew.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bitdial.errors import ConfigError
from bitdial.integer.operands import Tables
from bitdial.kernels.switch import BLOCK_BYTES, BLOCK_WORDS, switch_
from bitdial.plan import DialledLayer, FollowingNorm

NOTHING = -1  # a choice that no part ever has: what is wanted is new


class Codes(NamedTuple):
    """Stored codes as they lie in the master, and how they are narrowed; see `bitdial.kernels.switch`."""

    filters: Tensor
    high: int
    second: int
    centred: bool


class BoardPart(nn.Module):
    """A layer or norm whose operands lie on a switchboard. Abstract."""

    board: "Switchboard | None" = None

    def tables(self) -> list[Tables]:
        """The operands at every choice, those that change together in one."""
        raise NotImplementedError

    def wanted(self) -> list[int]:
        """What is selected: the weight's width, if there are codes, and the row of each of the tables."""
        raise NotImplementedError

    def codes(self) -> Codes | None:
        """The stored codes, where there are any."""
        return None

    def take_codes(self, stored: Tensor, integers: Tensor) -> None:
        """Make views of filters in the master and in the active buffer the layer's own."""
        raise NotImplementedError


class _Place(NamedTuple):
    """Where a table of a part lies: its key, where its rows begin in `table` and how long it is, its row in `words`."""

    key: int
    start: int
    length: int


class Switchboard:
    """Switches the layers and norms of a model together. `layers` and `norms`: all that `set_bits` knows, by name."""

    master: Tensor
    active: Tensor
    table: Tensor
    words: Tensor

    def __init__(self, model: nn.Module):
        """A board of the parts in `model` whose `board` is to be this one; `bind` lays it out."""
        modules = dict(model.named_modules())
        self.layers: dict[str, DialledLayer] = {n: m for n, m in modules.items() if hasattr(m, "select_bits")}
        self.norms: dict[str, FollowingNorm] = {n: m for n, m in modules.items() if hasattr(m, "select_set")}
        self._parts: list[BoardPart] = []
        self._collecting = False

    def add(self, part: BoardPart) -> None:
        """Put `part` on the board."""
        part.board = self
        self._parts.append(part)

    # --- switching --------------------------------------------------------------------------------

    @contextmanager
    def together(self) -> Iterator[None]:
        """A block in which selections are collected; at its end they take effect, all in one launch."""
        self._collecting = True
        try:
            yield
        finally:
            self._collecting = False
            self._switch()

    def select(self, part: BoardPart) -> None:
        """Bring the operands of `part` to what it wants now, or at the end of the block."""
        self._pending[part] = None
        if not self._collecting:
            self._switch()

    def reload(self, part: BoardPart) -> None:
        """Make the operands of `part` anew, in place, after what they are made from has changed."""
        if self._is_bound():
            for tables, place in zip(part.tables(), self._places[part], strict=True):
                self.table[place.start : place.start + place.length] = _words(tables).flatten()
            first = self._first_key[part]
            self._held[first : first + len(part.wanted())] = [NOTHING] * len(part.wanted())
        self.select(part)

    def follow(self) -> None:
        """Lay everything out anew if the parts' operands have been moved away."""
        if not self._is_bound():
            self.bind()

    def _is_bound(self) -> bool:
        return all(part._buffers[name] is view for part, name, view in self._views)

    def _switch(self) -> None:
        if not self._is_bound():
            self.bind()
            return
        values, changes = self._held.copy(), [0] * len(self._held)
        for part in self._pending:
            for key, value in enumerate(part.wanted(), self._first_key[part]):
                changes[key] = int(values[key] != value)
                values[key] = value
        if any(changes):
            # Memory that PyTorch does not use again before the copy is done.
            numbers = torch.tensor([values, changes], dtype=torch.int32, pin_memory=self._wanted.is_cuda)
            self._wanted.copy_(numbers, non_blocking=True)
            switch_(
                self.master, self.active, self.table, self.words, self._code_blocks, self._word_blocks, self._wanted
            )
        self._held = values
        self._pending.clear()

    # --- the layout -------------------------------------------------------------------------------

    def bind(self) -> None:
        """Lay out all operands, fill them as selected, and make them the parts' own."""
        device = self._device()
        self._views: list[tuple[BoardPart, str, Tensor]] = []
        self._first_key: dict[BoardPart, int] = {}
        self._places: dict[BoardPart, list[_Place]] = {}
        keys = 0
        for part in self._parts:
            self._first_key[part] = keys
            keys += len(part.wanted())
        self._bind_codes(device)
        self._bind_words(device)
        self._wanted = torch.zeros(2, keys, dtype=torch.int32, device=device)
        self._held = [NOTHING] * keys
        self._pending: dict[BoardPart, None] = dict.fromkeys(self._parts)
        self._switch()

    def _device(self) -> torch.device:
        devices = {tensor.device for part in self._parts for tensor in (*part.parameters(), *part.buffers())}
        if len(devices) > 1:
            names = ", ".join(sorted(map(str, devices)))
            raise ConfigError(f"the layers of a live model lie on {names}; move the whole model to one device")
        return devices.pop() if devices else torch.device("cpu")

    def _bind_codes(self, device: torch.device) -> None:
        """Lay out the codes of each layer from a multiple of BLOCK_BYTES on; layers on one weight share those stored."""
        lines: list[tuple[int, ...]] = []
        layers: list[tuple[BoardPart, Codes, int, int]] = []
        stored: dict[int, int] = {}
        end = 0  # of the active buffer, in bytes; and of the master
        end_of_master = 0
        for part in self._parts:
            codes = part.codes()
            if codes is None:
                continue
            owner = id(part._buffers["stored"])
            size = -(-codes.filters.numel() // BLOCK_BYTES) * BLOCK_BYTES
            if owner not in stored:
                stored[owner] = end_of_master
                end_of_master += size
            how = (codes.high, codes.second, int(codes.centred))
            for at in range(0, size, BLOCK_BYTES):
                lines.append((self._first_key[part], (stored[owner] + at) // 4, (end + at) // 4, *how))
            layers.append((part, codes, stored[owner], end))
            end += size
        self.master = torch.zeros(end_of_master, dtype=torch.int8, device=device)
        self.active = torch.zeros(end, dtype=torch.int8, device=device)
        views: dict[int, Tensor] = {}
        for part, codes, source, target in layers:
            count, shape = codes.filters.numel(), codes.filters.shape
            if source not in views:
                views[source] = self.master[source : source + count].view(shape).copy_(codes.filters)
            part.take_codes(views[source], self.active[target : target + count].view(shape))
            self._remember(part, "stored", "integers")
        self._code_blocks = torch.tensor(lines, dtype=torch.int32, device=device).view(-1, 6)

    def _bind_words(self, device: torch.device) -> None:
        """Lay out the tables and the rows in use."""
        lines: list[tuple[int, ...]] = []
        rows: list[Tensor] = []
        start = end = 0  # of the table so far, of the words so far
        rests: list[tuple[BoardPart, Tables, int]] = []
        for part in self._parts:
            key = self._first_key[part] + (part.codes() is not None)
            self._places[part] = []
            for tables in part.tables():
                table = _words(tables)
                stride = table.shape[1]
                for at in range(0, stride, BLOCK_WORDS):
                    lines.append((key, start + at, end + at, stride, min(BLOCK_WORDS, stride - at)))
                self._places[part].append(_Place(key, start, table.numel()))
                rows.append(table.flatten())
                rests.append((part, tables, end))
                start, end, key = start + table.numel(), end + stride, key + 1
        self.table = torch.cat(rows) if rows else torch.zeros(0, dtype=torch.int32, device=device)
        self.words = torch.zeros(end, dtype=torch.int32, device=device)
        for part, tables, begin in rests:
            for name, table in tables.items():
                count = _words({name: table}).shape[1]
                view = self.words[begin : begin + count].view(table.dtype)
                part.register_buffer(name, view[: table[0].numel()].view(table.shape[1:]), persistent=False)
                self._remember(part, name)
                begin += count
        self._word_blocks = torch.tensor(lines, dtype=torch.int32, device=device).view(-1, 5)

    def _remember(self, part: BoardPart, *names: str) -> None:
        for name in names:
            view = part._buffers[name]
            assert view is not None
            self._views.append((part, name, view))

    def bytes_held(self) -> dict[str, int]:
        """The memory of the buffers, by what they hold."""
        blocks = self._code_blocks, self._word_blocks, self._wanted
        held = {"master": [self.master], "active": [self.active], "table": [self.table], "words": [self.words]}
        return {
            name: sum(tensor.numel() * tensor.element_size() for tensor in tensors)
            for name, tensors in {**held, "blocks": blocks}.items()
        }


def _words(tables: Tables) -> Tensor:
    """`tables` as one of 32-bit words (choices, words); each begins at a multiple of 4 words."""
    parts = []
    for table in tables.values():
        flat = table.flatten(1)
        flat = F.pad(flat, (0, -flat.shape[1] % (16 // flat.element_size())))
        parts.append(flat.contiguous().view(torch.int32))
    return torch.cat(parts, dim=1)
