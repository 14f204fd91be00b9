"""The operands of a whole model in a few flat buffers, so that a switch of all of it is one launch.

    master    the stored codes of all layers, in the order of the kernels; the codes' `stored` are views of it
    active    the integers at the widths in use, laid out alike; the engines' `integers` are views of it
    table     every other operand of layers and norms at every choice of widths, in rows
    words     the rows in use; the operands are views of it

A switch sends the numbers of the choices to the device in one small copy and launches `bitdial::switch_`. Nothing is
allocated there, and no operand moves, so recorded CUDA graphs stay valid and follow the dial. Moving the model to
another device does move them: the views are then gone, which is seen by looking, and everything is laid out anew.
"""

from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bitdial.dial.dial import Board, Selection
from bitdial.errors import ConfigError
from bitdial.kernels.ops import switch_
from bitdial.kernels.switch import BLOCK_BYTES, BLOCK_WORDS, Numbers, send
from bitdial.live.codes import StoredCodes
from bitdial.live.engines.integer.operands import Tables

NOTHING = -1  # a choice that no part ever has: what is wanted is new


class CodeOperand(NamedTuple):
    """Stored codes as they lie in the master, and how they are narrowed; see `bitdial.kernels.switch`."""

    filters: Tensor
    high: int
    second: int
    grid: int


class BoardPart(nn.Module):
    """The operands of a layer or norm, its `owner`, that lie on a switchboard; they are its buffers. Abstract.

    `selects` are the owner's two attributes that say what is selected.
    """

    def __init__(self, owner: nn.Module, selects: tuple[str, str], bit_choices: tuple[int, ...]):
        super().__init__()
        self._owner = (owner,)  # not a submodule: this is one of the owner's
        self.board: Switchboard | None = None
        self.selects, self.bit_choices = selects, bit_choices

    @property
    def owner(self) -> nn.Module:
        """The layer or norm that the operands are of."""
        return self._owner[0]

    @property
    def selected(self) -> tuple[int, int]:
        """What is selected now."""
        first, second = self.selects
        return getattr(self.owner, first), getattr(self.owner, second)

    def switched(self) -> list[Tensor]:
        """The operands: all of them are those of the widths in use."""
        return [buffer for buffer in self._buffers.values() if buffer is not None]

    def tables(self) -> list[Tables]:
        """The operands at every choice, those that change together in one."""
        raise NotImplementedError

    def wanted(self, first: int, second: int) -> list[int]:
        """What a selection needs: the weight's width, if there are codes, and the row of each of the tables."""
        raise NotImplementedError

    def code_operand(self) -> CodeOperand | None:
        """The stored codes, where there are any."""
        return None

    @property
    def code_source(self) -> StoredCodes:
        """What holds the stored codes."""
        raise NotImplementedError

    def rows(self, filters: Tensor) -> Tensor:
        """A view of `filters` as the weight in rows."""
        raise NotImplementedError


class _Place(NamedTuple):
    """Where the rows of a part lie in `table`."""

    start: int
    length: int


class _Steps(NamedTuple):
    """A switch of everything: the numbers by key, the attributes of each part, and what is not on the board."""

    numbers: Numbers
    attributes: list[dict[str, int]]
    others: Selection


class _Needs(NamedTuple):
    """What a part needs for a selection: numbers, and attributes with their values."""

    numbers: list[int]
    attributes: dict[str, int]


class Switchboard(Board[_Steps]):
    """Switches layers and norms together. `layers` and `followers`: all that `set_bits` knows, by name."""

    master: Tensor
    active: Tensor
    table: Tensor
    words: Tensor

    def __init__(self, model: nn.Module):
        """A board without parts for `model`: `add` puts them on it, `bind` lays out their operands."""
        super().__init__(model)
        self._parts: dict[str, BoardPart] = {}
        self._views: list[tuple[dict[str, Tensor | None], str, Tensor]] = []  # what buffers are while all is in place
        self._keys: dict[BoardPart, slice] = {}
        self._places: dict[BoardPart, list[_Place]] = {}  # of its tables
        self._held: Numbers = np.zeros(0, np.int32)  # by key
        self._needs: dict[BoardPart, dict[tuple[int, int], _Needs]] = {}

    def add(self, name: str, part: BoardPart) -> None:
        """Put `part`, which the model has by this name, on the board."""
        part.board = self
        self._parts[name] = part
        pairs = [(first, second) for first in part.bit_choices for second in part.bit_choices]
        needs = {pair: _Needs(part.wanted(*pair), dict(zip(part.selects, pair, strict=True))) for pair in pairs}
        for shared in self._needs.values():  # parts of a kind share them
            if shared == needs:
                needs = shared
                break
        self._needs[part] = needs

    # --- switching --------------------------------------------------------------------------------

    def select_alone(self, part: BoardPart, first: int, second: int) -> None:
        """Select these widths for `part`."""
        self.rebind()
        needs = self._needs[part][first, second]
        numbers = self._held.copy()
        numbers[self._keys[part]] = needs.numbers
        self._upload(numbers)
        vars(part.owner).update(needs.attributes)

    def reload(self, part: BoardPart) -> None:
        """Make the operands of `part` anew, in place, after what they are made from has changed."""
        if self._is_bound():
            for tables, place in zip(part.tables(), self._places[part], strict=True):
                self.table[place.start : place.start + place.length] = _words(tables).flatten()
            self._held[self._keys[part]] = NOTHING
        self.select_alone(part, *part.selected)

    def reload_all(self) -> None:
        """Make the operands of every part anew, in place."""
        for part in self._parts.values():
            self.reload(part)

    def rebind(self) -> None:
        """Lay everything out anew if the parts' operands have been moved away."""
        if not self._is_bound():
            self.bind()

    def _is_bound(self) -> bool:
        for buffers, name, view in self._views:  # noqa: SIM110 (faster than all())
            if buffers[name] is not view:
                return False
        return True

    def _steps(self, chosen: Selection) -> _Steps:
        numbers, attributes = [], []
        for name, part in self._parts.items():
            needs = self._needs[part][chosen[name]]
            numbers += needs.numbers
            attributes.append(needs.attributes)
        others = {name: pair for name, pair in chosen.items() if name not in self._parts}
        return _Steps(np.array(numbers, np.int32), attributes, others)

    def _apply(self, steps: _Steps) -> None:
        self.rebind()
        self._upload(steps.numbers)
        for part, attributes in zip(self._parts.values(), steps.attributes, strict=True):
            vars(part.owner).update(attributes)  # setting attributes of modules one by one takes far longer
        for name, pair in steps.others.items():
            self.select(name, *pair)

    def _upload(self, numbers: Numbers) -> None:
        """Bring the operands to `numbers`, where these are new."""
        changes = numbers != self._held
        if changes.any():
            send(np.stack([numbers, changes]), self._wanted)
            switch_(
                self.master, self.active, self.table, self.words, self._code_blocks, self._word_blocks, self._wanted
            )
            if not self.active.is_cuda:  # there, what is made from a weight is kept until its version changes
                # A copied model's operands share memory with the buffers as views do, but not the version.
                torch.autograd.graph.increment_version([view for _, _, view in self._views if not view.is_inference()])
            self._held = numbers.copy()

    # --- the layout -------------------------------------------------------------------------------

    def bind(self) -> None:
        """Lay out all operands, fill them as selected, and make them the parts' own."""
        device = self._device()
        self._views = []
        numbers: list[int] = []
        for part in self._parts.values():
            needs = self._needs[part][part.selected]
            self._keys[part] = slice(len(numbers), len(numbers) + len(needs.numbers))
            numbers += needs.numbers
        self._bind_codes(device)
        self._bind_words(device)
        self._wanted = torch.zeros(2, len(numbers), dtype=torch.int32, device=device)
        self._held = np.full(len(numbers), NOTHING, np.int32)
        self._upload(np.array(numbers, np.int32))

    def _device(self) -> torch.device:
        devices = {t.device for part in self._parts.values() for t in (*part.owner.parameters(), *part.owner.buffers())}
        if len(devices) > 1:
            names = ", ".join(sorted(map(str, devices)))
            raise ConfigError(f"the layers of a live model lie on {names}; move the whole model to one device")
        return devices.pop() if devices else torch.device("cpu")

    def _bind_codes(self, device: torch.device) -> None:
        """Lay out the codes, each layer's from a multiple of BLOCK_BYTES on; layers on one weight share the stored.

        The stored ones first: what they were taken from may be gone before there is room for the others.
        """
        lines: list[tuple[int, ...]] = []
        found: list[tuple[BoardPart, int, int, torch.Size]] = []
        starts: dict[int, int] = {}  # of stored codes in the master
        stored = active = 0  # bytes so far
        for part in self._parts.values():
            if (codes := part.code_operand()) is None:
                continue
            size = -(-codes.filters.numel() // BLOCK_BYTES) * BLOCK_BYTES
            weight = id(part.code_source._buffers["stored"])
            if weight not in starts:
                starts[weight] = stored
                stored += size
            for at in range(0, size, BLOCK_BYTES):
                lines.append((self._keys[part].start, (starts[weight] + at) // 4, (active + at) // 4, *codes[1:]))
            found.append((part, starts[weight], active, codes.filters.shape))
            active += size
        codes = None  # it holds what it was taken from
        self.master = torch.zeros(stored, dtype=torch.int8, device=device)
        self._code_blocks = torch.tensor(lines, dtype=torch.int32, device=device).view(-1, 6)
        weights: dict[int, Tensor] = {}
        for part, source, _, shape in found:
            if source not in weights:
                weights[source] = part.rows(self.master[source : source + shape.numel()].view(shape))
                weights[source].copy_(part.code_source.stored)
            part.code_source.stored = weights[source]
            self._remember(part.code_source, "stored")
        self.active = torch.zeros(active, dtype=torch.int8, device=device)
        for part, _, target, shape in found:
            part.register_buffer("integers", self.active[target : target + shape.numel()].view(shape), persistent=False)
            self._remember(part, "integers")

    def _bind_words(self, device: torch.device) -> None:
        """Lay out the tables and the rows in use."""
        lines: list[tuple[int, ...]] = []
        found: list[tuple[BoardPart, Tables, int]] = []
        in_words: list[Tensor] = []
        start = end = 0  # words so far: of the tables, of the rows in use
        for part in self._parts.values():
            key = self._keys[part].start + (part.code_operand() is not None)
            self._places[part] = []
            for tables in part.tables():
                table = _words(tables)
                stride = table.shape[1]
                for at in range(0, stride, BLOCK_WORDS):
                    lines.append((key, start + at, end + at, stride, min(BLOCK_WORDS, stride - at)))
                self._places[part].append(_Place(start, table.numel()))
                found.append((part, tables, end))
                in_words.append(table.flatten())
                start, end, key = start + table.numel(), end + stride, key + 1
        self.table = torch.cat([torch.zeros(0, dtype=torch.int32, device=device), *in_words])
        self.words = torch.zeros(end, dtype=torch.int32, device=device)
        self._word_blocks = torch.tensor(lines, dtype=torch.int32, device=device).view(-1, 5)
        for part, tables, at in found:
            for name, table in tables.items():
                count = _words({name: table}).shape[1]
                view = self.words[at : at + count].view(table.dtype)[: table[0].numel()].view(table.shape[1:])
                part.register_buffer(name, view, persistent=False)
                self._remember(part, name)
                at += count

    def _remember(self, holder: nn.Module, name: str) -> None:
        view = holder._buffers[name]
        assert view is not None
        self._views.append((holder._buffers, name, view))

    def fixed(self) -> list[Tensor]:
        return [self.master, self.table, self._code_blocks, self._word_blocks]

    def forget(self) -> None:
        self._held = np.full_like(self._held, NOTHING)

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
