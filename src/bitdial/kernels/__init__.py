"""Fast paths. Only the triton_ files import Triton, and only when a tensor needs them."""

from bitdial.kernels.fake_quantize import fake_quantize, fake_quantize_activation, use_triton

__all__ = ["fake_quantize", "fake_quantize_activation", "use_triton"]
