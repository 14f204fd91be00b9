"""CIFAR-10 from local files: an .npz (x_train, y_train, x_test, y_test; uint8) or the original binary batches."""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from bitdial.errors import ConfigError

MEAN = (0.4914, 0.4822, 0.4465)
DEVIATION = (0.2470, 0.2435, 0.2616)
HELD_OUT = 5_000
IMAGE_BYTES = 3 * 32 * 32

Split = tuple[Tensor, Tensor]


def cifar10_data(folder: Path, *, holdout: bool, device: torch.device) -> tuple[Split, Split]:
    """Training images and labels, and those to evaluate on: normalised float32 (count, 3, 32, 32) on `device`.

    With `holdout`, both come from the training set (the last 5,000 images are held out) and the test set stays unread.
    """
    train, test = _read(Path(folder))
    if holdout:
        images, labels = train
        train, test = (images[:-HELD_OUT], labels[:-HELD_OUT]), (images[-HELD_OUT:], labels[-HELD_OUT:])
    return _to_tensors(*train, device), _to_tensors(*test, device)


def _read(folder: Path) -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    binary = folder / "cifar-10-batches-bin"
    if (folder / "cifar10.npz").is_file():
        return _read_npz(folder / "cifar10.npz")
    if binary.is_dir():
        parts = [_read_binary(binary / f"data_batch_{i}.bin") for i in range(1, 6)]
        images, labels = (np.concatenate(column) for column in zip(*parts, strict=True))
        return (images, labels), _read_binary(binary / "test_batch.bin")
    raise ConfigError(
        f"CIFAR-10 was not found in {folder}: put cifar10.npz there (arrays x_train, y_train, x_test, y_test; uint8, "
        "images as (count, 3, 32, 32)) or the folder cifar-10-batches-bin of the original binary version, or name "
        "another folder with --data"
    )


def _read_npz(path: Path) -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    try:
        with np.load(path, allow_pickle=False) as arrays:
            train, test = [(arrays[f"x_{part}"], arrays[f"y_{part}"]) for part in ("train", "test")]
    except (OSError, ValueError, KeyError) as problem:
        raise ConfigError(f"{path} is not the CIFAR-10 archive that is expected: {problem}") from problem
    for images, labels in (train, test):
        if images.dtype != np.uint8 or images.shape[1:] != (3, 32, 32) or len(images) != len(labels):
            raise ConfigError(f"{path}: images must be uint8 (count, 3, 32, 32), with a label each")
    return train, test


def _read_binary(path: Path) -> tuple[np.ndarray, np.ndarray]:
    try:
        rows = np.frombuffer(path.read_bytes(), np.uint8).reshape(-1, 1 + IMAGE_BYTES)
    except (OSError, ValueError) as problem:
        raise ConfigError(f"{path} is not a binary batch of CIFAR-10: {problem}") from problem
    return rows[:, 1:].reshape(-1, 3, 32, 32), rows[:, 0]


def _to_tensors(images: np.ndarray, labels: np.ndarray, device: torch.device) -> Split:
    if labels.max() > 9:
        raise ConfigError(f"a CIFAR-10 label is {int(labels.max())}; labels are 0 to 9")
    x = torch.from_numpy(images.copy()).to(device).float().div_(255)
    mean, deviation = (torch.tensor(v, device=device).view(3, 1, 1) for v in (MEAN, DEVIATION))
    return x.sub_(mean).div_(deviation), torch.from_numpy(labels.astype(np.int64)).to(device)
