"""Result rows: a JSON list that grows whole or not at all."""

import json
import os
from pathlib import Path

import pytest

from bitdial.errors import BitdialError, ConfigError
from bitdial.recipes.outcome import add_result


def test_rows_are_appended(tmp_path: Path) -> None:
    path = tmp_path / "results" / "table.json"  # the folder is made
    for seed in range(3):
        add_result(path, {"seed": seed, "top1": {"8": 92.5}})
    assert json.loads(path.read_text()) == [{"seed": seed, "top1": {"8": 92.5}} for seed in range(3)]
    assert [p.name for p in path.parent.iterdir()] == ["table.json"]


@pytest.mark.parametrize("text", ['{"seed": 0}', "3", "null", "", "[", "[] []"])
def test_what_is_not_a_list_is_refused_and_kept(tmp_path: Path, text: str) -> None:
    path = tmp_path / "table.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"table\.json is not a list of results"):
        add_result(path, {"seed": 1})
    assert path.read_text() == text


def test_bytes_that_are_not_text_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not a list of results"):
        add_result(path, {"seed": 1})


def test_a_failure_leaves_the_old_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "table.json"
    add_result(path, {"seed": 0})
    before = path.read_bytes()

    def fail(*paths: object) -> None:
        raise OSError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", fail)
        with pytest.raises(BitdialError, match="untouched"):
            add_result(path, {"seed": 1})
    with pytest.raises(TypeError):
        add_result(path, {"seed": object()})
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["table.json"]
