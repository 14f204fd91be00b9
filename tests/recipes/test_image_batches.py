"""Batches from folders: the same whoever reads them, and shares that make up the whole."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bitdial.errors import ConfigError
from bitdial.images import ImageBatches, ImageSettings
from bitdial.recipes.image_batches import (
    AREAS,
    RATIOS,
    EvaluationData,
    FolderData,
    MiddleCut,
    RandomCut,
    Reading,
    random_box,
    settings_for,
    usual_workers,
)
from bitdial.recipes.image_folder import list_images
from bitdial.train.data import Sample

Image: Any = pytest.importorskip("PIL.Image")
CPU = torch.device("cpu")


def reading(workers: int = 0) -> Reading:
    return Reading(settings_for(16, ImageSettings()), workers, CPU)


def same(one: Sample, other: Sample) -> bool:
    return all(
        torch.equal(torch.as_tensor(a), torch.as_tensor(b))
        for a, b in ((one.inputs, other.inputs), (one.targets, other.targets), (one.index, other.index))
    )


def test_random_parts_have_the_areas_and_shapes_that_they_should() -> None:
    draws = np.random.default_rng(0)
    boxes = [random_box(400, 300, draws) for _ in range(2000)]
    sizes = np.array([(right - left, bottom - top) for left, top, right, bottom in boxes])
    assert all(left >= 0 and top >= 0 and right <= 400 and bottom <= 300 for left, top, right, bottom in boxes)
    areas, ratios = sizes.prod(axis=1) / (400 * 300), sizes[:, 0] / sizes[:, 1]
    assert areas.min() > 0.95 * AREAS[0]
    assert ratios.min() > 0.97 * RATIOS[0]
    assert ratios.max() < 1.03 * RATIOS[1]
    assert 0.40 < areas.mean() < 0.54, "areas are alike between 8 % and 100 %, less what does not fit"
    corners = np.array([box[:2] for box in boxes])
    assert corners.min() == 0
    assert (corners.max(axis=0) > (200, 150)).all(), "they lie everywhere"


def test_where_no_random_part_fits_the_middle_is_taken() -> None:
    for width, height in ((1000, 10), (10, 1000), (1, 1)):
        left, top, right, bottom = random_box(width, height, np.random.default_rng(0))
        assert 0 <= left < right <= width
        assert 0 <= top < bottom <= height
    assert random_box(1000, 10, np.random.default_rng(0)) == (493, 0, 506, 10)


def test_crops_depend_on_seed_epoch_and_index_alone() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (40, 50, 3), dtype=np.uint8)
    image = Image.fromarray(pixels)
    small, smaller = (settings_for(size, ImageSettings()) for size in (16, 8))
    first = RandomCut(small, seed=1, epoch=2)(image, 3)
    assert (first.dtype, tuple(first.shape)) == (torch.uint8, (3, 16, 16))
    assert torch.equal(first, RandomCut(small, seed=1, epoch=2)(image, 3))
    for other in (RandomCut(small, 2, 2)(image, 3), RandomCut(small, 1, 3)(image, 3), RandomCut(small, 1, 2)(image, 4)):
        assert not torch.equal(first, other)
    lit = np.zeros((8, 8, 3), dtype=np.uint8)
    lit[:, :4] = 255  # the left half
    found = torch.stack([RandomCut(smaller, seed=0, epoch=0)(Image.fromarray(lit), i).float() for i in range(200)])
    mirrored = float((found[..., -1] > found[..., 0]).any(dim=1).any(dim=1).float().mean())
    kept = float((found[..., -1] < found[..., 0]).any(dim=1).any(dim=1).float().mean())
    assert 0.6 < mirrored / kept < 1.6, "about half of those that show the edge are mirrored"


def test_evaluation_takes_the_middle() -> None:
    """The short side becomes 256/224 of the size; a mark in the middle stays there, marks at the ends go."""
    pixels = np.zeros((32, 64, 3), dtype=np.uint8)
    pixels[:, 30:34], pixels[:, :8], pixels[:, -8:] = (255, 0, 0), (0, 255, 0), (0, 0, 255)
    for image, axis in ((Image.fromarray(pixels), 1), (Image.fromarray(pixels.transpose(1, 0, 2).copy()), 0)):
        found = MiddleCut(settings_for(28, ImageSettings()))(image, 0)
        assert tuple(found.shape) == (3, 28, 28)
        assert int(found[1:].max()) == 0
        line = found[0].float().mean(dim=1 - axis)
        assert line.nonzero().flatten().tolist() == [12, 13, 14, 15]


def test_inputs_are_those_of_the_evaluation_on_any_folder(make_folder: Callable[..., Path]) -> None:
    """What `bitdial eval --images` sees: accuracies are then of the same inputs, in any order of channels."""
    folder = make_folder(classes=2, train=3) / "train"
    for order in ("RGB", "BGR"):
        settings = settings_for(28, ImageSettings(mean=(1, 2, 3), std=(4, 5, 6), order=order))
        assert (settings.resize, settings.crop, settings.mean, settings.order) == (32, 28, (1, 2, 3), order)
        held = EvaluationData(list_images(folder), Reading(settings, 0, CPU))
        expected = ImageBatches(folder, settings, labels="folders")
        assert expected.labels is not None
        ((inputs, labels),) = held
        assert torch.equal(inputs, expected[0])
        assert torch.equal(labels, expected.labels)
    data = FolderData(list_images(folder), Reading(settings, 0, CPU), batch_size=6, seed=0)
    plain = FolderData(list_images(folder), Reading(replace(settings, order="RGB"), 0, CPU), batch_size=6, seed=0)
    (turned,), (straight,) = data.batches(0), plain.batches(0)
    scale, shift = (torch.tensor(values).view(3, 1, 1) for values in (settings.std, settings.mean))
    given = [torch.as_tensor(one.inputs) * scale + shift for one in (turned, straight)]
    torch.testing.assert_close(given[0], given[1].flip(1))


def test_workers_and_a_late_start_change_nothing(make_folder: Callable[..., Path]) -> None:
    images = list_images(make_folder(classes=4, train=4) / "train")
    data = FolderData(images, reading(), batch_size=5, seed=3)
    assert (len(data), data.samples) == (3, 16)
    whole = list(data.batches(1))
    state = torch.get_rng_state()
    again = list(FolderData(images, reading(workers=2), batch_size=5, seed=3).batches(1))
    late = list(FolderData(images, reading(workers=1), batch_size=5, seed=3).batches(1, start=2))
    assert torch.equal(torch.get_rng_state(), state), "the global generator, which dropout draws from, is left alone"
    assert all(same(a, b) for a, b in zip(whole, again, strict=True))
    assert len(late) == 1
    assert same(late[0], whole[2])
    index = torch.cat([torch.as_tensor(batch.index) for batch in whole])
    assert len(index) == len(index.unique()) == 15, "a last batch that is not full is left out"
    assert all(b.targets.tolist() == images.labels[np.asarray(b.index)].tolist() for b in whole)
    assert not any(same(a, b) for a, b in zip(whole, data.batches(2), strict=True)), "each epoch is another"


def test_ranks_share_each_batch(make_folder: Callable[..., Path]) -> None:
    images = list_images(make_folder(classes=4, train=4) / "train")
    data = FolderData(images, reading(), batch_size=6, seed=0)
    whole = list(data.batches(0))
    shares = [list(data.batches(0, rank=rank, world=2)) for rank in range(2)]
    for number, batch in enumerate(whole):
        assert torch.equal(
            torch.as_tensor(batch.inputs), torch.cat([torch.as_tensor(s[number].inputs) for s in shares])
        )
    held = [list(EvaluationData(images, reading(), rank=rank, world=3)) for rank in range(3)]
    labels = sorted(int(label) for share in held for _, y in share for label in y)
    assert labels == images.labels.tolist()
    assert sum(len(x) for x, _ in held[0]) == 6


def test_a_file_that_cannot_be_read_is_named_across_processes(make_folder: Callable[..., Path]) -> None:
    folder = make_folder(classes=2, train=3) / "train"
    (folder / "class1" / "2.jpg").write_bytes(b"no image")
    for workers in (0, 1):
        data = FolderData(list_images(folder), reading(workers), batch_size=6, seed=0)
        with pytest.raises(ConfigError, match=r"^\S*2\.jpg cannot be read as an image: [^\n]*$"):
            list(data.batches(0))


def test_cores_are_shared_among_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(12)), raising=False)
    assert usual_workers() == 12
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert usual_workers() == 1
