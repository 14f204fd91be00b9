"""Live models on integer kernels: codes go from layer to layer; the results are those of `code_exact`."""

from bitdial.live.engines.integer.model import IntegerModel

__all__ = ["IntegerModel"]
