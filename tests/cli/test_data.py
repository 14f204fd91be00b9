"""What commands choose and measure by: held-out images are neither trained on nor test images."""

from pathlib import Path

import numpy as np
import pytest
import torch

from bitdial.artifact import Artifact
from bitdial.cli.data import fitting, float_accuracy, held_out_data, sample_input, training_data, was_trained_on
from bitdial.errors import ConfigError
from bitdial.recipes.digits import digits_data


def made_by(**metrics: object) -> Artifact:
    return Artifact({"metrics": metrics}, {}, "", 0)


@pytest.fixture
def cifar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Ten training images, each of one brightness, three of them held out; test images that must not be read."""
    monkeypatch.setattr("bitdial.recipes.cifar10.HELD_OUT", 3)
    x = np.repeat(np.arange(10, dtype=np.uint8), 3 * 32 * 32).reshape(10, 3, 32, 32)
    np.savez(tmp_path / "cifar10.npz", x_train=x, y_train=np.arange(10), x_test=x[:0], y_test=np.arange(0))
    return tmp_path


def test_digits_are_split_without_test_images() -> None:
    *_, x_test, _ = digits_data()
    kept, held = training_data("digits", made_by()), held_out_data(None, made_by(recipe="digits"))
    assert (len(kept[0]), len(held[0])) == (896, 401)
    images = [{tuple(image.flatten().tolist()) for image in part} for part in (kept[0], held[0], x_test)]
    assert not images[1] & images[0]
    assert not images[2] & (images[0] | images[1])


def test_cifar10_is_split_without_test_images(cifar: Path) -> None:
    kept, held = training_data(str(cifar), made_by()), held_out_data(str(cifar), made_by(recipe="cifar10-resnet20"))
    assert kept[1].tolist() == list(range(7))
    assert held[1].tolist() == [7, 8, 9]
    assert held[0].shape == (3, 3, 32, 32)


def test_a_file_of_the_users_is_taken_whole(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.ones((4, 2), np.float32), y=np.arange(4))
    x, y = held_out_data(str(tmp_path / "a.npz"), made_by(recipe="digits"))
    assert torch.equal(x, torch.ones(4, 2))
    assert y.tolist() == [0, 1, 2, 3]


X, Y = np.ones((4, 2), np.float32), np.arange(4)


@pytest.mark.parametrize(
    ("x", "y", "words"),
    [
        (X.astype(np.uint8), Y, "x is uint8; give float32, scaled as in training"),
        (X.astype(np.complex64), Y, "x is complex64"),
        (X.astype(bool), Y, "x is bool"),
        (X, Y.astype(np.float32), "y is float32"),
        (X, Y - 1, "y has the label -1"),
        (X, Y[:3], r"x of shape \(4, 2\) and y of shape \(3,\)"),
        (X[:0], Y[:0], r"x of shape \(0, 2\)"),
        (X[0, 0], Y[0], r"x of shape \(\)"),
    ],
)
def test_arrays_that_would_be_misread_are_refused(tmp_path: Path, x: np.ndarray, y: np.ndarray, words: str) -> None:
    np.savez(tmp_path / "a.npz", x=x, y=y)
    with pytest.raises(ConfigError, match=words):
        held_out_data(str(tmp_path / "a.npz"), made_by())


@pytest.mark.parametrize(("x_type", "y_type"), [("float16", "uint8"), ("float64", "int32"), (">f4", ">i8")])
def test_other_floats_and_integers_are_taken(tmp_path: Path, x_type: str, y_type: str) -> None:
    np.savez(tmp_path / "a.npz", x=X.astype(x_type), y=Y.astype(y_type))
    x, y = held_out_data(str(tmp_path / "a.npz"), made_by())
    assert (x.dtype, y.dtype) == (torch.float32, torch.int64)
    assert (x.tolist(), y.tolist()) == (X.tolist(), Y.tolist())


def test_a_single_array_is_refused_with_advice(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", X)
    with pytest.raises(ConfigError, match="this is one array; give an"):
        held_out_data(str(tmp_path / "a.npy"), made_by())


@pytest.mark.parametrize(
    ("choice", "metrics", "expected"),
    [
        (None, {"recipe": "digits", "holdout": True}, False),
        (None, {"recipe": "digits", "holdout": False}, True),
        (None, {"recipe": "digits"}, True),
        ("digits", {"recipe": "digits", "holdout": "yes"}, True),
        ("FOLDER", {"recipe": "cifar10-resnet20", "holdout": False}, True),
        ("FOLDER", {"recipe": "cifar10-mobilenetv2", "holdout": True}, False),
        ("FILE", {"recipe": "digits", "holdout": False}, False),
        ("digits", {}, False),  # nobody knows
        ("digits", {"recipe": ["digits"]}, False),
    ],
)
def test_images_that_were_trained_on_are_known(
    cifar: Path, choice: str | None, metrics: dict[str, object], expected: bool
) -> None:
    places = {"FOLDER": str(cifar), "FILE": str(cifar / "cifar10.npz")}
    assert was_trained_on(places.get(choice or "", choice), made_by(**metrics)) is expected


def test_a_sample_has_the_shape_that_is_given_or_the_recipes() -> None:
    assert sample_input(None, made_by(recipe="cifar10-resnet20")).shape == (1, 3, 32, 32)
    assert sample_input((5,), made_by(recipe="digits")).shape == (1, 5)
    for metrics in ({}, {"recipe": "mine"}, {"recipe": {}}):
        with pytest.raises(ConfigError, match="--input 3x32x32"):
            sample_input(None, made_by(**metrics))


@pytest.mark.parametrize(
    "failure",
    [
        RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"),
        torch.OutOfMemoryError("DefaultCPUAllocator: can't allocate memory"),
    ],
)
def test_a_failure_of_the_machine_is_not_blamed_on_the_data(failure: Exception) -> None:
    with pytest.raises(type(failure)) as raised, fitting(torch.zeros(1, 3)):
        raise failure
    assert raised.value is failure


def test_a_shape_that_does_not_fit_is() -> None:
    with (
        pytest.raises(ConfigError, match=r"samples of shape \(3,\)\) does not fit the model"),
        fitting(torch.zeros(1, 3)),
    ):
        torch.zeros(1, 3) @ torch.zeros(4, 1)


def test_the_float_accuracy_is_known_only_if_it_is_of_the_held_out_images(cifar: Path) -> None:
    held = made_by(recipe="digits", holdout=True, float_top1=0.97)
    assert float_accuracy(None, held) == float_accuracy("digits", held) == 0.97
    assert float_accuracy(str(cifar), made_by(recipe="cifar10-resnet20", holdout=True, float_top1=0.9)) == 0.9
    assert float_accuracy("mine.npz", held) is None
    for other in ({"holdout": False}, {"recipe": "unknown"}, {"float_top1": None}, {"float_top1": 97.0}):
        assert (
            float_accuracy(None, made_by(**{"recipe": "digits", "holdout": True, "float_top1": 0.97} | other)) is None
        )
