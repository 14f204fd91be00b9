"""Kernels for CPUs, out of PyTorch's own products; no compiler, no other library."""
