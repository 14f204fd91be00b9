"""The report of `prepare`: as data, as a table, in the file, and that its numbers are those of the file."""

from __future__ import annotations

import copy
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bitdial import (
    QuantConfig,
    Rule,
    add_transitions,
    build_model,
    code_exact,
    describe,
    load,
    load_trainable,
    prepare,
    read_artifact,
    save,
)
from bitdial.artifact import sizes
from bitdial.errors import ArtifactError, ConfigError
from bitdial.files.container import read_container, write_container
from bitdial.planning.cost import measure_costs
from bitdial.prepare.report import FloatLayer, ModelReport

IMAGES = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))


class Odd(nn.Module):
    """Two matrices of its own, in a class that bitdial does not know."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = (nn.Parameter(torch.randn(8, 8)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.one) @ self.two


class Net(nn.Module):
    """Something of everything: tied and unknown layers, a norm with sets and one without."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.a = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 8, 3, bias=False)
        self.norm, self.alone = nn.BatchNorm2d(8), nn.BatchNorm2d(3)
        self.left, self.right, self.kept = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.right.weight = self.left.weight
        self.odd, self.head = Odd(), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.norm(self.a(torch.relu(self.stem(x))))).flatten(2).transpose(1, 2)
        y = self.kept(self.right(self.left(y)))
        return self.head(self.odd(y)[:, -1]) + self.alone(x).sum()


def config(**settings: Any) -> QuantConfig:
    rules = (Rule(pattern="kept", quantize=False),)
    return QuantConfig(**{"bit_choices": (6, 4, 2), "start": "lsq", "rules": rules, **settings})


def made(**settings: Any) -> nn.Module:
    torch.manual_seed(0)
    return prepare(Net(), config(**settings), IMAGES)


def test_a_report_says_what_was_done(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "bitdial"):
        report = describe(made())
    stem, a, square, odd, head = 3 * 4 * 9, 4 * 8 * 9, 64, 128, 24
    assert (report.quantised_weights, report.weights) == (a + square, stem + a + 2 * square + odd + head)
    pixels = {"stem": 36, "a": 16}
    total = 2 * (pixels["stem"] * stem + pixels["a"] * (a + 3 * square + odd) + head)
    assert (report.quantised_multiply_adds, report.multiply_adds) == (2 * pixels["a"] * (a + 2 * square), total)
    assert report.quantised_layers == ("a", "left", "right")
    assert (report.first_layers, report.last_layers, report.ends_by_order) == (("stem",), ("head",), ())
    assert {layer.name: layer.type for layer in report.float_layers} == {
        "stem": "Conv2d", "kept": "Linear", "odd": "Odd", "head": "Linear"
    }  # fmt: skip
    assert FloatLayer("kept", "Linear", 64, "is kept by Rule(pattern='kept', quantize=False)") in report.float_layers
    assert report.switched_norms == ("norm",)
    assert list(report.kept_norms) == ["alone"]
    assert report.float_bytes == sum(
        v.nbytes for v in {id(v): v for v in Net().state_dict(keep_vars=True).values()}.values()
    )
    said = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert tuple(said) == report.warnings
    assert len(said) == 2
    (summary,) = [r.getMessage() for r in caplog.records if r.levelno == logging.INFO]
    assert summary == report.summary()
    assert summary.startswith("52.1% of the weights and")


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"activations": "asymmetric"},
        {"scheme": "lsq"},
        {"scheme": "dorefa"},
        {"group_size": 2},
        {"bit_choices": (8, 3)},
    ],
    ids=str,
)
def test_its_sizes_are_those_of_the_file(tmp_path: Path, settings: dict[str, Any]) -> None:
    for transitions in (None, "full", "statistics"):
        model = made(**settings)
        if transitions is not None:
            model = add_transitions(model, transitions)
        save(model, tmp_path / "m")
        found, report = sizes(read_artifact(tmp_path / "m")), describe(model)
        assert report.file_bytes == found["tensors"], transitions
        assert report.width_bytes == found["separate"], transitions
    costs = measure_costs(made(**settings), IMAGES)
    assert describe(made(**settings)).width_bytes == {bits: costs.of(bits)["bytes"] for bits in model.a.bit_choices}


def test_a_report_is_plain_data_and_a_table() -> None:
    report = describe(made())
    again = ModelReport.from_dict(json.loads(json.dumps(report.to_dict())))
    assert again == report
    assert str(again) == str(report)
    lines = str(report).splitlines()
    assert lines[0] == "weights        352 of 676 (52.1%) quantised, in 3 layers"
    row = next(line for line in lines if line.startswith("odd"))
    assert row.split()[:3] == ["odd", "128", "18.9%"]
    assert "is of type Odd, which bitdial does not know" in row
    assert any(line.split()[:3] == ["alone", "no", "quantised"] for line in lines)
    assert sum(line.startswith("warning: ") for line in lines) == 2
    assert all(f"{size:,} at {bits} bits" in str(report) for bits, size in report.width_bytes.items())


def test_a_file_has_it_and_whatever_is_loaded_from_it(tmp_path: Path) -> None:
    model = made()
    digest = save(model, tmp_path / "m")
    report = describe(model)
    live = load(tmp_path / "m", Net())
    for one in (live, load(tmp_path / "m", Net(), kernels="integer"), code_exact(live), read_artifact(tmp_path / "m")):
        assert describe(one) == report
    trainable = load_trainable(tmp_path / "m", Net())
    assert describe(trainable) == report
    assert save(trainable, tmp_path / "again") == digest
    for other in (Net(), nn.Linear(2, 2)):
        with pytest.raises(ConfigError, match="there is no report"):
            describe(other)


def test_files_without_a_report_load(tmp_path: Path) -> None:
    save(made(), tmp_path / "m")
    tensors, manifest, _ = read_container(tmp_path / "m", error=ArtifactError)
    del manifest["report"]
    write_container(tmp_path / "m", tensors, manifest, error=ArtifactError)
    with pytest.raises(ConfigError, match="files that an earlier bitdial wrote have none"):
        describe(load(tmp_path / "m", Net()))


def test_reports_that_are_not_what_they_should_be_are_refused(tmp_path: Path) -> None:
    save(made(), tmp_path / "m")
    tensors, manifest, _ = read_container(tmp_path / "m", error=ArtifactError)
    for key, value in (
        ("weights", -1),
        ("weights", True),
        ("weights", 1.5),
        ("multiply_adds", 1 << 63),
        ("first_layers", "conv"),
        ("first_layers", ["\x1b[2J"]),
        ("last_layers", [3]),
        ("warnings", ["x" * 5_000]),
        ("warnings", ["x"] * 100_001),
        ("float_layers", [{"name": "a"}]),
        ("float_layers", [{"name": "a", "type": "b", "weights": "c", "reason": "d"}]),
        ("float_layers", {}),
        ("kept_norms", {"a": None}),
        ("kept_norms", []),
        ("width_bytes", {"9": 1}),
        ("width_bytes", {"8": -1}),
        ("more", 1),
    ):
        odd = copy.deepcopy(manifest)
        odd["report"][key] = value
        write_container(tmp_path / "odd", tensors, odd, error=ArtifactError)
        with pytest.raises(ArtifactError, match="report"):
            read_artifact(tmp_path / "odd")


def test_a_long_list_is_cut_in_the_table() -> None:
    report = describe(made())
    many = tuple(FloatLayer(f"layer{i}", "RNN", i, "is odd") for i in range(25))
    text = str(ModelReport.from_dict({**report.to_dict(), "float_layers": [vars(layer) for layer in many]}))
    assert "and 5 more" in text
    assert "layer24" in text
    assert "layer4 " not in text


def test_ready_made_models_are_quantised_nearly_whole() -> None:
    report = describe(prepare(build_model("resnet20"), QuantConfig(start="lsq"), torch.randn(1, 3, 32, 32)))
    assert report.quantised_share > 0.99
    assert report.quantised_multiply_add_share > 0.98
    assert not report.warnings


def test_it_says_which_layers_have_a_width_of_their_own(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "bitdial"):
        model = made(keep_first_last=6, rules=(Rule(pattern="left", bits=2), Rule(pattern="kept", quantize=False)))
    report = describe(model)
    assert report.fixed_bits == {"stem": 6, "left": 2, "right": 2, "head": 6}  # left and right share a weight
    assert "fixed widths   2 layers at 6 bits and 2 layers at 2 bits: stem, left, right, head" in str(report)
    assert "are quantised; 2 layers at 6 bits and 2 layers at 2 bits; first layers stem" in report.summary()
    assert report.summary() in caplog.text
    assert ModelReport.from_dict(json.loads(json.dumps(report.to_dict()))) == report
    save(model, tmp_path / "m")
    assert describe(load(tmp_path / "m", Net())) == report
    assert report.width_bytes == sizes(read_artifact(tmp_path / "m"))["separate"]
    assert "fixed" not in str(describe(made()))
    assert "fixed_bits" not in describe(made()).to_dict()
