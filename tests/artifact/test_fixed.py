"""The key `fixed_bits` of a layer in the file: there only where it is needed, and checked like all else."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from bitdial import Rule, load, load_trainable, read_artifact
from bitdial.artifact import amend
from bitdial.dial.plan import BitPlan
from bitdial.errors import ArtifactError

OpenFile = Callable[[Path], Any]
RULES = (Rule(pattern="conv", bits=6), Rule(pattern="left", bits=2))


def refused(path: Path, match: str) -> None:
    with pytest.raises(ArtifactError, match=match):
        read_artifact(path)


def test_the_key_is_there_for_such_layers_only(
    saved: Callable[..., Path], open_file: OpenFile, small: Callable[..., nn.Module]
) -> None:
    plain = open_file(saved())
    assert not any("fixed_bits" in entry for entry in plain.manifest["layers"].values())
    assert "fixed_bits" not in plain.manifest["report"]
    path = saved(rules=RULES, plans={"low": BitPlan(default=2)})
    file, expected = open_file(path), {"conv": 6, "left": 2, "right": 2}  # left and right share a weight
    assert file.manifest["version"] == 2
    found = {n: entry["fixed_bits"] for n, entry in file.manifest["layers"].items() if "fixed_bits" in entry}
    assert found == expected == read_artifact(path).fixed_bits == file.manifest["report"]["fixed_bits"]
    assert file.tensors.keys() == plain.tensors.keys()
    amend(path, plans={"more": BitPlan({"conv": 2}, default=4)})
    assert read_artifact(path).fixed_bits == expected
    for model in (load(path, small()), load_trainable(path, small())):
        widths = {name: model.get_submodule(name).fixed_bits for name in ("conv", "depth", "left", "right")}
        assert widths == expected | {"depth": None}


def test_files_without_the_key_load(saved: Callable[..., Path], small: Callable[..., nn.Module]) -> None:
    path = saved()
    assert read_artifact(path).fixed_bits == {}
    assert load(path, small()).conv.fixed_bits is None


def test_wrong_widths_are_refused(saved: Callable[..., Path], open_file: OpenFile) -> None:
    file, path = open_file(saved(rules=RULES)), saved()
    wrong: list[tuple[str, Any, str]] = [
        ("conv", 5, r"layer 'conv': fixed_bits=5 is not one of the file's widths \(8, 6, 4, 2\)"),
        ("conv", 0, "fixed_bits=0 is not one"),
        ("conv", -8, "fixed_bits=-8 is not one"),
        ("conv", 10**30, "is not one of the file's widths"),
        ("conv", True, "fixed_bits is True, which is not of the right type"),
        ("conv", None, "fixed_bits is None, which is not of the right type"),
        ("conv", "6", "which is not of the right type"),
        ("conv", 6.0, "which is not of the right type"),
        ("conv", [6], "which is not of the right type"),
        ("left", 4, "layer 'right': fixed_bits is 2, and 4 for 'left', which it is tied to"),
    ]
    for name, value, message in wrong:
        before = file.manifest["layers"][name]["fixed_bits"]
        file.manifest["layers"][name]["fixed_bits"] = value
        refused(file.write(path), message)
        file.manifest["layers"][name]["fixed_bits"] = before
    del file.manifest["layers"]["right"]["fixed_bits"]
    refused(file.write(path), "fixed_bits is None, and 2 for 'left'")


def test_wrong_words_of_the_report_are_refused(saved: Callable[..., Path], open_file: OpenFile) -> None:
    file, path = open_file(saved(rules=RULES)), saved()
    for value in ([], {"conv": True}, {"conv": "6"}, {"conv": 9}, {"con\nv": 6}):
        file.manifest["report"]["fixed_bits"] = value
        refused(file.write(path), "the report's fixed_bits")


def test_version_1_has_no_such_key(saved: Callable[..., Path], open_file: OpenFile) -> None:
    file, path = open_file(saved(rules=RULES)), saved()
    file.manifest["version"] = 1
    for key in ("graph", "report"):
        file.manifest.pop(key, None)
    for entry in file.manifest["layers"].values():
        del entry["group_size"]
    refused(file.write(path), "layer 'conv': version 1 has Conv2d and Linear, and no 'group_size', 'fixed_bits' or ")
