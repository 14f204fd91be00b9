"""Lists of images in folders by class, FOLDER/<class>/*.jpg, for worker processes."""

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from bitdial.errors import ConfigError
from bitdial.images.decode import ENDINGS
from bitdial.images.labels import class_folders, classes_by_folder
from bitdial.images.listing import image_names


@dataclass(frozen=True)
class ImageList:
    """The images below `folder` in the order of their classes and names, each with the number of its class.

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
    folder = Path(folder)
    try:
        names = image_names(folder)
        labels = classes_by_folder(folder, names).numpy()
    except ConfigError as problem:
        raise ConfigError(f"{problem}: {layout}") from problem
    classes = class_folders(folder)
    if empty := sorted(set(range(len(classes))) - set(labels.tolist())):
        raise ConfigError(f"the class {folder / classes[empty[0]]} holds no image; {layout}")
    order = np.argsort(labels, kind="stable")  # "a b/1.jpg" sorts before "a/1.jpg", though its class comes later
    stored = np.array([os.fsencode(name) for name in names])
    return ImageList(folder, tuple(classes), stored[order], labels[order])
