"""One image file to pixels, and pixels to a picture. The only file that imports Pillow; the extra is `images`.

Whatever the file is (grey, palette, CMYK, with alpha, 16 bits, turned by its EXIF entry), the pixels are 8-bit RGB, as
people see them. Alpha is dropped, as training pipelines do. An EXIF entry that is damaged is ignored.
"""

import base64
import io
import os
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from bitdial.errors import ConfigError, MissingDependencyError
from bitdial.images.settings import ImageSettings

if TYPE_CHECKING:
    from PIL.Image import Image

# By these endings a file counts as an image.
ENDINGS = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm")
Box = tuple[int, int, int, int]  # left, top, right, bottom in pixels; right and bottom are beyond the last
MOST_THREADS = 16
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
    return decode_all([path], settings)[0]


def decode_all(paths: Sequence[Path], settings: ImageSettings) -> list[tuple[Tensor, bool]]:
    """What `decode` returns for each of `paths`, by several threads: Pillow lets them run side by side."""
    with _no_warnings():  # once for all: threads share what Python warns of
        if len(paths) == 1:
            return [_decode(paths[0], settings)]
        with ThreadPoolExecutor(max(1, min(len(paths), os.cpu_count() or 1, MOST_THREADS))) as threads:
            return list(threads.map(lambda path: _decode(path, settings), paths))


def _decode(path: Path, settings: ImageSettings) -> tuple[Tensor, bool]:
    with _loaded(path) as file:
        image = _eight_bit_rgb(file, path)
    small = min(image.size) < settings.crop
    if small and settings.resize is None:
        raise ConfigError(
            f"{path} has {image.width} x {image.height} pixels, fewer than the crop of {settings.crop} x "
            f"{settings.crop}; allow resizing, or choose a smaller crop"
        )
    return middle(image, settings), small


def open_image(path: Path) -> "Image":
    """The image at `path` as Pillow has it, 8-bit RGB, upright; ConfigError names a file that cannot be read so."""
    with _opened(path) as file:
        return _eight_bit_rgb(file, path)


def read_numbers(path: Path) -> Any:
    """The whole numbers in an image of one channel, int32 (height, width), as they are stored; else ConfigError."""
    with _opened(path) as file:
        numbers, kind = np.array(file), file.mode
    if numbers.ndim != 2 or numbers.dtype.kind not in "iub":
        raise ConfigError(f"{path} has pixels of the mode {kind}; one channel of whole numbers is wanted, 8 or 16 bits")
    if int(numbers.min()) < 0:
        raise ConfigError(f"{path} has negative numbers; the objects of a map are 1 to n, and 0 is none")
    return numbers.astype(np.int32)


def picture_uri(pixels: Tensor) -> str:
    """uint8 pixels (3, height, width) as a picture that a page can hold: a data URI, JPEG."""
    require_pillow()
    from PIL import Image

    written = io.BytesIO()
    Image.fromarray(pixels.permute(1, 2, 0).contiguous().numpy()).save(written, "JPEG", quality=88, subsampling=0)
    return f"data:image/jpeg;base64,{base64.b64encode(written.getvalue()).decode()}"


def write_picture(path: Path, values: Any) -> None:
    """Write an array to `path`: uint8 (height, width, 3), or uint8 or uint16 (height, width)."""
    require_pillow()
    from PIL import Image

    Image.fromarray(values).save(path)


@contextmanager
def _no_warnings() -> Iterator[None]:
    """No warnings of odd metadata, and of sizes below the limit that is an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """The image at `path` as Pillow has it; ConfigError names a file that cannot be read."""
    with _no_warnings(), _loaded(path) as file:
        yield file


@contextmanager
def _loaded(path: Path) -> Iterator[Any]:
    """The same, with warnings."""
    require_pillow()
    from PIL import Image

    try:
        with Image.open(path) as file:
            file.load()
            yield file
    except ConfigError:
        raise
    except (OSError, ValueError, SyntaxError, EOFError, Image.DecompressionBombError, MemoryError) as problem:
        raise ConfigError(f"{path} cannot be read as an image: {problem}; replace it, or take it out") from problem


def middle(image: "Image", settings: ImageSettings) -> Tensor:
    """The middle of `image`, made smaller to `resize` or larger to `crop`: uint8 (3, crop, crop) in `order`."""
    image = _resized(image, settings)
    crop = settings.crop
    left, top = (round((side - crop) / 2) for side in image.size)
    return _pixels(image.crop((left, top, left + crop, top + crop)), settings)


def cut_out(image: "Image", box: Box, settings: ImageSettings) -> Tensor:
    """The part of `image` in `box`, scaled to the size of the crop: uint8 (3, crop, crop) in `order`."""
    return _pixels(_scaled(image.crop(box), (settings.crop, settings.crop), settings), settings)


def _eight_bit_rgb(file: "Image", path: Path) -> "Image":
    """The image of `file` as RGB, upright. Pillow itself would cut 16-bit greys off at 255."""
    from PIL import Image, ImageOps

    kind = file.format
    with suppress(ValueError, TypeError, KeyError, SyntaxError, OSError, EOFError):  # an entry that is damaged
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


def _resized(image: "Image", settings: ImageSettings) -> "Image":
    """The image with its shorter side made smaller to `resize`, or larger to `crop`, or as it is."""
    short, crop = min(image.size), settings.crop
    target = settings.resize if settings.resize and short > settings.resize else crop if short < crop else short
    if target == short:
        return image
    width, height = (target if side == short else int(target * side / short) for side in image.size)
    return _scaled(image, (width, height), settings)


def _scaled(image: "Image", size: tuple[int, int], settings: ImageSettings) -> "Image":
    from PIL import Image

    return image.resize(size, Image.Resampling[settings.interpolation.upper()])


def _pixels(image: "Image", settings: ImageSettings) -> Tensor:
    pixels = np.array(image)
    if settings.order == "BGR":
        pixels = pixels[:, :, ::-1]
    return torch.from_numpy(np.ascontiguousarray(pixels.transpose(2, 0, 1)))
