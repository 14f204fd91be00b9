"""Rows of tokens: each once a pass, decided by the seed and the step alone, in shares that make up the batch."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from bitdial.errors import ConfigError
from bitdial.train.tokens import TokenData, rows_in

STREAM = np.arange(101, dtype=np.int32)  # ten rows of ten, each number its own place
OTHER = np.arange(1000, 1035, dtype=np.int64)  # three rows, and four tokens that are left


def data(**changes: Any) -> TokenData:
    settings = {"length": 10, "batch_size": 4, "seed": 3, "steps": 2} | changes
    return TokenData([STREAM, OTHER], **settings)


def all_rows(source: TokenData, epochs: int) -> Tensor:
    return torch.cat([batch.inputs for epoch in range(epochs) for batch in source.batches(epoch)])  # type: ignore[misc]


def test_rows_lie_where_they_should() -> None:
    starts = sorted(all_rows(data(batch_size=13, steps=1), 1)[:, 0].tolist())
    assert starts == [*range(0, 100, 10), 1000, 1010, 1020]
    for batch in data().batches(0):
        assert isinstance(batch.inputs, Tensor)
        assert batch.inputs.dtype == torch.int64
        assert torch.equal(batch.inputs + 1, batch.targets), "the token behind each"
        assert torch.equal(batch.inputs[:, :1] + torch.arange(10), batch.inputs)


@pytest.mark.parametrize(("tokens", "rows"), [(0, 0), (10, 0), (11, 1), (20, 1), (21, 2)])
def test_a_row_needs_the_token_behind_it(tokens: int, rows: int) -> None:
    assert rows_in(tokens, 10) == rows


def test_a_pass_has_each_row_once_and_the_next_another_order() -> None:
    """Batches of 4 do not divide 13 rows: a pass begins within a batch."""
    starts = all_rows(data(), 4)[:, 0].tolist()  # 32 rows
    first, second = starts[:13], starts[13:26]
    assert sorted(first) == sorted(second) == [*range(0, 100, 10), 1000, 1010, 1020]
    assert first != second
    assert first != sorted(first)
    assert all_rows(data(seed=4), 4)[:, 0].tolist() != starts


def test_the_order_does_not_depend_on_epochs_or_on_where_it_begins() -> None:
    whole = all_rows(data(), 4)
    assert torch.equal(all_rows(data(steps=4), 2), whole)
    fresh = data()
    later = [batch.inputs for batch in fresh.batches(2, start=1)] + [batch.inputs for batch in fresh.batches(3)]
    assert torch.equal(torch.cat(later), whole[5 * 4 :])  # type: ignore[arg-type]
    assert len(data(steps=None)) == 4, "one pass, rounded up"


def test_shares_of_ranks_make_up_the_batch() -> None:
    for whole, one, two in zip(data().batches(1), *(data().batches(1, rank=r, world=2) for r in (0, 1)), strict=True):
        assert isinstance(one.inputs, Tensor)
        assert isinstance(two.inputs, Tensor)
        assert torch.equal(torch.cat([one.inputs, two.inputs]), whole.inputs)  # type: ignore[arg-type]
        assert torch.equal(torch.cat([one.targets, two.targets]), whole.targets)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"length": 200}, "136 tokens are less than one row of length 200"),
        ({"length": 0}, "length=0 must be a whole number"),
        ({"batch_size": True}, "batch_size=True must be"),
        ({"steps": 0}, "steps=0 must be"),
    ],
)
def test_what_cannot_be(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        data(**changes)


def test_a_stream_is_one_row_of_whole_numbers() -> None:
    for wrong in (np.zeros((3, 4), dtype=np.int32), np.zeros(30), "text", [1, 2]):
        with pytest.raises(ConfigError, match="one-dimensional"):
            TokenData(wrong, length=2, batch_size=1)  # type: ignore[arg-type]
