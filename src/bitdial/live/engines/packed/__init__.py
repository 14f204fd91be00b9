"""Live models of weight-only Linear layers on packed words: b bits a weight in memory, read as such by the kernels."""

from bitdial.live.engines.packed.build import packed_linears
from bitdial.live.engines.packed.layers import ArenaLinear, NestedLinear, WordsLinear
from bitdial.live.engines.packed.memory import resident_bytes
from bitdial.live.engines.packed.views import view_at_bits

__all__ = [
    "ArenaLinear",
    "NestedLinear",
    "WordsLinear",
    "packed_linears",
    "resident_bytes",
    "view_at_bits",
]
