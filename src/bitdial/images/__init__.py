"""Folders of images as batches of inputs."""

from bitdial.images.batches import ImageBatches
from bitdial.images.settings import ImageSettings, settings_of_model, settings_of_weights, stored_settings

__all__ = ["ImageBatches", "ImageSettings", "settings_of_model", "settings_of_weights", "stored_settings"]
