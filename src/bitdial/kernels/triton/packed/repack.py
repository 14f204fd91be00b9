"""Words of the highest width into words of the active widths, for a whole model in one launch.

A block takes 512 places of a layer's tiles. What lies at one place of all planes are 32 codes, so nothing moves between
threads: 16-byte loads, arithmetic on two codes at a time (the lanes of a word), 16-byte stores. The order of codes
within a tile does not matter here.
"""

import functools

import triton
import triton.language as tl
from torch import Tensor

from bitdial.kernels.triton.packed.words import followed_by, masked, shifted, whole_codes
from bitdial.kernels.width_table import SECOND
from bitdial.kernels.word_layout import merges, packed_fields

BLOCK = 512
NEAREST_EVEN, NEAREST_UP = tl.constexpr(SECOND["nearest even"]), tl.constexpr(SECOND["nearest up"])


@triton.jit
def _repack(  # type: ignore[no-untyped-def]
    master_ptr,
    active_ptr,
    blocks_ptr,
    layers_ptr,
    bits_ptr,
    held_ptr,
    PIECES: tl.constexpr,
    RANGES: tl.constexpr,
    FIELDS: tl.constexpr,
    HIGH: tl.constexpr,
    WIDEST: tl.constexpr,
    SECOND: tl.constexpr,
    BLOCK: tl.constexpr,
):
    block = tl.program_id(0)
    layer = tl.load(blocks_ptr + 2 * block)
    at = tl.load(blocks_ptr + 2 * block + 1) * BLOCK + tl.arange(0, BLOCK)
    master = master_ptr + tl.multiple_of(tl.load(layers_ptr + 4 * layer), 128)
    active = active_ptr + tl.multiple_of(tl.load(layers_ptr + 4 * layer + 1), 128)
    count = tl.multiple_of(tl.load(layers_ptr + 4 * layer + 2), 128)
    stride = tl.multiple_of(tl.load(layers_ptr + 4 * layer + 3), 128)
    bits = tl.load(bits_ptr + layer)
    if bits != tl.load(held_ptr + block):
        words = ()
        for plane in tl.static_range(HIGH):
            words = followed_by(words, tl.load(master + plane * count + at, mask=at < count, other=0))
        cells = whole_codes(words, PIECES, RANGES)
        for width in tl.static_range(2, WIDEST + 1):
            if bits == width:
                codes = ()
                for slot in tl.static_range(16):
                    code = _narrow(cells, slot, RANGES[len(RANGES) - 1][2], HIGH, width, SECOND)
                    codes = followed_by(codes, code)
                _store_fields(active, at, count, stride, codes, FIELDS, width)
        tl.debug_barrier()  # every warp has read what the block holds
        tl.store(held_ptr + block, bits)


@triton.jit
def _narrow(  # type: ignore[no-untyped-def]
    cells, SLOT: tl.constexpr, CELL: tl.constexpr, HIGH: tl.constexpr, LOW: tl.constexpr, SECOND: tl.constexpr
):
    """The LOW-bit codes of one slot, two's complement, one in each lane; as `bitdial.functional.narrow` has them.

    In offset binary, u = c + 2^(HIGH-1), lanes are not negative and do not borrow from each other. The offset is even
    at LOW bits too, so ties are as they were; a u that was rounded up beyond the top has the bit above set.
    """
    ONES: tl.constexpr = 0x00010001
    SHIFT: tl.constexpr = HIGH - LOW
    word = shifted(cells[SLOT % CELL], -(SLOT // CELL * CELL))
    u = masked(word, ONES * ((1 << HIGH) - 1), ONES * (1 << (HIGH - 1)))
    if SHIFT > 0:
        if SECOND == NEAREST_EVEN:
            u += ((u >> SHIFT) & ONES) + ONES * ((1 << (SHIFT - 1)) - 1)
        elif SECOND == NEAREST_UP:
            u += ONES * (1 << (SHIFT - 1))
        u = (u >> SHIFT) & (ONES * ((2 << LOW) - 1))
        u -= (u >> LOW) & ONES
    return u ^ (ONES * (1 << (LOW - 1)))


@triton.jit
def _store_fields(  # type: ignore[no-untyped-def]
    active, at, count, stride, codes, FIELDS: tl.constexpr, WIDTH: tl.constexpr
):
    """Write the planes of WIDTH-bit codes; FIELDS[WIDTH] has (first plane, size, bits below) for each field."""
    for f in tl.static_range(len(FIELDS[WIDTH]) // 3):
        first = active + FIELDS[WIDTH][3 * f] * stride
        _store_field(first, at, count, stride, codes, FIELDS[WIDTH][3 * f + 1], FIELDS[WIDTH][3 * f + 2])


@triton.jit
def _store_field(  # type: ignore[no-untyped-def]
    first, at, count, stride, codes, SIZE: tl.constexpr, BELOW: tl.constexpr
):
    FIELD: tl.constexpr = 0x00010001 * ((1 << SIZE) - 1)
    for i in tl.static_range(SIZE):
        word = (codes[i] >> BELOW) & FIELD
        for p in tl.static_range(1, 16 // SIZE):
            word |= ((codes[i + SIZE * p] >> BELOW) & FIELD) << (SIZE * p)
        tl.store(first + i * stride + at, word, mask=at < count)


def repack(
    master: Tensor, active: Tensor, blocks: Tensor, layers: Tensor, bits: Tensor, held: Tensor,
    *, high: int, widest: int, second: int,
) -> None:  # fmt: skip
    """Write each layer's `bits`-bit words into `active`, where its blocks hold others; see `PackedWeightPool`."""
    read = merges(packed_fields(high))
    _repack[(held.numel(),)](
        master, active, blocks, layers, bits, held, PIECES=read.pieces, RANGES=read.ranges, FIELDS=_field_rows(widest),
        HIGH=high, WIDEST=widest, SECOND=second, BLOCK=BLOCK,
    )  # fmt: skip


@functools.cache
def _field_rows(widest: int) -> tuple[tuple[int, ...], ...]:
    """For each width the rows (first plane, size, bits below) of its fields, one after the other."""
    rows: list[tuple[int, ...]] = [(0,), (0,)]  # no such widths
    for width in range(2, widest + 1):
        row, below = [], width
        for size in packed_fields(width):
            row += [width - below, size, below - size]
            below -= size
        rows.append(tuple(row))
    return tuple(rows)
