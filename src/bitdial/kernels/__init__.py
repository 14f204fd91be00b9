"""Operators and fast paths: records and schemas here, `reference` in plain PyTorch, `triton` for GPUs.

Triton is imported only when a tensor needs it.
"""

from bitdial.kernels.dispatch import use_triton
from bitdial.kernels.fake_quantize import fake_quantize, fake_quantize_activation

__all__ = ["fake_quantize", "fake_quantize_activation", "use_triton"]
