"""Triton kernels, one folder per job; imported by the operator that launches them."""
