"""Whole files and progressive ones, made of each other."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from bitdial import BitPlan, read_artifact, repack, save
from bitdial.artifact import amend
from bitdial.errors import ArtifactError


def test_there_and_back(saved: Callable[..., Path], prepared: Callable[..., nn.Module], tmp_path: Path) -> None:
    """Also from 7 bits, whose codes are packed in a whole file; the same file as `save` writes."""
    for choices in ((8, 4, 2), (7, 3)):
        config: dict[str, Any] = {"scheme": "nested", "bit_choices": choices}
        whole, parts, again = saved(**config), tmp_path / "parts", tmp_path / "again"
        digest = repack(whole, parts)
        assert digest == read_artifact(parts).digest != read_artifact(whole).digest
        assert repack(parts, again, progressive=False) == read_artifact(whole).digest
        assert repack(parts, parts) == digest  # in place
        save(prepared(**config), tmp_path / "saved", progressive=True)
        assert (tmp_path / "saved").read_bytes() == parts.read_bytes()
        one, other = read_artifact(whole), read_artifact(parts)
        assert one.manifest == other.manifest
        assert one.tensors.keys() == other.tensors.keys()
        assert all(
            t.dtype == other.tensors[n].dtype and torch.equal(t, other.tensors[n]) for n, t in one.tensors.items()
        )


def test_a_progressive_file_stays_one_when_it_is_amended(saved: Callable[..., Path], tmp_path: Path) -> None:
    repack(saved(scheme="nested"), tmp_path / "parts")
    amend(tmp_path / "parts", plans={"low": BitPlan(default=2)}, metrics={"top1": {"8": 0.5}})
    found = read_artifact(tmp_path / "parts", bits=2)
    assert found.available == (2,)
    assert found.metrics == {"top1": {"8": 0.5}}
    assert found.available_plans() == {"low": BitPlan(default=2)}


def test_what_cannot_be_packed_leaves_nothing(saved: Callable[..., Path], tmp_path: Path) -> None:
    path = saved(scheme="nested")
    before = path.read_bytes()
    with pytest.raises(ArtifactError, match="there is no file"):
        repack(tmp_path / "none", tmp_path / "out")
    path.write_bytes(before[:-1])
    with pytest.raises(ArtifactError, match="truncated or damaged"):
        repack(path, tmp_path / "out")
    assert not (tmp_path / "out").exists()
