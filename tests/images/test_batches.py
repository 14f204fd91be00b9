"""Folders as batches: lazy, in order, as often as wanted."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from bitdial import ImageBatches, ImageSettings
from bitdial.errors import ConfigError
from bitdial.images import batches as module

Write = Callable[..., Path]
SMALL = ImageSettings(resize=None, crop=8, mean=(10, 20, 30), std=(2, 4, 8))


@pytest.fixture
def folder(write: Write, tmp_path: Path) -> Path:
    for number in range(5):
        write(f"{number}.png")
    return tmp_path


def test_inputs_are_the_normalised_pixels_in_the_order_of_names(folder: Path) -> None:
    Image = pytest.importorskip("PIL.Image")
    images = ImageBatches(folder, SMALL, batch_size=2)
    assert (len(images), images.size, images.names) == (3, 5, [f"{number}.png" for number in range(5)])
    values = np.stack([np.asarray(Image.open(folder / name))[2:10, 2:10] for name in images.names]).astype(np.float32)
    expected = (values - np.float32([10, 20, 30])) / np.float32([2, 4, 8])
    for _ in range(2):
        found = list(images)
        assert [len(batch) for batch in found] == [2, 2, 1]
        assert found[0].dtype == torch.float32
        np.testing.assert_array_equal(torch.cat(found).permute(0, 2, 3, 1).numpy(), expected)
    assert torch.equal(images[-1], images[2])
    assert [len(batch) for batch in images[1:]] == [2, 1]


def test_files_are_decoded_when_needed_and_kept_if_they_fit(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[str] = []
    plain = module.decode_all

    def decode(paths: list[Path], settings: ImageSettings) -> list[tuple[torch.Tensor, bool]]:
        decoded.extend(path.name for path in paths)
        return plain(paths, settings)

    monkeypatch.setattr(module, "decode_all", decode)
    images = ImageBatches(folder, SMALL, batch_size=2)
    assert decoded == []
    assert images[1].shape == (2, 3, 8, 8)
    assert decoded == ["2.png", "3.png"]
    for _ in range(2):
        list(images)
    assert sorted(decoded) == images.names, "each once"
    uncached = ImageBatches(folder, SMALL, batch_size=2, cache_bytes=5 * 3 * 64 - 1)
    first, second = list(uncached), list(uncached)
    assert len(decoded) == 15
    for one, other, kept in zip(first, second, images, strict=True):
        assert torch.equal(one, other)
        assert torch.equal(one, kept)


def test_a_part_of_a_tree_has_all_its_classes(write: Write, tmp_path: Path) -> None:
    for kind in ("cats", "dogs"):
        for number in range(4):
            write(f"{kind}/{number}.png")
    images = ImageBatches(tmp_path, SMALL, count=4, batch_size=3, labels="folders")
    assert images.names == ["cats/0.png", "cats/2.png", "dogs/0.png", "dogs/2.png"]
    assert images.labels is not None
    assert images.labels.tolist() == [0, 0, 1, 1]
    pairs = images.labelled()
    assert len(pairs) == 2
    assert [y.tolist() for _, y in pairs] == [[0, 0, 1], [1]]
    assert torch.equal(pairs[1][0], images[1])
    assert images.subset(2).names == ["cats/0.png", "dogs/0.png"]
    others = images.others(2)
    assert others is not None
    assert others.names == ["cats/1.png", "dogs/1.png"]
    assert others.labels is not None
    assert others.labels.tolist() == [0, 1]
    assert ImageBatches(tmp_path, SMALL).others(2) is None
    with pytest.raises(ConfigError, match="have no labels"):
        ImageBatches(tmp_path, SMALL).labelled()


def test_a_small_part_keeps_its_pixels_where_all_of_them_do_not_fit(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(4):
        write(f"{number}.png")
    images = ImageBatches(tmp_path, SMALL, cache_bytes=2 * 3 * SMALL.crop**2)
    part = images.subset(2)
    first = part[0]
    monkeypatch.setattr("bitdial.images.batches.decode_all", lambda *args: pytest.fail("decoded again"))
    assert torch.equal(part[0], first)


def test_enlarged_images_are_counted_once(write: Write, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write("large.png")
    write("small.png", np.zeros((4, 4, 3), np.uint8))
    images = ImageBatches(tmp_path, ImageSettings(resize=12, crop=8))
    for _ in range(2):
        list(images)
    assert caplog.text.count("1 of 2 images, such as small.png, are smaller than 8 x 8 pixels and were enlarged") == 1


def test_images_of_one_colour_are_found(write: Write, tmp_path: Path) -> None:
    for name, value in (("a.png", 7), ("b.png", 200)):
        write(name, np.full((8, 8, 3), value, np.uint8))
    with pytest.raises(ConfigError, match=r"every image of .* is one colour all over, such as a\.png"):
        ImageBatches(tmp_path, SMALL, batch_size=1).check_varied()
    write("c.png")
    ImageBatches(tmp_path, SMALL, batch_size=1).check_varied()


def test_wrong_arguments_are_refused(folder: Path) -> None:
    for name, value in (("batch_size", 0), ("count", 0), ("count", 2.0), ("batch_size", True)):
        with pytest.raises(ConfigError, match=f"{name}={value!r} must be a whole number"):
            ImageBatches(folder, SMALL, **{name: value})  # type: ignore[arg-type]
