"""Ctrl-C saves as SIGTERM does; a second one ends at once."""

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from bitdial.errors import CheckpointError
from bitdial.files.container import read_container
from bitdial.train import ArrayData, TrainConfig, train
from bitdial.train.data import Sample

MakeModel = Callable[..., nn.Module]
MakeData = Callable[..., ArrayData]


class InterruptingData:
    """Ctrl-C, `times` times, just before batch number `at` of the whole run."""

    resumable = True

    def __init__(self, data: ArrayData, at: int, times: int = 1):
        self.data, self.at, self.times, self.samples = data, at, times, data.samples

    def __len__(self) -> int:
        return len(self.data)

    def batches(self, epoch: int, *, start: int = 0, rank: int = 0, world: int = 1) -> Iterator[Sample]:
        for number, batch in enumerate(self.data.batches(epoch, start=start), start=start):
            if epoch * len(self) + number == self.at:
                for _ in range(self.times):
                    os.kill(os.getpid(), signal.SIGINT)
            yield batch


def test_interrupted_at_any_step(make_model: MakeModel, make_data: MakeData, tmp_path: Path) -> None:
    config, whole = TrainConfig(epochs=2), make_model()
    expected = train(whole, make_data(), config, progress=False)
    for at in range(5):
        path, model = tmp_path / str(at), make_model()
        with pytest.raises(KeyboardInterrupt, match=f"stopped by Ctrl-C after step {at + 1}; run again to go on from"):
            train(model, InterruptingData(make_data(), at), config, checkpoint=path, progress=False)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        assert read_container(path, error=CheckpointError)[1]["step"] == at + 1
        history = train(model, make_data(), config, checkpoint=path, progress=False)
        assert [row["loss"] for row in history.rows] == [row["loss"] for row in expected.rows]
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), whole.parameters(), strict=True))
    with pytest.raises(KeyboardInterrupt, match="after step 2; nothing was saved"):
        train(make_model(), InterruptingData(make_data(), 1), config, progress=False)


def test_twice_ends_at_once(make_model: MakeModel, make_data: MakeData, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt) as caught:
        train(
            make_model(), InterruptingData(make_data(), 1, times=2), TrainConfig(epochs=1), checkpoint=tmp_path / "c",
            progress=False,
        )  # fmt: skip
    assert str(caught.value) == ""
    assert not (tmp_path / "c").exists()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_handler_of_ones_own_stays_in_charge(make_model: MakeModel, make_data: MakeData) -> None:
    calls: list[Any] = []
    before = signal.signal(signal.SIGINT, lambda *what: calls.append(what))
    try:
        mine = signal.getsignal(signal.SIGINT)
        history = train(make_model(), InterruptingData(make_data(), 1), TrainConfig(epochs=1), progress=False)
        assert signal.getsignal(signal.SIGINT) is mine
    finally:
        signal.signal(signal.SIGINT, before)
    assert len(calls) == 1
    assert len(history.rows) == 1
