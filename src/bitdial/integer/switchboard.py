"""The operands of a whole model in a few flat buffers, so that a switch of all of it is one launch.

    master    the stored codes of all layers, in the order of the kernels; the layers' `stored` are views of it
    active    the integers at the widths in use, laid out alike; the layers' `integers` are views of it
    table     every other operand of layers and norms at every choice of widths, in rows
    words     the rows in use; the operands are views of it

A switch sends the numbers of the choices to the device in one small copy and launches `bitdial::switch_`. Nothing is
allocated there, and no operand moves, so recorded CUDA graphs stay valid and follow the dial. Moving the model to
another device does move them: the views are then gone, which is seen by looking, and everything is laid out anew.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bitdial.errors import ConfigError, PlanError
from bitdial.integer.operands import Tables
from bitdial.kernels.switch import BLOCK_BYTES, BLOCK_WORDS, switch_
from bitdial.plan import Board

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

    def weight_of(self, filters: Tensor) -> Tensor:
        """A view of `filters` in the order of the weight."""
        raise NotImplementedError

    def take_codes(self, stored: Tensor, integers: Tensor) -> None:
        """Make the views of the master, in the order of the weight, and of the active buffer the layer's own."""
        raise NotImplementedError


class _Place(NamedTuple):
    """Where the rows of a part lie in `table`."""

    start: int
    length: int


class Switchboard(Board):
    """Switches the layers and norms of a model together. `layers` and `norms`: all that `set_bits` knows, by name."""

    master: Tensor
    active: Tensor
    table: Tensor
    words: Tensor

    def __init__(self, model: nn.Module):
        """A board without parts for `model`: `add` puts them on it, `bind` lays out their operands."""
        super().__init__()
        self.know(model)
        self._parts: list[BoardPart] = []
        self._views: list[tuple[BoardPart, str, Tensor]] = []  # the parts' buffers while all is in place
        self._first_key: dict[BoardPart, int] = {}
        self._places: dict[BoardPart, list[_Place]] = {}  # of its tables
        self._held: list[int] = []  # by key
        self._pending: dict[BoardPart, None] = {}

    def add(self, part: BoardPart) -> None:
        """Put `part` on the board."""
        part.board = self
        self._parts.append(part)

    # --- switching --------------------------------------------------------------------------------

    def select(self, part: BoardPart) -> None:
        """Bring the operands of `part` to what it wants now, or at the end of the block."""
        self._pending[part] = None
        self._selected()

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
            if self._wanted.is_cuda and torch.cuda.is_current_stream_capturing():
                raise PlanError("a switch cannot be recorded; call set_bits outside, recorded graphs follow the dial")
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
        self._views = []
        self._held = []
        for part in self._parts:
            self._first_key[part] = len(self._held)
            self._held += [NOTHING] * len(part.wanted())
        self._bind_codes(device)
        self._bind_words(device)
        self._wanted = torch.zeros(2, len(self._held), dtype=torch.int32, device=device)
        self._pending = dict.fromkeys(self._parts)
        self._switch()

    def _device(self) -> torch.device:
        devices = {tensor.device for part in self._parts for tensor in (*part.parameters(), *part.buffers())}
        if len(devices) > 1:
            names = ", ".join(sorted(map(str, devices)))
            raise ConfigError(f"the layers of a live model lie on {names}; move the whole model to one device")
        return devices.pop() if devices else torch.device("cpu")

    def _bind_codes(self, device: torch.device) -> None:
        """Lay out the codes, each layer's from a multiple of BLOCK_BYTES on; layers on one weight share the stored."""
        lines: list[tuple[int, ...]] = []
        found: list[tuple[BoardPart, Codes, int, int]] = []
        starts: dict[int, int] = {}  # of stored codes in the master
        stored = active = 0  # bytes so far
        for part in self._parts:
            if (codes := part.codes()) is None:
                continue
            size = -(-codes.filters.numel() // BLOCK_BYTES) * BLOCK_BYTES
            weight = id(part._buffers["stored"])
            if weight not in starts:
                starts[weight] = stored
                stored += size
            how = (codes.high, codes.second, int(codes.centred))
            for at in range(0, size, BLOCK_BYTES):
                lines.append((self._first_key[part], (starts[weight] + at) // 4, (active + at) // 4, *how))
            found.append((part, codes, starts[weight], active))
            active += size
        self.master = torch.zeros(stored, dtype=torch.int8, device=device)
        self.active = torch.zeros(active, dtype=torch.int8, device=device)
        self._code_blocks = torch.tensor(lines, dtype=torch.int32, device=device).view(-1, 6)
        weights: dict[int, Tensor] = {}
        for part, codes, source, target in found:
            shape, count = codes.filters.shape, codes.filters.numel()
            if source not in weights:
                filters = self.master[source : source + count].view(shape).copy_(codes.filters)
                weights[source] = part.weight_of(filters)
            part.take_codes(weights[source], self.active[target : target + count].view(shape))
            self._remember(part, "stored", "integers")

    def _bind_words(self, device: torch.device) -> None:
        """Lay out the tables and the rows in use."""
        lines: list[tuple[int, ...]] = []
        found: list[tuple[BoardPart, Tables, int]] = []
        tables_in_words: list[Tensor] = []
        start = end = 0  # words so far: of the tables, of the rows in use
        for part in self._parts:
            key = self._first_key[part] + (part.codes() is not None)
            self._places[part] = []
            for tables in part.tables():
                table = _words(tables)
                stride = table.shape[1]
                for at in range(0, stride, BLOCK_WORDS):
                    lines.append((key, start + at, end + at, stride, min(BLOCK_WORDS, stride - at)))
                self._places[part].append(_Place(start, table.numel()))
                found.append((part, tables, end))
                tables_in_words.append(table.flatten())
                start, end, key = start + table.numel(), end + stride, key + 1
        self.table = torch.cat([torch.zeros(0, dtype=torch.int32, device=device), *tables_in_words])
        self.words = torch.zeros(end, dtype=torch.int32, device=device)
        self._word_blocks = torch.tensor(lines, dtype=torch.int32, device=device).view(-1, 5)
        for part, tables, at in found:
            for name, table in tables.items():
                count = _words({name: table}).shape[1]
                view = self.words[at : at + count].view(table.dtype)[: table[0].numel()].view(table.shape[1:])
                part.register_buffer(name, view, persistent=False)
                self._remember(part, name)
                at += count

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
