from pathlib import Path

import pytest
import torch

from bitdial.calibrate.checkpoint import Checkpoint
from bitdial.calibrate.config import CalibrateConfig
from bitdial.calibrate.report import BlockReport
from bitdial.errors import CheckpointError

from .conftest import images, mobile, prepared


def test_a_file_goes_with_one_model_its_batches_and_settings(tmp_path: Path) -> None:
    path, x, config = tmp_path / "c.ckpt", images(4), CalibrateConfig(importance={8: 2}, scale_importance={8: 0.3})
    model = prepared(mobile())
    file = Checkpoint(path, model, config, [x])
    assert file.read() == []
    report = BlockReport(name="a", layers=("b",), error={8: 0.5})
    with torch.no_grad():
        model.get_submodule("head").weight.add_(1)
    file.write([report.to_dict()])
    again = prepared(mobile())
    assert Checkpoint(path, again, config, [x]).read() == [report]
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in model.state_dict().items())
    for other, what in (
        (Checkpoint(path, model, config, [x]), "another model"),
        (Checkpoint(path, prepared(mobile()), config, [x + 1]), "another inputs"),
        (Checkpoint(path, prepared(mobile()), CalibrateConfig(seed=1), [x]), "another config"),
    ):
        with pytest.raises(CheckpointError, match=what):
            other.read()
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(CheckpointError, match=r"c\.ckpt"):
        Checkpoint(path, prepared(mobile()), config, [x]).read()


def test_without_a_path_nothing_is_written(tmp_path: Path) -> None:
    file = Checkpoint(None, prepared(mobile()), CalibrateConfig(), [images(4)])
    file.write([])
    assert file.read() == []
