"""Live models of weight-only Linear layers on packed words: b bits a weight in memory, read as such by the kernels."""

from bitdial.weight_only.build import packed_linears
from bitdial.weight_only.layers import ArenaLinear, NestedLinear, WordsLinear
from bitdial.weight_only.memory import resident_bytes
from bitdial.weight_only.views import view_at_bits

__all__ = [
    "ArenaLinear",
    "NestedLinear",
    "WordsLinear",
    "packed_linears",
    "resident_bytes",
    "view_at_bits",
]
