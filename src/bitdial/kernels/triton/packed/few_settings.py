"""How the kernel for few tokens is cut and run, by shape, width and number of tokens."""

from typing import NamedTuple

import triton
from torch import Tensor

from bitdial.kernels.word_layout import TILE_COLUMNS, TILE_ROWS


class FewSettings(NamedTuple):
    """How the kernel for few tokens is cut and run: found by trying, never needed for a right result."""

    row_tiles: int = 1
    warps: int = 8
    splits: int = 1
    ahead: bool = True  # words of the next step are loaded before those of this one are used
    stages: int = 1  # more than one: through shared memory, by Triton's pipeline
    registers: int | None = None  # a limit, so that more warps fit
    spread: int = 1  # at one token, the sums of groups beside each other, each in so many chains: see `groups`


def few_settings(tokens: int, rows: int, columns: int, bits: int) -> FewSettings:
    """By counting and by trying on an H200, at one and at 16 tokens, 4096 to 14336 rows and 4096 to 28672 columns.

    16 rows a program give every shape above 2,112 rows more programs than a GPU has multiprocessors. Several share a
    multiprocessor: four warps each, with a limit on their registers so that more fit, are mostly better than eight. At
    many bits, few programs of many columns are the exception; at 16 tokens and 2 bits, where the tokens are most of
    what a program reads, many programs are: there it takes twice the rows. Few rows: the columns are shared out.
    """
    many_tokens, programs = tokens > 8, triton.cdiv(rows, TILE_ROWS)
    if many_tokens and bits == 2 and programs > 256:
        most = programs > 512
        return FewSettings(row_tiles=2, warps=4 if most else 8, ahead=not most)
    long_columns = programs <= 512 and columns > 4096
    if long_columns and bits >= (8 if many_tokens else 4):
        warps, registers = 8, None
    else:
        limit = 128 if many_tokens else 96 if bits > 2 else 80
        warps, registers = 4, None if bits == 2 and programs > 512 else limit
    steps = triton.cdiv(columns, TILE_COLUMNS * warps)
    splits = 1
    while programs * splits < 128 and splits * 2 <= steps:
        splits *= 2
    return FewSettings(warps=warps, splits=splits, registers=registers)


def with_room_for_groups(settings: FewSettings, tokens: int, bits: int, group_scale: Tensor | None) -> FewSettings:
    """`settings` with a limit on registers within which nothing is spilled, by counting what the compiler takes.

    All scales fit at one token except those of groups of 32 at 8 bits; at more tokens those of groups of 64 and more up
    to 4 bits.
    """
    if group_scale is None or settings.registers is None:
        return settings
    runs = group_scale.shape[3]
    fits = bits <= 6 or runs <= 4 if tokens == 1 else bits <= 4 and runs <= 4
    return settings if fits else settings._replace(registers=112 if tokens == 1 else 168)
