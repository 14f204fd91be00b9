"""CIFAR-10 from local files: an .npz (x_train, y_train, x_test, y_test; uint8) or the original binary batches."""

import zipfile
import zlib
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from bitdial.errors import ConfigError

MEAN = (0.4914, 0.4822, 0.4465)
DEVIATION = (0.2470, 0.2435, 0.2616)
HELD_OUT = 5_000
SIDE = 32  # pixels
IMAGE_BYTES = 3 * SIDE * SIDE
EXPECTED = (
    "put cifar10.npz there (uint8 arrays x_train and x_test as (count, 3, 32, 32), y_train and y_test as (count,)) or "
    "the folder cifar-10-batches-bin of the original binary version, or name another folder with --data"
)

Split = tuple[Tensor, Tensor]


def cifar10_data(folder: Path, *, holdout: bool, device: torch.device) -> tuple[Split, Split]:
    """Training images and labels, and those to evaluate on: normalised float32 (count, 3, 32, 32) on `device`.

    With `holdout`, both come from the training set (the last 5,000 images are held out) and the test set stays unread.
    """
    images, labels = _read(Path(folder), "train")
    if not holdout:
        return _to_tensors(images, labels, device), cifar10_test(folder, device=device)
    if len(images) <= HELD_OUT:
        raise ConfigError(
            f"{folder} holds {len(images)} training images, too few to hold {HELD_OUT} out; "
            "get the whole data set, or leave --holdout out"
        )
    kept, held = (images[:-HELD_OUT], labels[:-HELD_OUT]), (images[-HELD_OUT:], labels[-HELD_OUT:])
    return _to_tensors(*kept, device), _to_tensors(*held, device)


def cifar10_test(folder: Path, *, device: torch.device) -> Split:
    """Images and labels of the test set, as above."""
    return _to_tensors(*_read(Path(folder), "test"), device)


def _read(folder: Path, part: str) -> tuple[np.ndarray, np.ndarray]:
    """Images (count, 3, 32, 32), uint8, and labels (count,) of `part`: 'train' or 'test'. The other is not read."""
    archive, binary = folder / "cifar10.npz", folder / "cifar-10-batches-bin"
    if archive.is_file():
        source, (images, labels) = archive, _read_npz(archive, part)
    elif binary.is_dir():
        names = [f"data_batch_{i}.bin" for i in range(1, 6)] if part == "train" else ["test_batch.bin"]
        parts = [_read_binary(binary / name) for name in names]
        source, (images, labels) = (
            binary,
            (np.concatenate([p[0] for p in parts]), np.concatenate([p[1] for p in parts])),
        )
    else:
        raise ConfigError(f"CIFAR-10 was not found in {folder}: {EXPECTED}")
    if images.dtype != np.uint8 or images.shape[1:] != (3, 32, 32) or len(images) == 0:
        raise ConfigError(f"{source}: the {part} images are {images.dtype} {images.shape}; {EXPECTED}")
    if labels.dtype.kind not in "iu" or labels.shape != images.shape[:1]:
        raise ConfigError(
            f"{source}: the {part} labels are {labels.dtype} {labels.shape} for {len(images)} images; {EXPECTED}"
        )
    if labels.min() < 0 or labels.max() > 9:
        wrong = labels[(labels < 0) | (labels > 9)][0]
        raise ConfigError(
            f"{source}: a {part} label is {int(wrong)}, but labels are 0 to 9; is this CIFAR-10? {EXPECTED}"
        )
    return images, labels


def _read_npz(path: Path, part: str) -> tuple[np.ndarray, np.ndarray]:
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            return arrays[f"x_{part}"], arrays[f"y_{part}"]
    except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile, zlib.error) as problem:
        raise ConfigError(f"{path} is not the CIFAR-10 archive that is expected ({problem}): {EXPECTED}") from problem


def _read_binary(path: Path) -> tuple[np.ndarray, np.ndarray]:
    try:
        rows = np.frombuffer(path.read_bytes(), np.uint8).reshape(-1, 1 + IMAGE_BYTES)
    except (OSError, ValueError) as problem:
        raise ConfigError(
            f"{path} is not a binary batch of CIFAR-10 ({problem}); unpack the archive again"
        ) from problem
    return rows[:, 1:].reshape(-1, 3, 32, 32), rows[:, 0]


def _to_tensors(images: np.ndarray, labels: np.ndarray, device: torch.device) -> Split:
    x = torch.from_numpy(images.copy()).to(device).float().div_(255)
    mean, deviation = (torch.tensor(v, device=device).view(3, 1, 1) for v in (MEAN, DEVIATION))
    return x.sub_(mean).div_(deviation), torch.from_numpy(labels.astype(np.int64)).to(device)
