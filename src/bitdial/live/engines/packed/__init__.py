"""Live models of weight-only Linear layers on packed words: b bits a weight in memory, read as such by the kernels."""

from bitdial.live.engines.packed.board import PoolBoard
from bitdial.live.engines.packed.build import joinable, packed_words
from bitdial.live.engines.packed.engine import PackedEngine, join

__all__ = ["PackedEngine", "PoolBoard", "join", "joinable", "packed_words"]
