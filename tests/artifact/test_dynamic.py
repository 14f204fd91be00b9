"""Clip ratios in the file: what is stored, and what is refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from bitdial import Rule, load_trainable, read_artifact, save
from bitdial.artifact import sizes
from bitdial.errors import ArtifactError
from bitdial.nn import QuantLayer

OpenFile = Callable[[Path], Any]
DYNAMIC: dict[str, Any] = {"rules": (Rule(type="Linear", activations="dynamic"),)}


def test_manifest_and_tensors(saved: Callable[..., Path], open_file: OpenFile, small: Any) -> None:
    path = saved(**DYNAMIC)
    file = open_file(path)
    kinds = {name: entry["activations"] for name, entry in file.manifest["layers"].items()}
    assert kinds == {"conv": "unsigned", "depth": "unsigned", "left": "dynamic", "right": "dynamic"}
    for name in ("left", "right"):  # one weight, a ratio each
        ratios = file.tensors[f"{name}/act_clip_ratio"]
        assert ratios.dtype == np.float32
        assert ratios.tolist() == [1.0, 1.0, np.float32(0.9), np.float32(0.9)]
        assert f"{name}/act_scale" not in file.tensors
    assert file.manifest["report"]["dynamic_layers"] == ["left", "right"]
    static, dynamic = sizes(read_artifact(saved())), sizes(read_artifact(saved(**DYNAMIC)))
    assert static["scales"] == dynamic["scales"]
    assert static["separate"] == dynamic["separate"]
    again = {n: m for n, m in load_trainable(path, small()).named_modules() if isinstance(m, QuantLayer)}
    quantizer = again["left"].act_quantizer
    assert quantizer is not None
    assert quantizer.kind == "dynamic"
    assert [float(quantizer.scales[b].detach()) for b in ("8", "2")] == [1.0, pytest.approx(0.9)]


def ratio(value: float) -> Callable[[Any], None]:
    def change(file: Any) -> None:
        file.tensors["left/act_clip_ratio"][2] = value

    return change


def tensor(name: str, value: np.ndarray | None) -> Callable[[Any], None]:
    def change(file: Any) -> None:
        file.tensors.pop(name, None)
        if value is not None:
            file.tensors[name] = value

    return change


def kind(name: str, value: str) -> Callable[[Any], None]:
    return lambda file: file.manifest["layers"][name].update(activations=value)


def version_1(file: Any) -> None:
    file.manifest["version"] = 1
    del file.manifest["graph"], file.manifest["report"]
    for entry in file.manifest["layers"].values():
        del entry["group_size"]


def conv_too(file: Any) -> None:
    kind("conv", "dynamic")(file)
    file.tensors["conv/act_clip_ratio"] = file.tensors.pop("conv/act_scale") * 0 + 1


RANGE = r"'left/act_clip_ratio' has ratios that are not from 0.0009765625 to 1"
WRONG: dict[str, tuple[Callable[[Any], None], str]] = {
    "nan": (ratio(float("nan")), "'left/act_clip_ratio' holds NaN or infinity"),
    "infinite": (ratio(float("inf")), "'left/act_clip_ratio' holds NaN or infinity"),
    "zero": (ratio(0.0), RANGE),
    "negative": (ratio(-0.5), RANGE),
    "tiny": (ratio(9e-4), RANGE),
    "large": (ratio(1.0000001), RANGE),
    "missing": (tensor("left/act_clip_ratio", None), "'left/act_clip_ratio' is missing"),
    "too few": (tensor("left/act_clip_ratio", np.ones(3, np.float32)), r"expected torch.float32 of shape \(4,\)"),
    "a number": (tensor("left/act_clip_ratio", np.array(1.0, np.float32)), r"expected torch.float32 of shape \(4,\)"),
    "double": (tensor("left/act_clip_ratio", np.ones(4)), r"torch.float64 .*expected torch.float32"),
    "a scale too": (tensor("left/act_scale", np.ones(4, np.float32)), "'left/act_scale' belongs to nothing"),
    "of a static layer": (kind("left", "signed"), "'left/act_scale' is missing"),
    "of a float layer": (kind("left", "float"), "'left/act_clip_ratio' belongs to nothing"),
    "a convolution": (conv_too, "layer 'conv': the input of a Conv2d has no tokens"),
    "another word": (kind("left", "Dynamic"), "activations 'Dynamic' are not known"),
    "version 1": (version_1, "layer 'left': version 1 has .* and no 'group_size', 'fixed_bits' or dynamic"),
    "the report": (
        lambda file: file.manifest["report"].update(dynamic_layers=[3]), "the report's dynamic_layers holds '3'"),
}  # fmt: skip


def test_damaged_files_are_refused(saved: Callable[..., Path], open_file: OpenFile) -> None:
    for change, match in WRONG.values():
        path = saved(**DYNAMIC)
        file = open_file(path)
        change(file)
        with pytest.raises(ArtifactError, match=match):
            read_artifact(file.write(path))


def test_groups_need_whole_multipliers(saved: Callable[..., Path], open_file: OpenFile) -> None:
    path = saved(group_size=2, **DYNAMIC)
    assert read_artifact(path).group_scale("left") is not None
    file = open_file(path)
    file.tensors["left/weight_scale"] = np.ones((1, 6, 3), np.float32)
    del file.tensors["left/group_scale"]
    with pytest.raises(ArtifactError, match=r"layer 'left': its activations are quantised.*whole multipliers"):
        read_artifact(file.write(path))


def test_a_ratio_that_is_no_number_is_not_written(tmp_path: Path, prepared: Callable[..., nn.Module]) -> None:
    model: Any = prepared(**DYNAMIC)
    for value in (float("nan"), float("inf"), 0.0, -1.0):
        with torch.no_grad():
            model.left.act_quantizer.scales["4"].fill_(value)
        with pytest.raises(ArtifactError, match=r"layer 'left': act_quantizer\.scales\.4 is not positive"):
            save(model, tmp_path / "m")
