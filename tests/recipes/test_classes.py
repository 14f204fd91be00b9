"""Right answers and agreement, counted."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from bitdial import ImageBatches, ImageSettings
from bitdial.errors import ConfigError, QuantizationError
from bitdial.recipes.classes import Judged, Predicted, judge, predict

Image = pytest.importorskip("PIL.Image")
SMALL = ImageSettings(resize=None, crop=4, mean=(0, 0, 0), std=(1, 1, 1))


class Brightest(nn.Module):
    """Answers with the channel that is brightest."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert not self.training
        return x.mean((2, 3))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Four images, by name of the classes 0, 1, 2, 0."""
    for number, channel in enumerate((0, 1, 2, 0)):
        values = np.zeros((4, 4, 3), np.uint8)
        values[:, :, channel] = 200
        (tmp_path / str(channel)).mkdir(exist_ok=True)
        Image.fromarray(values).save(tmp_path / str(channel) / f"{number}.png")
    (tmp_path / "labels.json").write_text(json.dumps({"0.png": 0, "1.png": 1, "2.png": 0, "3.png": 0}))
    return tmp_path


def test_answers_are_counted(folder: Path) -> None:
    images = ImageBatches(folder, SMALL, batch_size=3, labels=folder / "labels.json")
    assert images.names == ["0/0.png", "0/3.png", "1/1.png", "2/2.png"]
    model = Brightest().train()
    found = predict(model, images)
    assert model.training
    assert (found.classes.tolist(), found.outputs) == ([0, 0, 1, 2], 3)
    other = Predicted(torch.tensor([0, 1, 2, 2]), 3)
    assert judge(found, images, other) == Judged(top1=0.75, agreement=0.5)
    assert judge(found, images, None) == Judged(top1=0.75, agreement=None)
    assert judge(found, ImageBatches(folder, SMALL), other) == Judged(top1=None, agreement=0.5)
    assert judge(found, ImageBatches(folder, SMALL, labels="folders"), found) == Judged(top1=1.0, agreement=1.0)


def test_labels_that_cannot_be_the_models_are_refused(folder: Path) -> None:
    tree = ImageBatches(folder, SMALL, labels="folders")
    with pytest.raises(ConfigError, match="has 3 folders and the model 1000 classes, so their order says nothing"):
        judge(Predicted(torch.zeros(4), 1000), tree, None)
    listed = ImageBatches(folder, SMALL, labels=folder / "labels.json")
    with pytest.raises(ConfigError, match=r"labels\.json: 1/1\.png is of class 1, and the model has classes 0 to 0"):
        judge(Predicted(torch.zeros(4), 1), listed, None)


def test_what_is_no_classifier_is_refused(folder: Path) -> None:
    images = ImageBatches(folder, SMALL)
    with pytest.raises(ConfigError, match=r"the model gives \(4, 3, 4, 4\) for 4 images"):
        predict(nn.Identity(), images)

    class Broken(Brightest):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) / 0

    with pytest.raises(QuantizationError, match="holds NaN or infinity"):
        predict(Broken(), images)
