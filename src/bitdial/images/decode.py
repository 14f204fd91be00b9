"""One image file to pixels. The only file that imports Pillow.

Whatever the file is (grey, palette, CMYK, with alpha, 16 bits, turned by its EXIF entry), the pixels are 8-bit RGB, as
people see them. Alpha is dropped, as training pipelines do.
"""

import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from bitdial.errors import ConfigError, MissingDependencyError
from bitdial.images.settings import ImageSettings

if TYPE_CHECKING:
    from PIL.Image import Image

# By these endings a file counts as an image.
ENDINGS = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm")
SIXTEEN_BITS = ("I;16", "I;16B", "I;16L", "I;16N")


def require_pillow() -> None:
    """Raise MissingDependencyError unless Pillow is there."""
    try:
        import PIL.Image  # noqa: F401
    except ImportError as problem:
        raise MissingDependencyError.missing("images", "pillow") from problem


def decode(path: Path, settings: ImageSettings) -> tuple[Tensor, bool]:
    """The pixels of the image at `path`, uint8 (3, crop, crop) in `settings.order`, and whether it was enlarged.

    ConfigError names the file if it cannot be read, or is smaller than the crop where nothing is resized.
    """
    require_pillow()
    from PIL import Image

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of odd metadata, and of sizes below the limit that is an error
            with Image.open(path) as file:
                image = _eight_bit_rgb(file, path)
    except ConfigError:
        raise
    except (OSError, ValueError, SyntaxError, EOFError, Image.DecompressionBombError, MemoryError) as problem:
        raise ConfigError(f"{path} cannot be read as an image: {problem}; replace it, or take it out") from problem
    enlarged = min(image.size) < settings.crop
    pixels = np.array(_cropped(_resized(image, settings, path), settings.crop))
    if settings.order == "BGR":
        pixels = pixels[:, :, ::-1]
    return torch.from_numpy(np.ascontiguousarray(pixels.transpose(2, 0, 1))), enlarged


def _eight_bit_rgb(file: "Image", path: Path) -> "Image":
    """The image of `file` as RGB, upright. Pillow itself would cut 16-bit greys off at 255."""
    from PIL import Image, ImageOps

    kind = file.format
    file = ImageOps.exif_transpose(file)
    if file.mode in SIXTEEN_BITS or (file.mode == "I" and kind in ("PNG", "PPM")):
        values = np.asarray(file).astype(np.int64)
        grey = Image.fromarray(((values + 128) // 257).clip(0, 255).astype(np.uint8))
        return grey.convert("RGB")
    if file.mode in ("I", "F"):
        raise ConfigError(
            f"{path} has pixels of 32 bits (mode {file.mode}), whose range bitdial cannot know; save it with 8 bits"
        )
    if file.mode == "P" and "transparency" in file.info:
        file = file.convert("RGBA")
    return file.convert("RGB")


def _resized(image: "Image", settings: ImageSettings, path: Path) -> "Image":
    """The image made smaller to `resize`, or larger to `crop`, or as it is."""
    from PIL import Image

    short, crop = min(image.size), settings.crop
    if settings.resize is None:
        if short < crop:
            raise ConfigError(
                f"{path} has {image.width} x {image.height} pixels, fewer than the crop of {crop} x {crop}; allow "
                "resizing, or choose a smaller crop"
            )
        return image
    target = settings.resize if short > settings.resize else crop if short < crop else short
    if target == short:
        return image
    width, height = (target if side == short else int(target * side / short) for side in image.size)
    return image.resize((width, height), Image.Resampling[settings.interpolation.upper()])


def _cropped(image: "Image", crop: int) -> "Image":
    left, top = (round((side - crop) / 2) for side in image.size)
    return image.crop((left, top, left + crop, top + crop))
