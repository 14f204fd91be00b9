"""The campaigns of `make test-long`, each with a few cases; and that they notice what they are there to notice."""

import importlib.util
import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from bitdial import load, read_artifact, set_bits

HERE = Path(__file__).resolve().parent


@pytest.fixture(scope="module")
def scripts() -> dict[str, ModuleType]:
    """The scripts as modules; they import `campaign` from beside them."""
    sys.path.insert(0, str(HERE))
    found = {}
    for name in ("campaign", "bases", "damage", "damaged_files", "kills", "switches"):
        spec = importlib.util.spec_from_file_location(name, HERE / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        found[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(found[name])
    sys.path.remove(str(HERE))
    return found


@pytest.fixture(scope="module")
def bases(scripts: dict[str, ModuleType], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of artifacts to damage."""
    folder = tmp_path_factory.mktemp("bases")
    scripts["bases"].make_bases(folder)
    return folder


def test_kills(scripts: dict[str, ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole of it; what another campaign has kept stays."""
    out = tmp_path / "reliability.json"
    out.write_text('{"other": 1, "kills": "old"}')
    arguments = ["--count", "1", "--epochs", "1", "--kinds", "1", "--seed", "3"]
    monkeypatch.setattr(sys, "argv", ["kills.py", "--out", str(out), *arguments])
    scripts["kills"].main()
    found = json.loads(out.read_text())
    kept = found.pop("kills")
    assert found == {"other": 1}
    assert (kept["runs"], kept["failed"], kept["seed"]) == (1, 0, 3)
    assert kept["kills"] >= 1
    assert kept["command"] == "python tests/long/kills.py --count 1 --epochs 1 --kinds 1 --seed 3"
    assert {"python", "torch", "bitdial"} <= set(kept["versions"])
    assert list(tmp_path.iterdir()) == [out]


def test_switches(scripts: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch) -> None:
    switches = scripts["switches"]
    monkeypatch.setattr(switches, "EVERY", 4)
    for kernels, config in switches.CASES.values():
        figures, failures = switches.campaign(kernels, config, 8, 0)
        assert failures == []
        assert (figures["switches"], figures["compared_with_a_fresh_load"]) == (8, 2)
    calls: list[int] = []

    def forgetful(model: torch.nn.Module, setting: Any) -> None:
        calls.append(1)
        if len(calls) in (4, 8, 12, 16):  # the switches that are compared; calls 17 to 20 are those of fresh loads
            return
        set_bits(model, setting)

    monkeypatch.setattr(switches, "set_bits", forgetful)
    assert len(switches.campaign("float", {}, 16, 0)[1]) >= 3


def test_bases(bases: Path) -> None:
    """There is one of each kind of what a file can hold, progressive where its scheme nests."""
    found = {path.stem: read_artifact(path) for path in bases.iterdir()}
    rotations = {a.manifest["rotation"]["residual"] for a in found.values() if "rotation" in a.manifest}
    assert rotations == {"merged", "online"}
    for part in (
        {a.scheme for a in found.values()} >= {"double_rounding", "nested", "centred", "truncate", "adabits", "lsq"},
        any(a.manifest.get("rotation", {}).get("untied") for a in found.values()),
        any("group_scale" in key for a in found.values() for key in a.tensors),
        any(a.parts and "rotation" in a.manifest and "group_scale" in key for a in found.values() for key in a.tensors),
    ):
        assert part
    kinds = {e["activations"] for a in found.values() for e in a.layers.values()}
    assert kinds == {"unsigned", "signed", "asymmetric", "dynamic", "float"}


def test_damage_is_damage(scripts: dict[str, ModuleType], bases: Path) -> None:
    """Every case is another file than the one it was made of, and cases can be repeated."""
    damaged = scripts["damage"].damaged
    whole = [path.read_bytes() for path in sorted(bases.glob("*.safetensors"))]
    cases = [damaged(whole, 0, number) for number in range(60)]
    assert {kind for _, kind, _ in cases} == {"bits", "cut", "splice", "manifest", "tensors"}
    assert not {data for *_, data in cases} & set(whole)
    assert cases == [damaged(whole, 0, number) for number in range(60)]


@pytest.mark.slow
def test_damaged_files(tmp_path: Path) -> None:
    """The whole of it, in processes of its own."""
    out = tmp_path / "reliability.json"
    command = [sys.executable, str(HERE / "damaged_files.py"), "--out", str(out)]
    command += ["--count", "40", "--first", "7", "--chunk", "25", "--workers", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    kept = json.loads(out.read_text())["damaged_files"]
    assert (kept["planned"], kept["files"], kept["failed"]) == (40, 40, 0)
    assert kept["refused"] + kept["consistent"] == 40
    assert kept["refused"] > 20
    assert sum(kept["kinds"].values()) == 40


def test_figures_are_kept_on_the_way(
    scripts: dict[str, ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A campaign that is ended from outside, or whose process dies, has written what it has found so far."""
    damaged_files, out = scripts["damaged_files"], tmp_path / "reliability.json"
    share = damaged_files.Found(Counter({"bits, refused": 2}), [], 1.0, 0.5, 3.0)

    def shares(*_: object) -> Iterator[Any]:
        yield 0, share
        assert json.loads(out.read_text())["damaged_files"]["files"] == 2
        yield 2, share
        yield 4, None

    monkeypatch.setattr(damaged_files, "shares", shares)
    monkeypatch.setattr(damaged_files, "make_bases", lambda folder: None)
    monkeypatch.setattr(sys, "argv", ["damaged_files.py", "--out", str(out), "--count", "8", "--chunk", "2"])
    with pytest.raises(SystemExit, match="1 failures"):
        damaged_files.main()
    kept = json.loads(out.read_text())["damaged_files"]
    assert (kept["planned"], kept["files"], kept["refused"], kept["failed"], kept["cpu_seconds"]) == (8, 4, 4, 1, 6.0)


def test_undamaged_files_are_consistent(scripts: dict[str, ModuleType], bases: Path) -> None:
    tried, paths = scripts["damaged_files"].tried, sorted(bases.iterdir())
    whole = dict(zip(paths, scripts["bases"].read_bases(bases), strict=True))
    for kind in ("decoder", "network"):
        chosen = [path for path in paths if path.stem.startswith(kind)][::4]
        assert {tried(path, whole[path]) for path in chosen} == {"consistent"}


def test_what_goes_wrong_is_noticed(
    scripts: dict[str, ModuleType], bases: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    damaged_files, path = scripts["damaged_files"], bases / "network-00.safetensors"
    base = scripts["bases"].Base(b"", None, scripts["campaign"].images())

    def fails(_: Path, *, cut: bool) -> None:
        raise KeyError("conv1")

    def hangs(*_: object) -> None:
        while True:
            pass

    def waits(path: Path, *, cut: bool) -> Any:
        time.sleep(0.2)  # as where other processes have the cores: no time of this one
        return read_artifact(path, cut=cut)

    def another(*arguments: Any, calls: list[int] = []) -> torch.nn.Module:  # noqa: B006
        calls.append(1)
        live = load(*arguments)
        with torch.no_grad():
            next(live.parameters()).add_(len(calls))
        return live

    for part, wrong, expected in (
        ("read_artifact", fails, "KeyError: 'conv1'"),
        ("load", hangs, "more than 0.2 s"),
        ("load", another, "two outputs at 8"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(damaged_files, "SECONDS", 0.2 if wrong is hangs else 30)
            patch.setattr(damaged_files, part, wrong)
            assert damaged_files.tried(path, base) == expected
    monkeypatch.setattr(damaged_files, "SECONDS", 1.0)  # of 1.4 by the clock
    monkeypatch.setattr(damaged_files, "read_artifact", waits)
    assert damaged_files.tried(path, base) == "consistent"
