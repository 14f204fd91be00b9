"""The file, running: live models and their engines."""

from bitdial.live.load import load, load_trainable

__all__ = ["load", "load_trainable"]
