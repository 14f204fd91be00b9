"""Bit plans, and the dial that sets a model to one."""

from bitdial.dial.dial import at_bits, get_bits, set_bits
from bitdial.dial.plan import BitPlan, LayerBits

__all__ = ["BitPlan", "LayerBits", "at_bits", "get_bits", "set_bits"]
