"""`bitdial repack`, and what `bitdial inspect` says of the parts of a file."""

import json
from pathlib import Path

import pytest
import torch

import bitdial
from bitdial.cli import main


@pytest.fixture
def file(tmp_path: Path) -> Path:
    model = bitdial.build_model("cifar_resnet", blocks=1, width=4, in_channels=1)
    config = bitdial.QuantConfig(bit_choices=(8, 4, 2), scheme="nested")
    bitdial.save(bitdial.prepare(model, config, torch.rand(4, 1, 8, 8)), tmp_path / "net")
    return tmp_path / "net"


def test_there_and_back(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, again = file.with_name("parts"), file.with_name("again")
    for options in ([], ["--progressive"]):
        assert main(["repack", str(file), str(out), *options]) == 0
        said = capsys.readouterr().out
        parts = bitdial.file_parts(out)
        assert said.startswith(f"Saved {out}: {out.stat().st_size:,} bytes (before: {file.stat().st_size:,}); ")
        assert said.endswith(": " + ", ".join(f"{part.end:,} for {part.bits} bits" for part in parts) + "\n")
    assert main(["repack", str(out), str(again), "--whole"]) == 0
    assert "all widths in one" in capsys.readouterr().out
    assert bitdial.read_artifact(again).digest == bitdial.read_artifact(file).digest
    assert main(["repack", str(out), str(out)]) == 1
    assert "this is the artifact too" in capsys.readouterr().err


def test_inspect_shows_the_parts(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(file), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["parts"] == []
    bitdial.repack(file, file)
    parts = bitdial.file_parts(file)
    file.write_bytes(file.read_bytes()[: parts[1].end + 1])
    assert main(["inspect", str(file)]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "widths 4, 2 (the file is cut; whole, it has 8, 4, 2)" in lines
    assert "stored 8-bit integer codes, in parts" in lines
    for part, there in zip(parts, ("yes", "yes", "no"), strict=True):
        assert f"{part.bits} bits {part.begin:,} {part.end:,} {part.end - part.begin:,} {there}" in lines
    assert main(["inspect", str(file), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["parts"]
    assert found == [{**part._asdict(), "there": part.bits < 8} for part in parts]


def test_what_cannot_be_in_parts(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = bitdial.build_model("cifar_resnet", blocks=1, width=4, in_channels=1)
    bitdial.save(bitdial.prepare(model, bitdial.QuantConfig(), torch.rand(4, 1, 8, 8)), file)
    assert main(["repack", str(file), str(file.with_name("parts"))]) == 1
    assert "scheme 'double_rounding' rounds at each width anew" in capsys.readouterr().err
