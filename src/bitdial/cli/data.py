"""The data that commands run on: a recipe's own, CIFAR-10 in a folder, or arrays in an .npz file."""

import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from bitdial.artifact import Artifact
from bitdial.cli.arguments import bits_setting
from bitdial.dial.plan import LayerBits
from bitdial.errors import BitdialError, ConfigError
from bitdial.files.atomic import read_json
from bitdial.images import stored_settings
from bitdial.recipes import INPUT_SHAPES, TEST_DATA
from bitdial.recipes.cifar10 import Split, cifar10_data, cifar10_test
from bitdial.recipes.digits import digits_data
from bitdial.train import accuracy, batched

Array = npt.NDArray[Any]
Batches = list[tuple[Tensor, Tensor]]


def recipe_of(artifact: Artifact) -> str | None:
    """The recipe that made the file, if it says so."""
    name = artifact.metrics.get("recipe")
    return name if isinstance(name, str) else None


def test_data(choice: str | None, artifact: Artifact) -> tuple[Batches, str]:
    """The test set that `--data` names, by default that of the file's recipe; and which images these are, in words."""
    batches, which = _test_data(choice, artifact)
    return batches, f"{sum(len(y) for _, y in batches):,} images of {which}"


def _test_data(choice: str | None, artifact: Artifact) -> tuple[Batches, str]:
    name = choice or recipe_of(artifact)
    if name in TEST_DATA:
        return TEST_DATA[name](), f"{name}, the test set"
    if choice is None:
        raise ConfigError(
            "the file does not say what it was trained on, or not where that is; pass --data with a recipe's name "
            f"({', '.join(TEST_DATA)}), the folder with CIFAR-10 or an .npz file with arrays x and y"
        )
    if Path(choice).is_dir():
        return batched(*cifar10_test(Path(choice), device=torch.device("cpu"))), f"CIFAR-10 in {choice}, the test set"
    if not Path(choice).is_file():
        raise ConfigError(f"--data {choice}: neither a recipe ({', '.join(TEST_DATA)}) nor a folder or file")
    return batched(*_npz_data(Path(choice))), choice


def training_data(choice: str | None, artifact: Artifact) -> tuple[Tensor, Tensor]:
    """Images and labels that a model may be fitted to: sensitivities lead to choices, which no test image may make."""
    return _parts_of_training_set(choice, artifact)[0]


def held_out_data(choice: str | None, artifact: Artifact) -> tuple[Tensor, Tensor]:
    """Images and labels to choose plans by: held out of the recipe's training set, or the file that `--data` names."""
    return _parts_of_training_set(choice, artifact)[1]


def was_trained_on(choice: str | None, artifact: Artifact) -> bool:
    """Whether the file's recipe trained on what `held_out_data` gives, because it was told to hold nothing out."""
    return _own_data(choice, artifact) and artifact.metrics.get("holdout") is not True


def float_accuracy(choice: str | None, artifact: Artifact) -> float | None:
    """The float model's accuracy on what `held_out_data` gives, if the file's recipe measured it on these images."""
    value = artifact.metrics.get("float_top1")
    measured = _own_data(choice, artifact) and artifact.metrics.get("holdout") is True
    return value if measured and isinstance(value, float) and 0 <= value <= 1 else None


def _own_data(choice: str | None, artifact: Artifact) -> bool:
    """Whether `choice` is the training set of the recipe that made the file."""
    own = choice is None or choice == "digits" or Path(choice).is_dir()
    return own and recipe_of(artifact) in INPUT_SHAPES


def _parts_of_training_set(choice: str | None, artifact: Artifact) -> tuple[Split, Split]:
    """The images that a run with --holdout trains on, and those it holds out; an .npz file is both."""
    if (choice or recipe_of(artifact)) == "digits":
        x, y, x_held, y_held = digits_data(holdout=True)
        return (x, y), (x_held, y_held)
    if choice is None:
        raise ConfigError(
            "the file does not say where its training data is; pass --data with digits, the folder with CIFAR-10 or an "
            ".npz file with arrays x and y"
        )
    if Path(choice).is_dir():
        return cifar10_data(Path(choice), holdout=True, device=torch.device("cpu"))
    if not Path(choice).is_file():
        raise ConfigError(f"--data {choice}: not digits, a folder or a file")
    arrays = _npz_data(Path(choice))
    return arrays, arrays


def sample_input(shape: tuple[int, ...] | None, artifact: Artifact) -> Tensor:
    """One empty image, to count a model's operations on: of `shape`, by default what the file or its recipe says."""
    if shape is None and (images := stored_settings(artifact.metrics, "the file")) is not None:
        shape = (3, images.crop, images.crop)
    shape = shape or INPUT_SHAPES.get(recipe_of(artifact) or "")
    if shape is None:
        raise ConfigError("the file does not say what its inputs look like; pass --input, such as --input 3x32x32")
    return torch.zeros(1, *shape)


def latency_table(path: Path) -> dict[str, dict[LayerBits, float]]:
    """The times in a JSON file {layer: {"4": time, or "4:8" for weight and activation bits: time}}."""
    form = 'expected {layer: {"4": time, "4:8": time of 4-bit weights and 8-bit activations}}'
    values = read_json(path)
    if not isinstance(values, dict) or not all(isinstance(times, dict) for times in values.values()):
        raise ConfigError(f"--latency-table {path}: {form}")
    table: dict[str, dict[LayerBits, float]] = {}
    for name, times in values.items():
        keys = {text: bits_setting(text) for text in times}
        if odd := [text for text, bits in keys.items() if isinstance(bits, str)]:
            raise ConfigError(f"--latency-table {path}: layer {name!r} has a time for {odd[0]!r}; {form}")
        table[name] = {bits: times[text] for text, bits in keys.items() if not isinstance(bits, str)}
    return table


def _npz_data(path: Path) -> tuple[Tensor, Tensor]:
    """Inputs and labels of the user's; values are taken as they are, so x must be what the model was trained on."""
    x, y = _read_npz(path)
    if x.dtype.kind != "f":
        raise ConfigError(f"--data {path}: x is {x.dtype}; give float32, scaled as in training")
    if y.dtype.kind not in "iu":
        raise ConfigError(f"--data {path}: y is {y.dtype}; give the number of each sample's class, as int64")
    if x.ndim == 0 or y.ndim == 0 or len(x) != len(y) or len(x) == 0:
        raise ConfigError(f"--data {path}: x of shape {x.shape} and y of shape {y.shape} are not samples and labels")
    labels = y.astype(np.int64)
    if labels.size and labels.min() < 0:
        raise ConfigError(f"--data {path}: y has the label {labels.min()}; classes are counted from 0")
    return torch.from_numpy(x.astype(np.float32)), torch.from_numpy(labels)


def _read_npz(path: Path) -> tuple[Array, Array]:
    try:
        content = np.load(path, allow_pickle=False)
        if isinstance(content, np.ndarray):
            raise ConfigError(f"--data {path}: this is one array; give an .npz file: numpy.savez('data.npz', x=x, y=y)")
        with content as arrays:
            return arrays["x"], arrays["y"]
    except ConfigError:
        raise
    except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile) as problem:
        raise ConfigError(f"--data {path}: not an .npz file with arrays x and y ({problem})") from problem


def accuracy_on(live: nn.Module, data: Batches, device: str = "cpu") -> float:
    """The accuracy of `live`, which is on `device`, on `data`; ConfigError if the data is not for such a model."""
    with fitting(data[0][0]), torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        return accuracy(live, ((x.to(device), y.to(device)) for x, y in data))


@contextmanager
def fitting(x: Tensor) -> Iterator[None]:
    """Run a model on data like `x` in a block: what torch says of data that is not for the model is a ConfigError.

    Memory that does not suffice and a GPU that fails are no fault of the data; their errors stay as they are.
    """
    try:
        yield
    except (BitdialError, torch.OutOfMemoryError):
        raise
    except (RuntimeError, IndexError, ValueError) as problem:
        if "CUDA" in str(problem):
            raise
        shape = tuple(x.shape[1:])
        raise ConfigError(f"the data (samples of shape {shape}) does not fit the model: {problem}") from problem
