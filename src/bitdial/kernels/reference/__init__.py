"""Operators in plain PyTorch: what every other path is tested against."""
