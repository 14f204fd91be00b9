"""The layouts of packed words: the documented formulas, every code at every width, and agreement with `packing`."""

import pytest
import torch
from torch import Tensor

from bitdial import functional as bf
from bitdial.errors import ConfigError, QuantizationError
from bitdial.functional.bitstream import pack_bytes, unpack_bytes
from bitdial.kernels import word_layout as layouts

NESTED = (8, 6, 4, 3, 2)


def every_code(bits: int, rows: int, columns: int, seed: int = 0) -> Tensor:
    """All codes of `bits` bits, in random places."""
    count = rows * columns
    least, most = bf.code_range(bits)
    codes = torch.arange(count) % (most - least + 1) + least
    return codes[torch.randperm(count, generator=torch.Generator().manual_seed(seed))].view(rows, columns).char()


def where(row: int, column: int, size: int) -> tuple[int, int, int, int]:
    """Word of the field, row tile and column tile and place in it, first bit: the docstring's formulas, one code."""
    row_tile, row = divmod(row, 16)
    column_tile, column = divmod(column, 256)
    q, c, e = column // 8 % 4, column // 2 % 2, column % 2
    slot = 2 * (column // 32) + column // 4 % 2
    assert column == 32 * (slot // 2) + 8 * q + 4 * (slot % 2) + 2 * c + e
    index = 16 * (row % 8) + 4 * q + 2 * c + row // 8
    return slot % size, row_tile, column_tile * 128 + index, 16 * e + size * (slot // size)


def test_fields() -> None:
    assert [layouts.packed_fields(bits) for bits in range(2, 9)] == [
        (2,), (2, 1), (4,), (4, 1), (4, 2), (4, 2, 1), (8,)
    ]  # fmt: skip
    assert layouts.nested_fields(NESTED) == (2, 1, 1, 2, 2)
    assert layouts.nested_fields((8, 4)) == (4, 4)
    assert layouts.nested_fields((8, 5, 3)) == (2, 1, 2, 2, 1)
    assert layouts.read_fields((2, 1, 1, 2, 2), 4) == (2, 1, 1)


@pytest.mark.parametrize("fields", [*map(layouts.packed_fields, range(2, 9)), (2, 1, 1, 2, 2), (1,) * 8])
def test_each_bit_is_where_the_docstring_says(fields: tuple[int, ...]) -> None:
    codes = every_code(sum(fields), 20, 300)
    words = layouts.pack_words(codes, fields)
    flat = words.view(words.shape[0], words.shape[1], -1)
    for row, column in [(0, 0), (0, 1), (7, 255), (8, 34), (15, 129), (16, 256), (19, 299), (3, 77)]:
        code, plane = 0, 0
        for size in fields:
            word, tile, place, bit = where(row, column, size)
            code = code << size | (int(flat[plane + word, tile, place]) >> bit) & ((1 << size) - 1)
            plane += size
        assert code == int(codes[row, column]) & ((1 << sum(fields)) - 1)


@pytest.mark.parametrize("bits", range(2, 9))
def test_packed_words_hold_what_bytes_hold(bits: int) -> None:
    codes = every_code(bits, 40, 600)
    fields = layouts.packed_fields(bits)
    words = layouts.pack_words(codes, fields)
    assert words.shape == (bits, 3, 3, 128)
    read = layouts.unpack_words(words, fields, bits, 40, 600)
    assert torch.equal(read.view(-1), unpack_bytes(pack_bytes(codes, bits), bits, codes.numel()))


@pytest.mark.parametrize("choices", [NESTED, (8, 6, 4, 2), (8, 7, 6, 5, 4, 3, 2), (6, 3), (8, 5, 3)])
def test_the_first_planes_are_the_lower_widths(choices: tuple[int, ...]) -> None:
    high, fields = choices[0], layouts.nested_fields(choices)
    codes = every_code(high, 17, 257)
    words = layouts.pack_words(codes, fields)
    for bits in choices:
        read = layouts.unpack_words(words, fields, bits, 17, 257)
        assert torch.equal(read, bf.narrow(codes, high=high, low=bits, scheme="nested"))
        assert torch.equal(read, codes >> high - bits)
        shorter = words[:bits].clone()
        assert torch.equal(layouts.unpack_words(shorter, layouts.read_fields(fields, bits), bits, 17, 257), read)


def test_few_halves_are_added_on_their_own() -> None:
    cells = {2: 2, 3: 4, 4: 4, 6: 8, 8: 8}
    halves = {b: sum(s.half != 0 for s in layouts.extracts(b, c, torch.bfloat16, True)) for b, c in cells.items()}
    assert halves == {2: 2, 3: 8, 4: 4, 6: 8, 8: 16}  # of 16 slots
    assert not any(s.half for b, c in cells.items() for s in layouts.extracts(b, c, torch.bfloat16, False))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("centred", [False, True])
def test_cells_in_the_mantissa_share_a_shift(dtype: torch.dtype, centred: bool) -> None:
    shifts = {bits: len({s.shift for s in layouts.extracts(bits, cell, dtype, centred)} - {0})
              for bits, cell in ((2, 2), (3, 4), (4, 4), (8, 8))}  # fmt: skip
    expected = {2: 2, 3: 1, 4: 3, 8: 1} if dtype == torch.bfloat16 else {2: 1, 3: 1, 4: 1, 8: 1}
    assert shifts == expected


def test_what_cannot_be_packed_is_refused() -> None:
    codes = torch.full((4, 4), 5, dtype=torch.int8)
    with pytest.raises(QuantizationError, match="3-bit codes lie in"):
        layouts.pack_words(codes, (2, 1))
    with pytest.raises(QuantizationError, match=r"expected torch\.int8 \(rows, columns\)"):
        layouts.pack_words(codes.long(), (8,))
    with pytest.raises(ConfigError, match="can be read at 2, 3 bits"):
        layouts.unpack_words(layouts.pack_words(codes.clamp(max=3), (2, 1)), (2, 1), 1, 4, 4)
    with pytest.raises(QuantizationError, match=r"expected torch\.int32"):
        layouts.unpack_words(torch.zeros(3, 1, 2, 128, dtype=torch.int32), (2, 1), 3, 4, 4)
    with pytest.raises(ConfigError, match="from 1 to 8"):
        layouts.packed_fields(9)
