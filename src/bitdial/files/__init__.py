"""Bytes on disk: atomic files, and tensors with a manifest and a digest. Nothing here knows of quantisation."""
