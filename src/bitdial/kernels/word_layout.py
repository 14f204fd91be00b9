"""How packed weights lie in memory, and the steps by which a kernel takes them apart; pure functions, no Triton.

A weight (rows, columns) is cut into **tiles** of 16 rows x 256 columns, zeros after the last row and column. In a tile,
a **lane** is one of 256 places (16 rows x 16), and each lane has 16 **slots**: 16 codes of one row. Slot j of all the
lanes together are 16 neighbouring columns twice over, the operand of one tensor-core instruction:

    column of (lane q, c, e; slot j) = 32 * (j // 2) + 8 * q + 4 * (j % 2) + 2 * c + e      q < 4, c < 2, e < 2

A code of b bits is cut into **fields** of 1, 2, 4 or 8 bits, most significant first. A field of g bits takes g 16-bit
words of every lane: slot j lies in word j % g, from bit g * (j // g) on. With g = 2, and with g = 1:

            bit 15-14   13-12   11-10   9-8    7-6    5-4    3-2    1-0              bit 15   14   ...   1    0
    word 0     s14       s12     s10     s8     s6     s4     s2     s0     word 0       s15  s14  ...   s1   s0
    word 1     s15       s13     s11     s9     s7     s5     s3     s1

Two lanes (e = 0 and 1) make one int32, so every shift and mask serves two codes, and bits of the 16-bit lane become
the mantissa of a bf16 or fp16 number where they are. The 128 int32 of a tile are in the order

    index = 16 * (row % 8) + 4 * q + 2 * c + row // 8

in which thread t of a warp finds its 8 numbers of the tensor core's operand in the 16 bytes from index 4 * t on: one
vector load, no shared memory. Everything together is one tensor

    words (planes, row tiles, column tiles, 128) int32      planes = the bits of all fields

**double_rounding** and other schemes that round anew at each width hold the fields of the active width, `packed_fields`
(3 bits = 2 + 1, 4 = 4, ...). **nested** holds the highest width in fields that end at every choice of bits,
`nested_fields` ((8, 6, 4, 3, 2) -> 2 + 1 + 1 + 2 + 2): b bits are the first b planes, and a switch moves nothing.
"""

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from bitdial.errors import ConfigError, QuantizationError
from bitdial.functional import check_codes

TILE_ROWS, TILE_COLUMNS, TILE_WORDS, SLOTS = 16, 256, 128, 16
MOST_FIELD = 8
LEAST_GROUP = 32  # the columns of two slots
_PART = 4  # fields of up to so many bits are brought together before the parts are


# --- fields -------------------------------------------------------------------------------------


@functools.cache
def packed_fields(bits: int) -> tuple[int, ...]:
    """The fewest fields that make `bits` bits: 7 -> (4, 2, 1)."""
    if not 1 <= bits <= MOST_FIELD:
        raise ConfigError(f"bits={bits} cannot be packed; choose from 1 to {MOST_FIELD}")
    return tuple(size for size in (8, 4, 2, 1) if bits & size)


def nested_fields(bit_choices: Sequence[int]) -> tuple[int, ...]:
    """Fields of the highest of `bit_choices` that end at each of them: (8, 6, 4, 3, 2) -> (2, 1, 1, 2, 2)."""
    ends = sorted(set(bit_choices))
    return tuple(size for end, last in zip(ends, [0, *ends], strict=False) for size in packed_fields(end - last))


def read_fields(fields: Sequence[int], bits: int) -> tuple[int, ...]:
    """The first of `fields`, which hold exactly `bits` bits; ConfigError where none end there."""
    ends = [sum(fields[: i + 1]) for i in range(len(fields))]
    if bits not in ends:
        raise ConfigError(f"bits={bits}: the packed weight can be read at {', '.join(map(str, ends))} bits")
    return tuple(fields[: ends.index(bits) + 1])


# --- codes <-> words ----------------------------------------------------------------------------


def words_shape(fields: Sequence[int], rows: int, columns: int) -> tuple[int, int, int, int]:
    """The shape of `words` for a weight (rows, columns)."""
    return sum(fields), -(-rows // TILE_ROWS), -(-columns // TILE_COLUMNS), TILE_WORDS


def pack_words(codes: Tensor, fields: Sequence[int]) -> Tensor:
    """`codes` (rows, columns), two's complement in as many bits as `fields` have, as words of that layout."""
    if codes.dim() != 2 or codes.dtype != torch.int8:
        raise QuantizationError(f"codes are {codes.dtype} {tuple(codes.shape)}, expected torch.int8 (rows, columns)")
    bits = sum(fields)
    check_codes(codes, bits=bits)
    shape = words_shape(fields, *codes.shape)
    slots = _to_slots(codes, shape).to(torch.int32)
    words = torch.empty(shape, dtype=torch.int32, device=codes.device)
    plane, below = 0, bits
    for size in fields:
        below -= size
        field = (slots >> below) & ((1 << size) - 1)
        for i in range(size):
            lanes = field[i].clone()
            for p in range(1, SLOTS // size):
                lanes |= field[i + size * p] << size * p
            words[plane] = lanes[..., 0] | (lanes[..., 1] << 16)
            plane += 1
    return words


def unpack_words(words: Tensor, fields: Sequence[int], bits: int, rows: int, columns: int) -> Tensor:
    """The codes (rows, columns), int8, that the first `bits` bits of the packed codes make."""
    read = read_fields(fields, bits)
    if words.shape != (shape := words_shape(fields, rows, columns)) or words.dtype != torch.int32:
        raise QuantizationError(f"words are {words.dtype} {tuple(words.shape)}, expected torch.int32 {shape}")
    lanes = words[: sum(read)].contiguous().view(torch.int16)  # the low half of each word first
    slots = torch.zeros((SLOTS, *lanes.shape[1:]), dtype=torch.int16, device=words.device)
    plane = 0
    for size in read:
        for j, slot in enumerate(slots):
            field = (lanes[plane + j % size] >> j // size * size).bitwise_and_((1 << size) - 1)
            slot.bitwise_left_shift_(size).bitwise_or_(field)
        plane += size
    codes = (slots << 16 - bits >> 16 - bits).to(torch.int8)
    return _from_slots(codes.view(SLOTS, *shape[1:], 2), rows, columns)


def pack_scales(scales: Tensor, columns: int) -> Tensor:
    """Scales (rows, groups), uint8 or float32, of a weight of `columns` columns in the order of its tiles.

    A **run** is the longest run of columns that divides both a group and a tile, so that it has one scale: 32, 64, 128
    or 256 columns. The result (row tiles, column tiles, 8, runs, 2) has one for each run of each row of a tile, at
    [row % 8, run, row // 8], so that the threads of a warp, which have two rows each, find theirs in one piece;
    zeros after the last row and column.
    """
    if scales.dim() != 2 or scales.dtype not in (torch.uint8, torch.float32) or scales.numel() == 0:
        found = f"{scales.dtype} {tuple(scales.shape)}"
        raise QuantizationError(f"group scales are {found}, expected torch.uint8 or torch.float32 (rows, groups)")
    rows, groups = scales.shape
    group, rest = divmod(columns, groups)
    if rest or group % LEAST_GROUP:
        raise QuantizationError(
            f"{groups} groups of {columns} columns: packed weights take groups of a multiple of {LEAST_GROUP} columns, "
            "each of as many; use kernels='float' for others"
        )
    run = math.gcd(group, TILE_COLUMNS)
    _, down, across, _ = words_shape((), rows, columns)
    runs = scales.repeat_interleave(group // run, dim=1)
    padding = (0, across * TILE_COLUMNS // run - runs.shape[1], 0, down * TILE_ROWS - rows)
    parts = torch.nn.functional.pad(runs, padding).reshape(down, 2, 8, across, TILE_COLUMNS // run)
    return parts.permute(0, 3, 2, 4, 1).contiguous()


def unpack_scales(packed: Tensor, rows: int, columns: int) -> Tensor:
    """The scales (rows, runs of a row) that `pack_scales` made; runs are the groups, or parts of them."""
    down, across, _, runs, _ = packed.shape
    scales = packed.permute(0, 4, 2, 1, 3).reshape(down * TILE_ROWS, across * runs)
    return scales[:rows, : columns * runs // TILE_COLUMNS].contiguous()


def _to_slots(codes: Tensor, shape: Sequence[int]) -> Tensor:
    """Codes (rows, columns) as (16 slots, row tiles, column tiles, 128, 2): the picture above as a permutation."""
    _, down, across, _ = shape
    rows, columns = codes.shape
    padded = torch.nn.functional.pad(codes, (0, across * TILE_COLUMNS - columns, 0, down * TILE_ROWS - rows))
    #                     tile, row // 8, row % 8; tile, j // 2, q, j % 2, c, e
    parts = padded.reshape(down, 2, 8, across, 8, 4, 2, 2, 2)
    return parts.permute(4, 6, 0, 3, 2, 5, 7, 1, 8).reshape(SLOTS, down, across, TILE_WORDS, 2)


def _from_slots(slots: Tensor, rows: int, columns: int) -> Tensor:
    _, down, across, *_ = slots.shape
    parts = slots.reshape(8, 2, down, across, 8, 4, 2, 2, 2).permute(2, 7, 4, 3, 0, 5, 1, 6, 8)
    return parts.reshape(down * TILE_ROWS, across * TILE_COLUMNS)[:rows, :columns].contiguous()


# --- the steps of a kernel ----------------------------------------------------------------------


class Merges(NamedTuple):
    """How words of fields become words of whole codes: fields into parts of up to 4 bits, then these into cells.

    `pieces` are (first word, size, bits below, width). Each of `ranges` (from, to, cell) names the pieces that together
    make words with cells of `cell` bits: one range for each part, whose results are numbered on, and last the whole.
    """

    pieces: tuple[tuple[int, int, int, int], ...]
    ranges: tuple[tuple[int, int, int], ...]

    @property
    def cell(self) -> int:
        """The bits of a cell in the end."""
        return self.ranges[-1][2]


@functools.cache
def merges(fields: tuple[int, ...]) -> Merges:
    """The merges for a code in `fields`."""
    parts: list[list[int]] = []
    for size in fields:
        if parts and sum(parts[-1]) + size <= _PART:
            parts[-1].append(size)
        else:
            parts.append([size])
    pieces: list[tuple[int, int, int, int]] = []
    ranges: list[tuple[int, int, int]] = []

    def merge(sizes: Sequence[int], widths: Sequence[int], first: int) -> int:
        below = sum(widths)
        cell = sizes[0] if len(sizes) == 1 else 1 << (below - 1).bit_length()
        ranges.append((len(pieces), len(pieces) + len(sizes), cell))
        for size, width in zip(sizes, widths, strict=True):
            below -= width
            pieces.append((first, size, below, width))
            first += size
        return cell

    cells = [merge(part, part, sum(map(sum, parts[:i]))) for i, part in enumerate(parts)]
    merge(cells, [sum(part) for part in parts], 0)
    return Merges(tuple(pieces), tuple(ranges))


class Extract(NamedTuple):
    """How the codes of one slot, in both lanes of a word, become numbers: fma((word >> shift) & mask ^ magic).

    `times` and `plus` are pairs of equal bf16 or fp16 numbers, as int32. Where `sign_mask` is not 0 (8 bits do not fit
    the 7 of bf16's mantissa), the sign is subtracted: the bit under that mask, over `magic`, reads as 2^7 or 2^8. Where
    `later` is not 0, it is the offset and is added last.
    """

    word: int
    shift: int
    mask: int
    magic: int
    times: int
    plus: int
    sign_mask: int
    later: int


@functools.cache
def extracts(bits: int, cell: int, dtype: torch.dtype, offset: float) -> tuple[Extract, ...]:
    """The steps for each of the 16 slots; the numbers are c + offset, and exact in `dtype`."""
    mantissa = {torch.bfloat16: 7, torch.float16: 10}[dtype]
    together = max((mantissa - bits) // cell + 1, 1)  # cells that lie in the mantissa at once
    steps = []
    for j in range(SLOTS):
        word, at = j % cell, j // cell
        shift, place = cell * together * (at // together), cell * (at % together)
        if offset and shift and cell * (together - 1) + 1 + bits <= mantissa:
            shift, place = shift - 1, place + 1
        # c = u - 2^(bits-1). The offset is added with it where both make one number of this type: a half not at place
        # 0, which is why a shift leaves a place free if it can.
        base = 2.0 ** (mantissa - place) + 2.0 ** (bits - 1)
        at_once = bits <= mantissa and float(torch.tensor(base - offset, dtype=dtype)) == base - offset
        now = offset if at_once else 0.0
        later = 0 if at_once or not offset else _pair(offset, dtype)
        exponent = _bits(2.0**mantissa, dtype)
        if bits > mantissa:
            masks = _both(0x7F), _both(exponent), _pair(-1.0, dtype), 0, _both(0x80)
        else:
            masks = (
                _both(((1 << bits) - 1) << place),
                _both(exponent ^ 1 << bits - 1 + place),
                _pair(2.0**-place, dtype),
                _pair(now - base, dtype),
                0,
            )
        steps.append(Extract(word, shift, *masks, later))
    return tuple(steps)


def _bits(number: float, dtype: torch.dtype) -> int:
    """The 16 bits of `number`, which `dtype` must hold exactly."""
    held = torch.tensor(number, dtype=dtype)
    assert float(held) == number, (number, dtype)
    return int(held.view(torch.int16)) & 0xFFFF


def _both(lane: int) -> int:
    """The int32 with `lane` in both halves."""
    word = lane | lane << 16
    return word - ((word >> 31) << 32)


def _pair(number: float, dtype: torch.dtype) -> int:
    return _both(_bits(number, dtype))
