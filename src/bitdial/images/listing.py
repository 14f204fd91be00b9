"""Which files of a folder are images, in which order, and how they are called."""

import logging
import os
from pathlib import Path

from bitdial.errors import ConfigError
from bitdial.images.decode import ENDINGS

log = logging.getLogger(__name__)


def image_names(folder: Path) -> list[str]:
    """The images in `folder` and below, sorted, each by its path from there ("cats/1.jpg"); ConfigError if none is.

    Hidden files and folders are passed over. So are files with another ending than an image's, with a warning.
    """
    if not folder.is_dir():
        what = "is not a folder" if os.path.lexists(folder) else "does not exist"
        raise ConfigError(f"{folder} {what}; name a folder of images")
    found: list[str] = []
    others: list[str] = []
    seen: set[str] = set()
    for place, folders, files in os.walk(folder, onerror=_refuse, followlinks=True):
        if (real := os.path.realpath(place)) in seen:  # a link to a folder above
            folders.clear()
            continue
        seen.add(real)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        inner = Path(place).relative_to(folder).as_posix()
        prefix = "" if inner == "." else f"{inner}/"
        for name in files:
            if not name.startswith("."):
                (found if name.lower().endswith(ENDINGS) else others).append(prefix + name)
    if not found:
        there = f"; it has {len(others)} other files, such as {min(others)}" if others else ""
        raise ConfigError(f"{folder} has no images ({', '.join(ENDINGS)}){there}; name a folder of images")
    if others:
        log.warning(
            "%s: %d files are not images by their ending, such as %s; they are left out",
            folder, len(others), min(others),
        )  # fmt: skip
    return sorted(found)


def spread(names: list[str], count: int | None) -> list[str]:
    """`count` of `names`, evenly spread: the first ones of a sorted tree would all be of one class."""
    if count is None or count >= len(names):
        return names
    return [names[place * len(names) // count] for place in range(count)]


def _refuse(problem: OSError) -> None:
    raise ConfigError(f"cannot read {problem.filename}: {problem.strerror}") from problem
