"""What commands write is kept to one process, and looked at before any work."""

from pathlib import Path

import pytest
import torch

import bitdial
from bitdial.cli import main
from bitdial.files.lock import sole_writer

WRITING = [
    (["sensitivity", "FILE"], "net.safetensors"),
    (["sensitivity", "FILE", "--no-store", "--out", "HERE/out.json"], "out.json"),
    (["search", "FILE", "--average-bits", "3", "--store"], "net.safetensors"),
    (["search", "FILE", "--average-bits", "3", "--out", "HERE/out.json"], "out.json"),
    (["pareto", "FILE"], "net.safetensors"),
    (["pareto", "FILE", "--no-store"], "net.html"),
    (["export", "FILE", "--onnx", "HERE/net.onnx"], "net.onnx"),
    (["export", "FILE", "--hf", "HERE/folder", "--model", "HERE"], "folder"),
    (["repack", "FILE", "HERE/parts"], "parts"),
    (["demo", "--out", "HERE"], "demo.html"),
    (["demo", "--mixed", "--out", "HERE"], "mixed.html"),
    (["train", "digits", "--out", "HERE"], "digits.safetensors"),
]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    model = bitdial.build_model("cifar_resnet", blocks=1, width=4, in_channels=1)
    config = bitdial.QuantConfig(bit_choices=(4, 3, 2))
    path = tmp_path / "net.safetensors"
    bitdial.save(bitdial.prepare(model, config, torch.rand(4, 1, 8, 8)), path, metrics={"recipe": "digits"})
    return path


def words(command: list[str], file: Path) -> list[str]:
    return [part.replace("FILE", str(file)).replace("HERE", str(file.parent)) for part in command]


@pytest.mark.parametrize(("command", "target"), WRITING, ids=str)
def test_what_another_process_writes_is_left_to_it(
    file: Path, capsys: pytest.CaptureFixture[str], command: list[str], target: str
) -> None:
    before = file.read_bytes()
    with sole_writer(file.parent / target, work="bitdial something"):
        assert main(words(command, file)) == 1
    error = capsys.readouterr().err
    assert f"{target} is being written by process " in error
    assert "(bitdial something, since " in error
    assert file.read_bytes() == before
    assert [path.name for path in file.parent.iterdir()] == ["net.safetensors"]


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        (["search", "FILE", "--average-bits", "3", "--out", "FILE"], "this is the artifact too"),
        (["pareto", "FILE", "--out", "HERE/a", "--report", "HERE/x/../a"], "this is --report too"),
        (["export", "FILE", "--onnx", "FILE"], "this is the artifact too"),
        (["export", "FILE", "--onnx", "HERE"], "/model.onnx"),
        (["export", "FILE", "--onnx", "FILE/x.onnx"], "net.safetensors is not a folder"),
        (["sensitivity", "FILE", "--out", "HERE"], "this is a folder; name a file"),
        (["demo", "--out", "FILE"], "net.safetensors is not a folder"),
    ],
    ids=str,
)
def test_what_cannot_be_written_is_found_before_any_work(
    file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, command: list[str], reason: str
) -> None:
    before = file.read_bytes()
    monkeypatch.setattr("bitdial.files.container._read", lambda *_: pytest.fail("the file was read first"))
    assert main(words(command, file)) == 1
    assert reason in capsys.readouterr().err
    assert file.read_bytes() == before
