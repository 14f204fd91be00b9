"""Triton functions that turn packed words into pairs of bf16 or fp16 numbers; `word_layout` draws the words.

A word is an int32 with two 16-bit lanes, and every step works on both lanes at once:

    merge    fields of one code lie in several words; a shift and a bit-select (one LOP3) each bring them together in a
             cell of 2, 4 or 8 bits
    extract  one LOP3 masks a cell, turns its two's complement into offset binary and sets the exponent of 2^7 (bf16) or
             2^10 (fp16): the lane now reads as 2^7 + u * 2^s, u the code plus 2^(bits-1), s where the cell lies in the
             mantissa; one packed multiply-add takes this to c + offset

Cells that lie within the mantissa together need one shift between them. Nothing is rounded anywhere.
"""

import os

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")  # it has no inline assembly


@triton.jit
def shifted(word, BY: tl.constexpr):  # type: ignore[no-untyped-def]
    """`word` shifted left by BY bits, right where that is negative; bits that cross lanes are masked later."""
    if BY > 0:
        return word << BY
    elif BY < 0:
        return word >> (-BY)
    else:
        return word


@triton.jit
def insert(into, word, BIT: tl.constexpr, WIDTH: tl.constexpr, CELL: tl.constexpr):  # type: ignore[no-untyped-def]
    """`into` with the WIDTH bits from BIT on of each cell of CELL bits taken from `word`."""
    MASK: tl.constexpr = 0xFFFFFFFF // ((1 << CELL) - 1) * (((1 << WIDTH) - 1) << BIT)
    SIGNED: tl.constexpr = MASK - ((MASK >> 31) << 32)
    return (into & ~SIGNED) | (word & SIGNED)


@triton.jit
def followed_by(words, word):  # type: ignore[no-untyped-def]
    """The tuple `words` with `word` at its end."""
    return words + (word,)  # noqa: RUF005


@triton.jit
def piece(words, FIRST: tl.constexpr, SIZE: tl.constexpr, BELOW: tl.constexpr, WORD: tl.constexpr):  # type: ignore[no-untyped-def]
    """The word of a piece that goes into word WORD of the result, its slots moved to where they stand there."""
    return shifted(words[FIRST + WORD % SIZE], BELOW - WORD // SIZE * SIZE)


@triton.jit
def merge(words, PIECES: tl.constexpr, FROM: tl.constexpr, TO: tl.constexpr, CELL: tl.constexpr):  # type: ignore[no-untyped-def]
    """CELL words, each of whose cells of CELL bits holds the bits that PIECES[FROM:TO] have of one slot.

    A piece is (first, size, below, width): `size` of the words from `first` on, with cells of `size` bits; their low
    `width` bits come to stand above `below` others. Slot j lies in word j % size, cell j // size, whatever the size:
    so word i of the result takes word i % size, moved by whole cells.
    """
    merged = ()
    for i in tl.static_range(CELL):
        cell = piece(words, PIECES[FROM][0], PIECES[FROM][1], PIECES[FROM][2], i)
        for p in tl.static_range(FROM + 1, TO):
            word = piece(words, PIECES[p][0], PIECES[p][1], PIECES[p][2], i)
            cell = insert(cell, word, PIECES[p][2], PIECES[p][3], CELL)
        merged = followed_by(merged, cell)
    return merged


@triton.jit
def whole_codes(words, PIECES: tl.constexpr, RANGES: tl.constexpr):  # type: ignore[no-untyped-def]
    """Words of whole codes from words of fields, by `word_layout.Merges`."""
    parts = ()
    for m in tl.static_range(len(RANGES) - 1):
        parts = parts + merge(words, PIECES, RANGES[m][0], RANGES[m][1], RANGES[m][2])
    return merge(parts, PIECES, RANGES[len(RANGES) - 1][0], RANGES[len(RANGES) - 1][1], RANGES[len(RANGES) - 1][2])


@triton.jit
def masked(word, mask, magic):  # type: ignore[no-untyped-def]
    """(word & mask) ^ magic; left to itself the compiler takes two instructions where there is one."""
    if INTERPRETED:
        return (word & mask) ^ magic
    else:
        return tl.inline_asm_elementwise(
            "lop3.b32 $0, $1, $2, $3, 0x6a;", "=r,r,r,r", [word, mask, magic], dtype=tl.int32, is_pure=True, pack=1
        )


@triton.jit
def halves(pair, DTYPE: tl.constexpr):  # type: ignore[no-untyped-def]
    """The two numbers of `pair`, an int32."""
    if INTERPRETED:
        low = (pair << 16 >> 16).to(tl.int16).to(DTYPE, bitcast=True)
        return low, (pair >> 16).to(tl.int16).to(DTYPE, bitcast=True)
    elif DTYPE == tl.bfloat16:  # noqa: SIM300
        return tl.inline_asm_elementwise(
            "mov.b32 {$0, $1}, $2;", "=h,=h,r", [pair], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=1
        )
    else:
        return tl.inline_asm_elementwise(
            "mov.b32 {$0, $1}, $2;", "=h,=h,r", [pair], dtype=(tl.float16, tl.float16), is_pure=True, pack=1
        )


@triton.jit
def multiply_add(a, b, c, DTYPE: tl.constexpr):  # type: ignore[no-untyped-def]
    """a * b + c on the two numbers of each int32, rounded once."""
    if INTERPRETED:
        a_low, a_high = halves(a, DTYPE)
        b_low, b_high = halves(b, DTYPE)
        c_low, c_high = halves(c, DTYPE)
        low = (a_low.to(tl.float32) * b_low.to(tl.float32) + c_low.to(tl.float32)).to(DTYPE)
        high = (a_high.to(tl.float32) * b_high.to(tl.float32) + c_high.to(tl.float32)).to(DTYPE)
        low_bits = low.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        return high.to(tl.int16, bitcast=True).to(tl.int32) << 16 | low_bits
    elif DTYPE == tl.bfloat16:  # noqa: SIM300
        return tl.inline_asm_elementwise(
            "fma.rn.bf16x2 $0, $1, $2, $3;", "=r,r,r,r", [a, b, c], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        return tl.inline_asm_elementwise(
            "fma.rn.f16x2 $0, $1, $2, $3;", "=r,r,r,r", [a, b, c], dtype=tl.int32, is_pure=True, pack=1
        )


@triton.jit
def numbers(  # type: ignore[no-untyped-def]
    cells,
    WORD: tl.constexpr,
    SHIFT: tl.constexpr,
    MASK: tl.constexpr,
    MAGIC: tl.constexpr,
    TIMES: tl.constexpr,
    PLUS: tl.constexpr,
    SIGN_MASK: tl.constexpr,
    LATER: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """The values of one slot by `word_layout.Extract`, in a new last dimension of 2: the lanes."""
    word = shifted(cells[WORD], -SHIFT)
    magic = tl.full(word.shape, MAGIC, tl.int32)
    times = tl.full(word.shape, TIMES, tl.int32)
    pair = masked(word, tl.full(word.shape, MASK, tl.int32), magic)
    if SIGN_MASK != 0:
        sign = masked(word, tl.full(word.shape, SIGN_MASK, tl.int32), magic)
        pair = multiply_add(sign, times, pair, DTYPE)
    else:
        pair = multiply_add(pair, times, tl.full(word.shape, PLUS, tl.int32), DTYPE)
    if LATER != 0:
        one: tl.constexpr = 0x3F803F80 if DTYPE == tl.bfloat16 else 0x3C003C00  # noqa: SIM300
        pair = multiply_add(pair, tl.full(word.shape, one, tl.int32), tl.full(word.shape, LATER, tl.int32), DTYPE)
    low, high = halves(pair, DTYPE)
    return tl.join(low, high)


@triton.jit
def slot_numbers(cells, SLOT: tl.constexpr, STEPS: tl.constexpr, DTYPE: tl.constexpr):  # type: ignore[no-untyped-def]
    """The values of slot SLOT, of the shape of the words and a last dimension of 2, exactly c + offset."""
    return numbers(
        cells, STEPS[SLOT][0], STEPS[SLOT][1], STEPS[SLOT][2], STEPS[SLOT][3], STEPS[SLOT][4], STEPS[SLOT][5],
        STEPS[SLOT][6], STEPS[SLOT][7], DTYPE,
    )  # fmt: skip


@triton.jit
def product(weight, x, total):  # type: ignore[no-untyped-def]
    """total + weight @ x in float32; the interpreter cannot multiply bf16."""
    if INTERPRETED:
        return tl.dot(weight.to(tl.float32), x.to(tl.float32), total)
    else:
        return tl.dot(weight, x, total)
