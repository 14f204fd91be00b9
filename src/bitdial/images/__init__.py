"""Folders of images as batches of inputs, and as images with objects."""

from bitdial.images.augment import InstanceAugment
from bitdial.images.batches import ImageBatches
from bitdial.images.instances import InstanceFolder
from bitdial.images.settings import ImageSettings, settings_of_model, settings_of_weights, stored_settings
from bitdial.images.views import ImageViews

__all__ = [
    "ImageBatches",
    "ImageSettings",
    "ImageViews",
    "InstanceAugment",
    "InstanceFolder",
    "settings_of_model",
    "settings_of_weights",
    "stored_settings",
]
