"""Files in parts: a part is a range of bytes, cut files have fewer, and nothing is read that was not asked for."""

import hashlib
import io
import json
import struct
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from bitdial.errors import ArtifactError, CheckpointError
from bitdial.files.container import read_container
from bitdial.files.parts import PartedFile, read_parts, write_parts

MANIFEST = {"kind": "test", "text": "é\n"}
PARTS: list[tuple[int, dict[str, Tensor]]] = [
    (
        2,
        {"a": torch.arange(3, dtype=torch.uint8), "b": torch.rand(5), "empty": torch.zeros(2, 0), "n": torch.tensor(7)},
    ),
    (4, {"c": torch.arange(7, dtype=torch.int8), "d": torch.rand(2, 3).bfloat16()}),
    (8, {"e": torch.tensor([True, False]), "f": torch.rand(3, dtype=torch.float64)}),
]


def written(path: Path) -> bytes:
    write_parts(path, PARTS, MANIFEST, error=ArtifactError)
    return path.read_bytes()


def read(path: Path, **which: int) -> PartedFile:
    found = read_parts(path, error=ArtifactError, **{"upto": 8, **which})
    assert found is not None
    return found


def test_there_and_back(tmp_path: Path) -> None:
    data = written(tmp_path / "f")
    found, whole = read(tmp_path / "f"), {name: t for _, tensors in PARTS for name, t in tensors.items()}
    assert found.manifest == MANIFEST
    assert found.there == (2, 4, 8)
    for tensors in (found.tensors, load_file(tmp_path / "f")):  # it is a safetensors file like any other
        assert tensors.keys() == whole.keys()
        assert all(t.dtype == whole[name].dtype and torch.equal(t, whole[name]) for name, t in tensors.items())
    begin = 8 + struct.unpack("<Q", data[:8])[0]
    for part, (bits, tensors) in zip(found.parts, PARTS, strict=True):
        assert (part.bits, part.begin, part.end) == (bits, begin, begin + sum(t.nbytes for t in tensors.values()))
        assert part.digest == hashlib.sha256(data[part.begin : part.end]).hexdigest()
        assert {name for name in found.entries if found.part_of(name) == bits} == tensors.keys()
        begin = part.end
    assert begin == len(data)
    assert list(tmp_path.iterdir()) == [tmp_path / "f"]


def test_the_digest_as_it_is_specified(tmp_path: Path) -> None:
    data = written(tmp_path / "f")
    header = json.loads(data[8 : 8 + struct.unpack("<Q", data[:8])[0]])
    metadata = header.pop("__metadata__")
    assert list(header) == ["n", "b", "a", "empty", "d", "c", "f", "e"]  # in the order of the data
    lines = [f"\n{name} {each['dtype']} {'x'.join(map(str, each['shape']))}" for name, each in header.items()]
    text = metadata["manifest"] + "\n" + metadata["parts"] + "".join(lines)
    assert metadata["digest"] == hashlib.sha256(text.encode()).hexdigest() == read(tmp_path / "f").digest


class Counting(io.FileIO):
    """A file that counts the bytes that are read from it."""

    bytes_read = 0

    def readinto(self, buffer: Any) -> int:
        got = super().readinto(buffer) or 0
        Counting.bytes_read += got
        return got

    def read(self, size: int = -1) -> bytes:
        raise AssertionError("it is read by readinto")

    readall = read  # type: ignore[assignment]


def test_only_what_is_asked_for_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(tmp_path / "f")
    parts = read(tmp_path / "f").parts
    header = parts[0].begin
    monkeypatch.setattr(Path, "open", lambda path, *_, **__: Counting(path))
    for above in (0, 2, 4, 8):
        for upto in (0, 2, 3, 4, 8):
            Counting.bytes_read = 0
            found = read(tmp_path / "f", above=above, upto=upto)
            wanted = [part for part in parts if above < part.bits <= upto]
            assert Counting.bytes_read == header + sum(part.end - part.begin for part in wanted)
            assert found.tensors.keys() == {n for n in found.entries if found.part_of(n) in {p.bits for p in wanted}}


def test_cut_at_every_byte(tmp_path: Path) -> None:
    """It has the parts that are whole; without a whole header it is no such file."""
    data = written(tmp_path / "f")
    parts = read(tmp_path / "f").parts
    for end in range(len(data)):
        (tmp_path / "f").unlink()  # ext4 waits for the disk where a file is written over
        (tmp_path / "f").write_bytes(data[:end])
        found = read_parts(tmp_path / "f", error=ArtifactError, upto=8)
        if end < parts[0].begin:
            assert found is None
            continue
        assert found is not None
        assert found.there == tuple(part.bits for part in parts if part.end <= end)
        assert {found.part_of(name) for name in found.tensors} == set(found.there)
    (tmp_path / "f").write_bytes(data + b"x")
    with pytest.raises(ArtifactError, match="its tensors end at byte"):
        read(tmp_path / "f")


def test_a_flipped_bit_anywhere(tmp_path: Path) -> None:
    """In a part, it is named when that part is asked for, and only then; in the header, always."""
    data = written(tmp_path / "f")
    parts = read(tmp_path / "f").parts
    for at in range(len(data)):
        changed = bytearray(data)
        changed[at] ^= 1 << at % 8
        (tmp_path / "f").unlink()  # ext4 waits for the disk where a file is written over
        (tmp_path / "f").write_bytes(changed)
        hit = [part for part in parts if part.begin <= at < part.end]
        if hit:
            below, others = hit[0].bits - 1, [part.bits for part in parts if part.bits < hit[0].bits]
            assert {*read(tmp_path / "f", upto=below).there} == {2, 4, 8}
            with pytest.raises(ArtifactError) as caught:
                read(tmp_path / "f")
            assert f"its part of {hit[0].bits} bits is damaged" in str(caught.value)
            assert (f"serve {', '.join(map(str, others[::-1]))} bits" in str(caught.value)) == bool(others)
            continue
        with suppress(ArtifactError):
            assert read_parts(tmp_path / "f", error=ArtifactError, upto=8) is None


def rewritten(path: Path, change: Any) -> None:
    """The file with its list of parts changed, and the digest that this calls for."""
    data = written(path)
    (size,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + size])
    metadata = header.pop("__metadata__")
    parts = json.loads(metadata["parts"])
    metadata["parts"] = json.dumps(change(parts) or parts)
    lines = [f"\n{name} {each['dtype']} {'x'.join(map(str, each['shape']))}" for name, each in header.items()]
    text = metadata["manifest"] + "\n" + metadata["parts"] + "".join(lines)
    metadata["digest"] = hashlib.sha256(text.encode()).hexdigest()
    head = json.dumps({"__metadata__": metadata, **header}).encode()
    path.write_bytes(struct.pack("<Q", len(head)) + head + data[8 + size :])


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda parts: [], None),
        (lambda parts: {"bits": 2}, "no list"),
        (lambda parts: [*parts, *parts, *parts], "no list"),
        (lambda parts: parts[0].pop("end") and None, "lacks"),
        (lambda parts: parts[0].update(more=1), "lacks"),
        (lambda parts: parts[1].update(end=10**30), "ends within a tensor"),
        (lambda parts: parts[1].update(end=-1), "out of order"),
        (lambda parts: parts[1].update(end=parts[1]["end"] - 1), "ends within a tensor"),
        (lambda parts: parts[1].update(end=True), "no whole number"),
        (lambda parts: parts[1].update(bits=2), "out of order"),
        (lambda parts: parts[2].update(bits=9), "out of order"),
        (lambda parts: parts[2].update(digest="x"), "64 hexadecimal digits"),
        (lambda parts: parts[2].update(digest=None), "64 hexadecimal digits"),
        (lambda parts: parts[:2], "its tensors at"),
        (lambda parts: parts[::-1], "out of order"),
    ],
)
def test_parts_that_cannot_be(tmp_path: Path, change: Any, problem: str | None) -> None:
    rewritten(tmp_path / "f", change)
    if problem is None:  # nothing was changed: it is the rewriting that is tried
        assert read(tmp_path / "f").there == (2, 4, 8)
        return
    with pytest.raises(ArtifactError, match=problem):
        read(tmp_path / "f")


def test_other_files(tmp_path: Path) -> None:
    """What is not in parts is for read_container, and what is in parts is not."""
    (tmp_path / "f").write_bytes(b"not a file of ours")
    assert read_parts(tmp_path / "f", error=ArtifactError) is None
    written(tmp_path / "g")
    with pytest.raises(CheckpointError, match="its metadata lacks"):
        read_container(tmp_path / "g", error=CheckpointError)
    with pytest.raises(ArtifactError, match="there is no file"):
        read_parts(tmp_path / "none", error=ArtifactError)


def test_a_failed_write_leaves_what_was_there(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("old")

    def refuse(path: Path) -> None:
        raise ArtifactError("no")

    for parts, manifest, check, problem in (
        ([(2, {"a": torch.zeros(1, dtype=torch.complex64)})], {}, None, "does not store"),
        ([(2, {"__metadata__": torch.zeros(1)})], {}, None, "reserved name"),
        ([(2, {"\ud800": torch.zeros(1)})], {}, None, "cannot write"),
        (PARTS, {"x": float("nan")}, None, "cannot write"),
        (PARTS, {}, refuse, "no"),
    ):
        with pytest.raises(ArtifactError, match=problem):
            write_parts(tmp_path / "f", parts, manifest, error=ArtifactError, check=check)
        assert (tmp_path / "f").read_text() == "old"
    assert list(tmp_path.iterdir()) == [tmp_path / "f"]
