"""Adding to a file: the rest stays as it was, what does not fit is refused, and a failure changes nothing."""

import os
from pathlib import Path

import pytest
import torch
from torch import nn

import bitdial
from bitdial.artifact import amend
from bitdial.errors import ArtifactError, PlanError
from bitdial.sensitivity.result import LayerSensitivity, Sensitivity


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 3, 3)
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.head = nn.Linear(36, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.conv(self.stem(x).relu())).relu().flatten(1))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    model = bitdial.prepare(Net(), bitdial.QuantConfig(bit_choices=(4, 2)), torch.rand(4, 1, 5, 5))
    path = tmp_path / "file.safetensors"
    bitdial.save(model, path, plans={"old": bitdial.BitPlan(default=4)}, metrics={"recipe": "mine", "top1": 0.5})
    return path


def sensitivity(parameters: int = 108) -> Sensitivity:
    entry = LayerSensitivity(trace=1.5, error=0.25, parameters=parameters, samples=16)
    return Sensitivity(layers={"conv": entry}, images=11)


def test_what_is_added_is_there_and_the_rest_is_as_it_was(file: Path) -> None:
    before = bitdial.read_artifact(file)
    new = bitdial.BitPlan({"conv": (2, 4)})
    digest = amend(file, plans={"new": new}, metrics={"top1": 0.75, "front": [1]}, sensitivity=sensitivity())
    after = bitdial.read_artifact(file)
    assert after.digest == digest != before.digest
    assert after.plans == {"old": bitdial.BitPlan(default=4), "new": new}
    assert after.metrics == {"recipe": "mine", "top1": 0.75, "front": [1]}
    assert after.sensitivity == sensitivity()
    assert after.tensors.keys() == before.tensors.keys()
    assert all(torch.equal(after.tensors[name], tensor) for name, tensor in before.tensors.items())
    changed = ("plans", "metrics", "sensitivity")
    assert {k: v for k, v in after.manifest.items() if k not in changed} == {
        k: v for k, v in before.manifest.items() if k not in changed
    }
    live = bitdial.load(file, Net())
    bitdial.set_bits(live, "new")
    assert bitdial.get_bits(live) == new


def test_plans_are_replaced_and_taken_out_and_nothing_is_lost_without_arguments(file: Path) -> None:
    amend(file, plans={"old": bitdial.BitPlan(default=2), "other": bitdial.BitPlan(default=4)})
    amend(file, sensitivity=sensitivity())
    assert bitdial.read_artifact(file).plans == {"old": bitdial.BitPlan(default=2), "other": bitdial.BitPlan(default=4)}
    amend(file, plans={"old": None, "never there": None})
    assert list(bitdial.read_artifact(file).plans) == ["other"]
    assert bitdial.read_artifact(file).sensitivity == sensitivity()


def test_what_belongs_to_another_model_is_refused(file: Path) -> None:
    before = file.read_bytes()
    for plan, words in (
        (bitdial.BitPlan({"conv": 4, "fc": 4}), "plan 'x' is not one for the model .* names 'fc'"),
        (bitdial.BitPlan({"conv": 3}), "bits=3 is not in bit_choices"),
    ):
        with pytest.raises(PlanError, match=words):
            amend(file, plans={"x": plan})
    with pytest.raises(ArtifactError, match="plans is a list"):
        amend(file, plans=[bitdial.BitPlan(default=4)])  # type: ignore[arg-type]
    with pytest.raises(ArtifactError, match="53 weights, but it has 108"):
        amend(file, sensitivity=sensitivity(53))
    with pytest.raises(ArtifactError, match="cannot write"):
        amend(file, metrics={"top1": float("nan")})
    assert file.read_bytes() == before


def test_a_failed_write_leaves_the_old_file(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = file.read_bytes()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(ArtifactError, match="No space left"):
        amend(file, metrics={"more": 1})
    assert file.read_bytes() == before
    assert list(file.parent.iterdir()) == [file]
