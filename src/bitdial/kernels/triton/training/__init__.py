"""Training: fake quantization, convolutions, norms."""
