"""Weights packed to b bits: products, unpacking, repacking."""
