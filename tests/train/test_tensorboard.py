"""The callback for TensorBoard: what it writes, and what it says where that is not installed."""

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from torch import nn

from bitdial.errors import ConfigError, MissingDependencyError
from bitdial.train import ArrayData, TensorBoard, TrainConfig, train

MakeModel = Callable[..., nn.Module]
MakeData = Callable[..., ArrayData]


class Writer:
    """Stands for torch's SummaryWriter."""

    made: list["Writer"] = []  # noqa: RUF012

    def __init__(self, folder: str, purge_step: int):
        self.folder, self.purge_step, self.calls = folder, purge_step, []
        self.made.append(self)

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.calls.append((name, float(value), step))

    def flush(self) -> None:
        self.calls.append("flush")

    def close(self) -> None:
        self.calls.append("close")


def test_what_is_written(
    make_model: MakeModel, make_data: MakeData, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    module: Any = ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = Writer
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    monkeypatch.setattr(Writer, "made", [])
    config = TrainConfig(epochs=2)
    history = train(
        make_model(), make_data(), config, callbacks=[TensorBoard(tmp_path, every=2)], checkpoint=tmp_path / "c",
        progress=False,
    )  # fmt: skip
    (writer,) = Writer.made
    assert (writer.folder, writer.purge_step) == (str(tmp_path), 1)
    calls: list[Any] = writer.calls
    assert [step for name, _, step in (c for c in calls if len(c) == 3) if name == "loss/2 bits"] == [2, 4, 6]
    assert ("epoch loss/4 bits", history.rows[0]["loss"]["4"], 3) in calls
    assert ("epoch train_top1/8 bits", history.rows[1]["train_top1"]["8"], 6) in calls
    assert calls.count("flush") == 2
    assert calls[-1] == "close"
    train(make_model(), make_data(), config, callbacks=[TensorBoard(tmp_path)], checkpoint=tmp_path / "c",
          progress=False)  # fmt: skip
    assert Writer.made[-1].purge_step == 7  # of a run that goes on, what lies beyond the checkpoint is hidden


def test_without_tensorboard(
    make_model: MakeModel, make_data: MakeData, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'bitdial\[tensorboard\]'"):
        train(make_model(), make_data(), TrainConfig(epochs=1), callbacks=[TensorBoard(tmp_path)], progress=False)
    with pytest.raises(ConfigError, match="every=0"):
        TensorBoard(tmp_path, every=0)


@pytest.mark.skipif(importlib.util.find_spec("tensorboard") is None, reason="tensorboard is not installed")
def test_the_real_one(make_model: MakeModel, make_data: MakeData, tmp_path: Path) -> None:
    train(make_model(), make_data(), TrainConfig(epochs=1), callbacks=[TensorBoard(tmp_path, every=1)], progress=False)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("events.out.tfevents")]
