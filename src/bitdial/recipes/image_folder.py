"""Images in folders by class: FOLDER/<class>/*.jpg. The only file that imports Pillow; the extra is `images`."""

import os
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from bitdial.errors import ConfigError, MissingDependencyError

ENDINGS = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".ppm", ".tif", ".tiff")
Box = tuple[int, int, int, int]  # left, top, right, bottom in pixels; right and bottom are beyond the last


@dataclass(frozen=True)
class ImageList:
    """The images below `folder` in the order of their names, each with the number of its class.

    Names are bytes in one array: a million Python strings would be copied into every worker process.
    """

    folder: Path
    classes: tuple[str, ...]
    names: npt.NDArray[np.bytes_]  # relative to the folder: b"cat/1.jpg"
    labels: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.names)

    def path(self, index: int) -> Path:
        """Where image number `index` lies."""
        return self.folder / os.fsdecode(bytes(self.names[index]))

    def subset(self, chosen: npt.NDArray[np.bool_]) -> "ImageList":
        """The images that are `chosen`, one flag for each."""
        return ImageList(self.folder, self.classes, self.names[chosen], self.labels[chosen])


def list_images(folder: Path) -> ImageList:
    """The images of a folder whose folders are classes; these are numbered by their names in plain order."""
    layout = f"expected {folder}/<class>/<image>, with images that end in {', '.join(ENDINGS)}"
    try:
        with os.scandir(folder) as entries:
            classes = sorted(e.name for e in entries if e.is_dir() and not e.name.startswith("."))
        names: list[bytes] = []
        labels: list[int] = []
        for number, name in enumerate(classes):
            with os.scandir(folder / name) as entries:
                found = sorted(e.name for e in entries if e.name.lower().endswith(ENDINGS) and e.name[0] != ".")
            if not found:
                raise ConfigError(f"the class {folder / name} holds no image; {layout}")
            names += [os.fsencode(f"{name}/{one}") for one in found]
            labels += [number] * len(found)
    except OSError as problem:
        raise ConfigError(f"cannot read {problem.filename or folder}: {problem.strerror}; {layout}") from problem
    if not classes:
        raise ConfigError(f"{folder} has no folders of classes; {layout}")
    return ImageList(Path(folder), tuple(classes), np.array(names), np.array(labels, dtype=np.int64))


def open_image(path: Path) -> Any:
    """The image at `path` as Pillow has it, upright, in red, green and blue; ConfigError names a file that is none.

    Greyscale, palettes and CMYK are converted, transparency is dropped. The camera's note on which side is up (EXIF) is
    followed, and ignored where it is damaged.
    """
    try:
        from PIL import Image, ImageOps
    except ImportError as problem:
        raise MissingDependencyError.missing("images", "pillow") from problem
    try:
        with Image.open(path) as image:
            image.load()
            with warnings.catch_warnings():  # on notes that are damaged
                warnings.simplefilter("ignore")
                try:
                    upright = ImageOps.exif_transpose(image)
                except (ValueError, TypeError, KeyError, SyntaxError, OSError, EOFError):
                    upright = image
                return upright.convert("RGB")
    except (OSError, ValueError, SyntaxError, EOFError, Image.DecompressionBombError) as problem:
        raise ConfigError(f"{path} cannot be read as an image: {problem}; replace or remove it") from problem


def cut_out(image: Any, box: Box, size: tuple[int, int]) -> Tensor:
    """The part of `image` in `box`, scaled to `size` (width, height): uint8 (3, height, width)."""
    from PIL import Image

    part = image.crop(box).resize(size, Image.Resampling.BILINEAR)
    return torch.from_numpy(np.array(part, dtype=np.uint8)).permute(2, 0, 1).contiguous()
