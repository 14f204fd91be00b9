"""The data that commands run on: a recipe's own, CIFAR-10 in a folder, or arrays in an .npz file."""

import zipfile
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from bitdial.artifact import Artifact
from bitdial.errors import ConfigError
from bitdial.recipes import TEST_DATA
from bitdial.recipes.cifar10 import cifar10_data
from bitdial.recipes.digits import digits_data
from bitdial.train import accuracy, batched

Batches = list[tuple[Tensor, Tensor]]


def test_data(choice: str | None, artifact: Artifact) -> Batches:
    """The test set that `--data` names, by default that of the file's recipe."""
    name = choice or artifact.metrics.get("recipe")
    if name in TEST_DATA:
        return TEST_DATA[name]()
    if choice is None:
        raise ConfigError(
            "the file does not say what it was trained on; pass --data with a recipe's name "
            f"({', '.join(TEST_DATA)}) or an .npz file with arrays x and y"
        )
    if not Path(choice).is_file():
        raise ConfigError(f"--data {choice}: neither a recipe ({', '.join(TEST_DATA)}) nor a file")
    return batched(*_npz_data(Path(choice)))


def training_data(choice: str | None, artifact: Artifact) -> tuple[Tensor, Tensor]:
    """Images and labels that a model may be fitted to: sensitivities lead to choices, which no test image may make."""
    if (choice or artifact.metrics.get("recipe")) == "digits":
        return digits_data()[:2]
    if choice is None:
        raise ConfigError(
            "the file does not say where its training data is; pass --data with digits, the folder with CIFAR-10 or an "
            ".npz file with arrays x and y"
        )
    if Path(choice).is_dir():
        return cifar10_data(Path(choice), holdout=True, device=torch.device("cpu"))[0]
    if not Path(choice).is_file():
        raise ConfigError(f"--data {choice}: not digits, a folder or a file")
    return _npz_data(Path(choice))


def _npz_data(path: Path) -> tuple[Tensor, Tensor]:
    try:
        with np.load(path, allow_pickle=False) as arrays:
            x, y = torch.from_numpy(arrays["x"]).float(), torch.from_numpy(arrays["y"]).long()
    except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile) as problem:
        raise ConfigError(f"--data {path}: not an .npz file with arrays x and y ({problem})") from problem
    if len(x) != len(y) or len(x) == 0:
        raise ConfigError(f"--data {path}: x has {len(x)} samples and y {len(y)}")
    return x, y


def accuracy_on(live: nn.Module, data: Batches) -> float:
    """The accuracy of `live` on `data`; ConfigError if the data is not for such a model."""
    try:
        return accuracy(live, data)
    except (RuntimeError, IndexError) as problem:
        raise does_not_fit(data[0][0], problem) from problem


def does_not_fit(x: Tensor, problem: Exception) -> ConfigError:
    """The error for data on which a model cannot run."""
    return ConfigError(f"the data (samples of shape {tuple(x.shape[1:])}) does not fit the model: {problem}")
