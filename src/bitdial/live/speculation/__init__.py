"""Self-speculative decoding: a live decoder drafts at few bits, and checks the draft at its own width."""

from bitdial.live.speculation.decoder import SpeculationStatistics, SpeculativeDecoder, speculate

__all__ = ["SpeculationStatistics", "SpeculativeDecoder", "speculate"]
