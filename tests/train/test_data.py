"""Training data: its order and augmentation are functions of (seed, epoch, sample), whatever the batch or rank."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset

from bitdial.errors import ConfigError, TrainingError
from bitdial.train import TrainConfig, train
from bitdial.train.data import ArrayData, LoaderData, Sample, Shift, as_training_data


def numbered(count: int, **settings: Any) -> ArrayData:
    """Samples that hold their own number, 3x3 images of one channel with the target ten times that."""
    inputs = torch.arange(count, dtype=torch.float32).reshape(-1, 1, 1, 1).expand(-1, 1, 3, 3).clone()
    return ArrayData(inputs, torch.arange(count) * 10, **settings)


def order(data: ArrayData, epoch: int, **share: int) -> list[list[int]]:
    batches = []
    for batch in data.batches(epoch, **share):
        assert batch.index is not None
        assert torch.equal(batch.inputs[:, 0, 0, 0].long(), batch.index)
        assert torch.equal(batch.targets, batch.index * 10)
        batches.append(batch.index.tolist())
    return batches


# --- order ----------------------------------------------------------------------------------------


def test_an_epoch_visits_every_sample_once() -> None:
    data = numbered(23, batch_size=5)
    batches = order(data, 0)
    assert [len(b) for b in batches] == [5, 5, 5, 5, 3]
    assert len(data) == 5
    assert data.samples == 23
    assert sorted(i for b in batches for i in b) == list(range(23))


def test_the_order_is_a_function_of_seed_and_epoch() -> None:
    one, same, other = (numbered(40, batch_size=7, seed=seed) for seed in (3, 3, 4))
    torch.manual_seed(0)
    first = [order(one, epoch) for epoch in range(4)]
    torch.manual_seed(1)
    assert [order(same, epoch) for epoch in (3, 1, 0, 2)] == [first[epoch] for epoch in (3, 1, 0, 2)]
    assert len({str(o) for o in first} | {str(order(other, epoch)) for epoch in range(4)}) == 8


def test_the_data_leaves_the_global_generator_alone() -> None:
    state = torch.get_rng_state()
    list(numbered(10, batch_size=3, augment=Shift(pixels=1, flip=True)).batches(0))
    assert torch.equal(torch.get_rng_state(), state)


@settings(deadline=None, max_examples=30)
@given(count=st.integers(1, 40), batch_size=st.integers(1, 50), epoch=st.integers(0, 3), data=st.data())
def test_start_gives_the_rest_of_the_epoch(count: int, batch_size: int, epoch: int, data: st.DataObject) -> None:
    source = numbered(count, batch_size=batch_size, seed=1)
    whole = order(source, epoch)
    assert len(whole) == len(source)
    start = data.draw(st.integers(0, len(source)))
    assert order(source, epoch, start=start) == whole[start:]


def test_start_gives_the_same_augmentation() -> None:
    inputs = torch.randn(12, 1, 4, 4)
    data = ArrayData(inputs, torch.arange(12), batch_size=5, augment=Shift(pixels=1, flip=True))
    whole = [b.inputs for b in data.batches(1)]
    rest = [b.inputs for b in data.batches(1, start=1)]
    assert all(torch.equal(a, b) for a, b in zip(whole[1:], rest, strict=True))


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("count, batch_size", [(24, 12), (29, 12), (25, 12), (12, 100), (30, 13)])
def test_ranks_take_equal_parts_of_every_batch(world: int, count: int, batch_size: int) -> None:
    """All take as many steps as the length says, share no sample if there are enough, and lose less than one each."""
    data = numbered(count, batch_size=batch_size)
    whole = order(data, 2)
    shares = [order(data, 2, rank=rank, world=world) for rank in range(world)]
    assert {len(share) for share in shares} == {len(data)}
    for number, batch in enumerate(whole):
        parts = [share[number] for share in shares]
        together = [i for part in parts for i in part]
        assert len({len(part) for part in parts}) == 1
        assert len(set(together)) == len(together) or len(batch) < world
        assert set(together) <= set(batch)
        assert len(batch) - len(together) < world


def test_ranks_start_in_the_middle_like_one_process() -> None:
    data = numbered(24, batch_size=6)
    for rank in range(2):
        assert order(data, 0, rank=rank, world=2, start=2) == order(data, 0, rank=rank, world=2)[2:]


@pytest.mark.parametrize("inputs, targets", [(3, 4), (0, 0), (4, 3)])
def test_lengths_that_do_not_fit(inputs: int, targets: int) -> None:
    with pytest.raises(ConfigError, match=f"got {inputs} and {targets}"):
        ArrayData(torch.zeros(inputs, 1), torch.zeros(targets), batch_size=2)


@pytest.mark.parametrize("batch_size", [0, -3])
def test_a_batch_size_below_one(batch_size: int) -> None:
    with pytest.raises(ConfigError, match="batch_size"):
        ArrayData(torch.zeros(4, 1), torch.zeros(4), batch_size=batch_size)


# --- augmentation ---------------------------------------------------------------------------------


def by_sample(data: ArrayData, epoch: int, **share: int) -> dict[int, Tensor]:
    found = {}
    for batch in data.batches(epoch, **share):
        assert batch.index is not None
        found |= dict(zip(batch.index.tolist(), batch.inputs, strict=True))
    return found


def test_augmentation_depends_on_the_sample_not_on_the_batch() -> None:
    inputs, targets, shift = torch.randn(20, 2, 5, 5), torch.zeros(20), Shift(pixels=2, flip=True, cutout=2)
    small, large = (ArrayData(inputs, targets, batch_size=size, seed=5, augment=shift) for size in (3, 20))
    for epoch in range(2):
        one, other = by_sample(small, epoch), by_sample(large, epoch)
        assert all(torch.equal(one[i], other[i]) for i in range(20))
        halves = by_sample(large, epoch, rank=0, world=2) | by_sample(large, epoch, rank=1, world=2)
        assert all(torch.equal(one[i], halves[i]) for i in range(20))
    first, second = by_sample(large, 0), by_sample(large, 1)
    assert sum(not torch.equal(first[i], second[i]) for i in range(20)) > 10
    changed = {i for i in range(20) if not torch.equal(first[i], inputs[i])}
    assert len(changed) > 10


@pytest.mark.parametrize("side", [1, 2, 3, 6])
def test_cutout_blanks_a_square_whose_middle_may_be_anywhere(side: int) -> None:
    size = 5
    places = [(row, column) for row in range(size) for column in range(size)]
    draws = torch.zeros(len(places), 5)
    draws[:, 3:] = (torch.tensor(places) + 0.5) / size
    blank = Shift(cutout=side)(torch.ones(len(places), 2, size, size), draws) == 0
    for image, (row, column) in zip(blank, places, strict=True):
        top, left = row - side // 2, column - side // 2
        inside = [[top <= r < top + side and left <= c < left + side for c in range(size)] for r in range(size)]
        assert image.tolist() == [inside, inside]


def test_cutout_leaves_the_other_draws_as_they_were() -> None:
    images, draws = torch.randn(8, 1, 6, 6), torch.rand(8, 5)
    shifted, cut = (Shift(pixels=2, flip=True, cutout=side)(images, draws) for side in (0, 3))
    assert torch.equal(torch.where(cut == 0, 0, shifted), cut)


def test_negative_pixels_are_refused() -> None:
    for arguments in ({"pixels": -1}, {"cutout": -2}):
        with pytest.raises(ConfigError, match="must not be negative"):
            Shift(**arguments)


def plain_shift(image: list[Any], pixels: int, flip: bool, draws: list[float]) -> list[Any]:
    """One image (channels, height, width) as nested lists: pad with zeros, cut the window out, mirror it."""
    height, width = len(image[0]), len(image[0][0])
    down = int(draws[0] * (2 * pixels + 1)) - pixels
    right = int(draws[1] * (2 * pixels + 1)) - pixels
    moved = []
    for channel in image:
        rows = []
        for y in range(height):
            row = []
            for x in range(width):
                inside = 0 <= y + down < height and 0 <= x + right < width
                row.append(channel[y + down][x + right] if inside else 0.0)
            rows.append(row[::-1] if flip and draws[2] >= 0.5 else row)
        moved.append(rows)
    return moved


@pytest.mark.parametrize("flip", [False, True])
@pytest.mark.parametrize("pixels", [0, 1, 3])
def test_shift_against_plain_python(pixels: int, flip: bool) -> None:
    generator = torch.Generator().manual_seed(pixels)
    images = torch.rand(30, 2, 4, 5, generator=generator)
    draws = torch.rand(30, 3, generator=generator)
    draws[:4] = torch.tensor([[0.0, 0.0, 0.0], [0.9999, 0.9999, 0.9999], [0.0, 0.9999, 0.5], [0.5, 0.5, 0.4999]])
    out = Shift(pixels=pixels, flip=flip)(images, draws)
    assert out.shape == images.shape
    assert out.is_contiguous()
    expected = [
        plain_shift(image, pixels, flip, draw) for image, draw in zip(images.tolist(), draws.tolist(), strict=True)
    ]
    assert torch.equal(out, torch.tensor(expected))


def test_every_shift_is_equally_likely() -> None:
    generator = torch.Generator().manual_seed(0)
    count = 9000
    images = torch.zeros(count, 1, 3, 3)
    images[:, 0, 1, 1] = 1
    out = Shift(pixels=1)(images, torch.rand(count, 3, generator=generator))
    shares = out.reshape(count, 9).mean(dim=0)
    torch.testing.assert_close(shares, torch.full((9,), 1 / 9), rtol=0, atol=0.02)


# --- a user's own loader --------------------------------------------------------------------------


def test_loader_batches_come_as_they_are() -> None:
    batches = [(torch.full((2, 1), float(i)), torch.tensor([i, i])) for i in range(4)]
    data = LoaderData(batches)
    assert len(data) == 4
    assert not data.resumable
    got = list(data.batches(0))
    assert all(isinstance(batch, Sample) and batch.index is None for batch in got)
    assert all(a.inputs is b[0] and a.targets is b[1] for a, b in zip(got, batches, strict=True))
    assert [int(b.targets[0]) for b in data.batches(5, start=2)] == [2, 3]


def test_loader_batches_may_carry_indices() -> None:
    index = torch.tensor([4, 1])
    (batch,) = LoaderData([[torch.zeros(2), torch.ones(2), index]]).batches(0)
    assert batch.index is index


def test_a_data_loader_with_a_sampler_is_told_the_epoch() -> None:
    dataset = TensorDataset(torch.arange(16.0), torch.arange(16))
    sampler: DistributedSampler[Any] = DistributedSampler(dataset, num_replicas=2, rank=1, shuffle=True, seed=3)
    data = LoaderData(DataLoader(dataset, batch_size=4, sampler=sampler))
    seen = {}
    for epoch in (1, 0, 1):
        found = [b.targets.tolist() for b in data.batches(epoch)]
        assert seen.setdefault(epoch, found) == found
        sampler.set_epoch(epoch)
        assert [i for b in found for i in b] == list(sampler)
    assert seen[0] != seen[1]
    assert [b.targets.tolist() for b in data.batches(1, start=1)] == seen[1][1:]


class Endless:
    """An iterable that does not know its length."""

    def __iter__(self) -> Iterator[Any]:
        return iter([])


def test_data_without_a_length() -> None:
    with pytest.raises(ConfigError, match="length"):
        LoaderData(Endless())


@pytest.mark.parametrize("batch", [torch.zeros(2, 3), (torch.zeros(2),), (1, 2, 3, 4), {"x": 1, "y": 2}, "ab"])
def test_a_batch_of_another_shape(batch: Any) -> None:
    with pytest.raises(ConfigError, match=r"\(inputs, targets\).*got " + type(batch).__name__):
        list(LoaderData([batch]).batches(0))


# --- data without a length ------------------------------------------------------------------------


class Numbers(IterableDataset[tuple[Tensor, Tensor]]):
    """`count` numbered samples, without a length."""

    def __init__(self, count: int):
        self.count = count

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return ((torch.tensor([float(i)]), torch.tensor(i)) for i in range(self.count))


def numbers_of(data: Any, epoch: int, start: int = 0) -> list[int]:
    return [int(sample.targets[0]) for sample in data.batches(epoch, start=start)]


def test_epochs_of_a_stream_go_on_where_the_last_one_ended() -> None:
    for loader in (DataLoader(Numbers(5), batch_size=1), [(torch.tensor([i]), torch.tensor([i])) for i in range(5)]):
        data = as_training_data(loader, 3)
        assert (len(data), data.resumable) == (3, False)
        assert [numbers_of(data, epoch) for epoch in range(4)] == [[0, 1, 2], [3, 4, 0], [1, 2, 3], [4, 0, 1]]
        for epoch, start, expected in ((2, 1, [2, 3]), (1, 0, [3, 4, 0]), (3, 2, [1])):
            assert numbers_of(as_training_data(loader, 3), epoch, start) == expected  # of a run that resumes there
            assert numbers_of(data, epoch, start) == expected


def test_data_whose_length_is_not_known_or_not_wanted() -> None:
    with pytest.raises(ConfigError, match=r"needs a length .* TrainConfig\(steps_per_epoch=1000\) says it"):
        as_training_data(DataLoader(Numbers(5)), None)
    with pytest.raises(ConfigError, match="steps_per_epoch=3: ArrayData has a length of its own"):
        as_training_data(ArrayData(torch.zeros(4, 1), torch.zeros(4), batch_size=2), 3)
    with pytest.raises(ConfigError, match="steps_per_epoch=0"):
        TrainConfig(steps_per_epoch=0)


def test_a_generator_has_to_last() -> None:
    def pairs() -> Iterator[Any]:
        return ((torch.tensor([i]), torch.tensor([i])) for i in range(4))

    data = as_training_data(pairs(), 2)
    assert [numbers_of(data, 0), numbers_of(data, 1)] == [[0, 1], [2, 3]]
    with pytest.raises(TrainingError, match="the data ended after 4 batches, and gave none when it was begun again"):
        numbers_of(data, 2)
    with pytest.raises(TrainingError, match="ended after 0 batches"):
        numbers_of(as_training_data(DataLoader(Numbers(0)), 1), 0)


def test_a_stream_trains_and_resumes(make_model: Any, make_data: Any, tmp_path: Path) -> None:
    """As the same batches in a list do."""
    batches = [(b.inputs, b.targets) for b in make_data(samples=40, batch_size=8).batches(0)]

    class Stream:
        def __init__(self, fail_at: int = 100):
            self.fail_at = fail_at

        def __iter__(self) -> Iterator[Any]:
            for number, batch in enumerate(batches):
                if number == self.fail_at:
                    raise OSError("gone")
                yield batch

    config = TrainConfig(epochs=2, steps_per_epoch=4, checkpoint_every=1, distill="in_place")
    whole, listed, model = make_model(), make_model(), make_model()
    train(whole, Stream(), config, progress=False)
    train(listed, [*batches, *batches[:3]], dataclasses.replace(config, epochs=1, steps_per_epoch=None), progress=False)
    with pytest.raises(OSError, match="gone"):
        train(model, Stream(fail_at=2), config, checkpoint=tmp_path / "c", progress=False)
    train(model, Stream(), config, checkpoint=tmp_path / "c", progress=False)
    for other in (model, listed):
        assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), other.parameters(), strict=True))
