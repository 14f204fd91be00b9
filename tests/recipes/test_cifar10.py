"""CIFAR-10 from files (fake ones here)."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bitdial.errors import ConfigError
from bitdial.recipes import cifar10
from bitdial.recipes.cifar10 import DEVIATION, MEAN, cifar10_data

CPU = torch.device("cpu")


def fake(train: int = 20, test: int = 8) -> dict[str, np.ndarray]:
    """Random images, labelled at random."""
    random = np.random.default_rng(0)
    arrays = {}
    for part, count in (("train", train), ("test", test)):
        arrays[f"x_{part}"] = random.integers(0, 256, (count, 3, 32, 32), dtype=np.uint8)
        arrays[f"y_{part}"] = random.integers(0, 10, count, dtype=np.uint8)
    return arrays


def write_npz(folder: Path, arrays: dict[str, np.ndarray]) -> None:
    np.savez(folder / "cifar10.npz", **arrays)  # type: ignore[arg-type]


def write_binary(folder: Path, arrays: dict[str, np.ndarray]) -> Path:
    """The layout of the original: a label byte, then red, green and blue planes; five training files."""
    binary = folder / "cifar-10-batches-bin"
    binary.mkdir()
    size = len(arrays["x_train"]) // 5
    names = {f"data_batch_{i + 1}.bin": ("train", slice(i * size, (i + 1) * size)) for i in range(5)}
    for name, (part, some) in {**names, "test_batch.bin": ("test", slice(None))}.items():
        pairs = zip(arrays[f"y_{part}"][some], arrays[f"x_{part}"][some], strict=True)
        (binary / name).write_bytes(b"".join(bytes([label]) + image.tobytes() for label, image in pairs))
    return binary


WRITERS = {"npz": write_npz, "binary": write_binary}
each_layout = pytest.mark.parametrize("layout", list(WRITERS))


# --- what is read -------------------------------------------------------------------------------


@each_layout
def test_both_layouts_give_the_same_normalised_images(tmp_path: Path, layout: str) -> None:
    arrays = fake()
    WRITERS[layout](tmp_path, arrays)
    for part, (x, y) in zip(("train", "test"), cifar10_data(tmp_path, holdout=False, device=CPU), strict=True):
        images = arrays[f"x_{part}"].astype(np.float64) / 255
        expected = (images - np.reshape(MEAN, (3, 1, 1))) / np.reshape(DEVIATION, (3, 1, 1))
        assert (x.dtype, y.dtype) == (torch.float32, torch.int64)
        np.testing.assert_allclose(x.numpy(), expected, rtol=1e-5, atol=1e-5)
        assert y.tolist() == arrays[f"y_{part}"].tolist()


@each_layout
def test_holdout_takes_the_end_of_the_training_set(tmp_path: Path, monkeypatch, layout: str) -> None:
    WRITERS[layout](tmp_path, fake())
    (x_all, y_all), _ = cifar10_data(tmp_path, holdout=False, device=CPU)
    monkeypatch.setattr(cifar10, "HELD_OUT", 6)
    (x, y), (x_held, y_held) = cifar10_data(tmp_path, holdout=True, device=CPU)
    assert (len(x), len(x_held)) == (14, 6)
    assert torch.equal(torch.cat([x, x_held]), x_all)
    assert torch.equal(torch.cat([y, y_held]), y_all)


def test_five_thousand_images_are_held_out() -> None:
    assert cifar10.HELD_OUT == 5_000


@each_layout
def test_holdout_never_reads_the_test_set(tmp_path: Path, monkeypatch, layout: str) -> None:
    monkeypatch.setattr(cifar10, "HELD_OUT", 6)
    arrays = fake()
    if layout == "npz":
        write_npz(tmp_path, {**arrays, "x_test": np.array(["not", "images"]), "y_test": np.array([99])})
    else:
        (write_binary(tmp_path, arrays) / "test_batch.bin").write_bytes(b"not a batch")
    _, (_, held) = cifar10_data(tmp_path, holdout=True, device=CPU)
    assert held.tolist() == arrays["y_train"][-6:].tolist()
    with pytest.raises(ConfigError):  # the poison is one
        cifar10_data(tmp_path, holdout=False, device=CPU)


def test_too_few_images_to_hold_any_out(tmp_path: Path) -> None:
    write_npz(tmp_path, fake())
    with pytest.raises(ConfigError, match=r"holds 20 training images, too few .* leave --holdout out"):
        cifar10_data(tmp_path, holdout=True, device=CPU)


# --- what is refused ----------------------------------------------------------------------------


def changed(**changes: np.ndarray | None) -> dict[str, np.ndarray]:
    arrays: dict[str, Any] = {**fake(), **changes}
    return {name: array for name, array in arrays.items() if array is not None}


WRONG = {
    "float images": changed(x_train=np.zeros((20, 3, 32, 32), np.float32)),
    "channels last": changed(x_train=np.zeros((20, 32, 32, 3), np.uint8)),
    "flat images": changed(x_test=np.zeros((8, 3072), np.uint8)),
    "a label missing": changed(y_train=np.zeros(19, np.uint8)),
    "labels in a column": changed(y_train=np.zeros((20, 1), np.int64)),
    "float labels": changed(y_test=np.zeros(8)),
    "label 10": changed(y_test=np.full(8, 10, np.uint8)),
    "label -1": changed(y_train=np.full(20, -1)),
    "no images": changed(x_train=np.zeros((0, 3, 32, 32), np.uint8), y_train=np.zeros(0, np.uint8)),
    "an array missing": changed(y_test=None),
    "a number": changed(x_train=np.array(3, np.uint8)),
    "objects": changed(x_train=np.array([{"code": 1}], dtype=object)),
}


@pytest.mark.parametrize("arrays", WRONG.values(), ids=WRONG)
def test_wrong_arrays_are_refused_with_advice(tmp_path: Path, arrays: dict[str, np.ndarray]) -> None:
    write_npz(tmp_path, arrays)
    with pytest.raises(ConfigError, match=r"cifar10\.npz.* put cifar10\.npz there"):
        cifar10_data(tmp_path, holdout=False, device=CPU)


def test_a_pickle_is_refused_unread(tmp_path: Path) -> None:
    import pickle

    class Trap:
        def __reduce__(self) -> tuple[Any, ...]:
            return (Path.touch, (tmp_path / "sprung",))

    write_npz(tmp_path, changed(x_train=np.array([Trap()], dtype=object)))
    with pytest.raises(ConfigError, match="put cifar10"):
        cifar10_data(tmp_path, holdout=False, device=CPU)
    (tmp_path / "cifar10.npz").write_bytes(pickle.dumps(Trap()))
    with pytest.raises(ConfigError, match="put cifar10"):
        cifar10_data(tmp_path, holdout=False, device=CPU)
    assert not (tmp_path / "sprung").exists()
    pickle.loads(pickle.dumps(Trap()))  # the trap works
    assert (tmp_path / "sprung").exists()


def test_damaged_archives_are_refused(tmp_path: Path) -> None:
    write_npz(tmp_path, fake())
    path = tmp_path / "cifar10.npz"
    whole = path.read_bytes()
    plain = io.BytesIO()
    np.save(plain, np.zeros(3))
    flipped = bytearray(whole)
    flipped[len(whole) // 3] ^= 1
    for content in (b"", whole[: len(whole) // 2], whole[:10], plain.getvalue(), b"PK\x03\x04", bytes(flipped)):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match="put cifar10"):
            cifar10_data(tmp_path, holdout=False, device=CPU)


def test_no_files_at_all(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "absent"):
        with pytest.raises(ConfigError, match=r"CIFAR-10 was not found in .*: put cifar10\.npz there .* --data"):
            cifar10_data(folder, holdout=False, device=CPU)


@pytest.mark.parametrize("name", ["data_batch_3.bin", "test_batch.bin"])
def test_binary_batches_missing_or_cut_short(tmp_path: Path, name: str) -> None:
    path = write_binary(tmp_path, fake()) / name
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ConfigError, match=rf"{name} is not a binary batch .*; unpack the archive again"):
        cifar10_data(tmp_path, holdout=False, device=CPU)
    path.unlink()
    with pytest.raises(ConfigError, match=rf"{name} is not a binary batch .*; unpack the archive again"):
        cifar10_data(tmp_path, holdout=False, device=CPU)


def test_binary_labels_are_checked(tmp_path: Path) -> None:
    write_binary(tmp_path, changed(y_train=np.full(20, 200, np.uint8)))
    with pytest.raises(ConfigError, match="a train label is 200, but labels are 0 to 9"):
        cifar10_data(tmp_path, holdout=False, device=CPU)
