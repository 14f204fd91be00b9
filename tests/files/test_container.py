"""The container: exact round trips, atomic writes, and a refusal with the path in it for everything that is off."""

import errno
import hashlib
import itertools
import json
import os
import shutil
import stat
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from bitdial.errors import ArtifactError, BitdialError, CheckpointError, ConfigError
from bitdial.files import container
from bitdial.files.atomic import check_folder, check_target
from bitdial.files.container import read_container, write_container

DTYPES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
}
SHAPES = [(), (0,), (5,), (2, 3), (2, 0, 3), (1, 2, 1, 3)]
MANIFEST = {"kind": "test", "nested": {"list": [1, 2.5, None, True, "é\n\u2028"]}, "empty": {}}


def values(dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """A tensor with every bit pattern of its type's bytes likely somewhere, NaN included."""
    generator = torch.Generator().manual_seed(len(shape) + 1)
    size = torch.empty((), dtype=dtype).element_size()
    count = int(torch.tensor(shape).prod()) if shape else 1
    top = 2 if dtype == torch.bool else 256
    raw = torch.randint(0, top, (count * size,), generator=generator, dtype=torch.uint8)
    return raw.view(dtype).reshape(shape)


def same_bytes(left: Tensor, right: Tensor) -> bool:
    def raw(tensor: Tensor) -> bytes:
        return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""

    return left.dtype == right.dtype and left.shape == right.shape and raw(left) == raw(right)


# --- what is written comes back -------------------------------------------------------------------


def test_every_dtype_and_shape_round_trips(tmp_path: Path) -> None:
    tensors = {f"{name}.{shape}": values(dtype, shape) for dtype, name in DTYPES.items() for shape in SHAPES}
    write_container(tmp_path / "all", tensors, MANIFEST, error=ArtifactError)
    back, manifest, _ = read_container(tmp_path / "all", error=ArtifactError)
    assert manifest == MANIFEST
    assert back.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert same_bytes(back[name], tensor), name


def test_no_tensors_and_an_empty_manifest_round_trip(tmp_path: Path) -> None:
    write_container(tmp_path / "bare", {}, {}, error=ArtifactError)
    assert read_container(tmp_path / "bare", error=ArtifactError)[:2] == ({}, {})


def test_views_and_parameters_are_written_row_major(tmp_path: Path) -> None:
    whole = torch.arange(24.0).reshape(2, 3, 4)
    tensors = {
        "transposed": whole.transpose(0, 2),
        "strided": whole[:, ::2, 1:],
        "expanded": torch.ones(1).expand(5),
        "channels_last": torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
        "parameter": torch.nn.Parameter(torch.randn(3)),
        "same storage": whole,
        "same storage again": whole,
    }
    write_container(tmp_path / "views", tensors, {}, error=ArtifactError)
    back, _, _ = read_container(tmp_path / "views", error=ArtifactError)
    for name, tensor in tensors.items():
        assert torch.equal(back[name], tensor.detach()), name


def test_missing_folders_are_made(tmp_path: Path) -> None:
    write_container(tmp_path / "a" / "b" / "file", {}, {"x": 1}, error=ArtifactError)
    assert read_container(str(tmp_path / "a" / "b" / "file"), error=ArtifactError)[1] == {"x": 1}


def test_equal_content_gives_an_equal_digest_whatever_the_order_of_the_tensors(tmp_path: Path) -> None:
    one, two = torch.ones(2), torch.zeros(3)
    write_container(tmp_path / "1", {"a": one, "b": two}, {"x": 1, "y": 2}, error=ArtifactError)
    write_container(tmp_path / "2", {"b": two, "a": one}, {"x": 1, "y": 2}, error=ArtifactError)
    assert (
        read_container(tmp_path / "1", error=ArtifactError)[2] == read_container(tmp_path / "2", error=ArtifactError)[2]
    )


def test_the_file_has_the_permissions_of_any_new_file(tmp_path: Path) -> None:
    """A file to ship must be as readable as one made with open(), whatever umask says that is."""
    (tmp_path / "plain").write_bytes(b"")
    write_container(tmp_path / "ours", {"x": torch.ones(1)}, {}, error=ArtifactError)
    modes = {name: stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("plain", "ours")}
    assert oct(modes["ours"]) == oct(modes["plain"])


# --- the digest, computed from the docstring alone ------------------------------------------------


def parse(data: bytes) -> tuple[dict[str, Any], dict[str, str], bytes]:
    """Tensors' entries, metadata and buffer of a safetensors file, read with struct and json only."""
    (size,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + size])
    metadata = header.pop("__metadata__")
    return header, metadata, data[8 + size :]


def assemble(header: dict[str, Any], buffer: bytes) -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + buffer


def docstring_digest(data: bytes) -> str:
    header, metadata, buffer = parse(data)
    total = metadata["manifest"].encode("utf-8")
    for name in sorted(header):
        entry = header[name]
        begin, end = entry["data_offsets"]
        shape = "x".join(str(n) for n in entry["shape"])
        total += f"\n{name} {entry['dtype']} {shape}\n".encode() + buffer[begin:end]
    return hashlib.sha256(total).hexdigest()


def test_an_independent_digest_agrees(tmp_path: Path) -> None:
    tensors = {f"{name} {shape} é": values(dtype, shape) for dtype, name in DTYPES.items() for shape in SHAPES}
    write_container(tmp_path / "all", tensors, MANIFEST, error=ArtifactError)
    data = (tmp_path / "all").read_bytes()
    header, metadata, _ = parse(data)
    assert set(metadata) == {"manifest", "digest"}
    assert json.loads(metadata["manifest"]) == MANIFEST
    assert {name: entry["dtype"] for name, entry in header.items()} == {n: n.split()[0] for n in tensors}
    assert metadata["digest"] == docstring_digest(data)
    assert read_container(tmp_path / "all", error=ArtifactError)[2] == metadata["digest"]


def test_the_digest_tells_names_types_shapes_and_manifests_apart(tmp_path: Path) -> None:
    ones = torch.ones(6)
    contents = [
        ({"a": ones}, {}),
        ({"b": ones}, {}),
        ({"a": ones.reshape(2, 3)}, {}),
        ({"a": ones.reshape(3, 2)}, {}),
        ({"a": ones.view(torch.int32)}, {}),
        ({"a": ones, "b": ones[:0]}, {}),
        ({"a": ones}, {"x": 1}),
        ({"a": torch.cat([torch.zeros(1), ones[1:]])}, {}),
    ]
    digests = set()
    for tensors, manifest in contents:
        write_container(tmp_path / "f", tensors, manifest, error=ArtifactError)
        digests.add(read_container(tmp_path / "f", error=ArtifactError)[2])
    assert len(digests) == len(contents)


# --- writes that fail -----------------------------------------------------------------------------


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """A good file, alone in its folder."""
    path = tmp_path / "folder" / "model.safetensors"
    write_container(path, {"x": torch.arange(4)}, {"version": "old"}, error=ArtifactError)
    return path


def assert_old_file_alone(path: Path) -> None:
    assert [p.name for p in path.parent.iterdir()] == [path.name]
    tensors, manifest, _ = read_container(path, error=ArtifactError)
    assert manifest == {"version": "old"}
    assert torch.equal(tensors["x"], torch.arange(4))


def test_a_write_replaces_the_old_file_and_leaves_nothing_else(target: Path) -> None:
    write_container(target, {"y": torch.ones(1)}, {"version": "new"}, error=ArtifactError)
    assert [p.name for p in target.parent.iterdir()] == [target.name]
    assert read_container(target, error=ArtifactError)[1] == {"version": "new"}


@pytest.mark.parametrize("error", [ArtifactError, CheckpointError])
def test_disk_full_as_the_writer_reports_it(
    target: Path, monkeypatch: pytest.MonkeyPatch, error: type[BitdialError]
) -> None:
    def full(tensors: Any, path: Any, metadata: Any) -> None:
        Path(path).write_bytes(b"half of a fi")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(container, "save_file", full)
    with pytest.raises(error, match="No space left on device") as caught:
        write_container(target, {}, {"version": "new"}, error=error)
    assert str(target) in str(caught.value)
    assert_old_file_alone(target)


def test_a_file_that_outgrows_the_limit(target: Path) -> None:
    """The real thing, in a process that may not write more than 64 KiB to a file."""
    script = """
import resource, sys, torch
from bitdial.files.container import write_container
from bitdial.errors import ArtifactError
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, resource.RLIM_INFINITY))
write_container(sys.argv[1], {"x": torch.ones(8)}, {"version": "small"}, error=ArtifactError)
write_container(sys.argv[2], {"x": torch.ones(1 << 18)}, {"version": "new"}, error=ArtifactError)
"""
    small = target.parent.parent / "small"
    run = subprocess.run(
        [sys.executable, "-c", script, str(small), str(target)], capture_output=True, text=True, timeout=60
    )
    assert run.returncode == 1
    assert read_container(small, error=ArtifactError)[1] == {"version": "small"}  # the limit alone is not the failure
    assert f"ArtifactError: cannot write {target}: " in run.stderr
    assert "File too large" in run.stderr
    assert_old_file_alone(target)


@pytest.mark.parametrize("stage", ["replace", "fsync"])
def test_a_failure_after_the_data_is_written(target: Path, monkeypatch: pytest.MonkeyPatch, stage: str) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(container.os, stage, fail)
    with pytest.raises(ArtifactError, match="Input/output error"):
        write_container(target, {}, {"version": "new"}, error=ArtifactError)
    monkeypatch.undo()
    assert_old_file_alone(target)


def test_an_interrupted_write_leaves_no_temporary_file(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(tensors: Any, path: Any, metadata: Any) -> None:
        save_file(tensors, path, metadata)
        raise KeyboardInterrupt

    monkeypatch.setattr(container, "save_file", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_container(target, {}, {"version": "new"}, error=ArtifactError)
    monkeypatch.undo()
    assert_old_file_alone(target)


def test_after_the_file_is_in_place_a_folder_that_cannot_be_flushed_is_no_failure(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some file systems cannot fsync a folder; by then the new file is there, and an error would say the contrary."""
    real = os.fsync

    def fsync(handle: int) -> None:
        if stat.S_ISDIR(os.fstat(handle).st_mode):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        real(handle)

    monkeypatch.setattr(container.os, "fsync", fsync)
    try:
        write_container(target, {}, {"version": "new"}, error=ArtifactError)
        expected = "new"
    except ArtifactError:  # also right, if it is true that the old file is untouched
        expected = "old"
    assert read_container(target, error=ArtifactError)[1] == {"version": expected}


@contextmanager
def without_privileges() -> Iterator[Path]:
    """A folder of our own, seen as somebody whom permissions bind; root takes another user's identity."""
    folder = Path(tempfile.mkdtemp())
    try:
        folder.chmod(0o755)
        root = os.geteuid() == 0
        if root:
            shutil.chown(folder, 65534)
            os.seteuid(65534)
        try:
            yield folder
        finally:
            if root:
                os.seteuid(0)
    finally:
        folder.chmod(0o755)
        for inner in folder.iterdir():
            inner.chmod(0o755)
        shutil.rmtree(folder)


def test_permission_denied() -> None:
    with without_privileges() as folder:
        target = folder / "model"
        write_container(target, {"x": torch.arange(4)}, {"version": "old"}, error=ArtifactError)
        folder.chmod(0o555)
        with pytest.raises(ArtifactError, match="ermission denied") as caught:
            write_container(target, {}, {"version": "new"}, error=ArtifactError)
        assert str(target) in str(caught.value)
        with pytest.raises(ArtifactError, match="ermission denied"):
            write_container(folder / "new" / "model", {}, {}, error=ArtifactError)
        assert_old_file_alone(target)


def test_a_file_that_may_not_be_read_is_not_called_damaged() -> None:
    with without_privileges() as folder:
        target = folder / "model"
        write_container(target, {"x": torch.arange(4)}, {}, error=ArtifactError)
        target.chmod(0)
        with pytest.raises(ArtifactError, match="ermission denied") as caught:
            read_container(target, error=ArtifactError)
        assert str(target) in str(caught.value)


def test_permission_denied_on_the_folder() -> None:
    with without_privileges() as folder:
        inner = folder / "inner"
        write_container(inner / "model", {}, {}, error=ArtifactError)
        inner.chmod(0)
        with pytest.raises(ArtifactError):
            read_container(inner / "model", error=ArtifactError)
        with pytest.raises(ArtifactError):
            write_container(inner / "model", {}, {}, error=ArtifactError)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), {1, 2}, object(), torch.ones(1)])
def test_a_manifest_that_is_not_json_is_refused(target: Path, bad: object) -> None:
    with pytest.raises(ArtifactError, match="cannot write") as caught:
        write_container(target, {}, {"deep": [{"value": bad}]}, error=ArtifactError)
    assert str(target) in str(caught.value)
    assert_old_file_alone(target)


def test_a_manifest_that_holds_itself_is_refused(target: Path) -> None:
    manifest: dict[str, Any] = {}
    manifest["self"] = manifest
    with pytest.raises(ArtifactError, match="cannot write"):
        write_container(target, {}, manifest, error=ArtifactError)
    assert_old_file_alone(target)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.float8_e4m3fn, torch.uint16])
def test_a_dtype_that_cannot_be_read_back_is_refused(target: Path, dtype: torch.dtype) -> None:
    with pytest.raises(ArtifactError, match=str(dtype)) as caught:
        write_container(target, {"odd": torch.zeros(2, dtype=dtype)}, {}, error=ArtifactError)
    assert str(target) in str(caught.value)
    assert_old_file_alone(target)


def test_a_tensor_with_the_metadatas_name_is_refused(target: Path) -> None:
    """Its entry would stand beside the metadata under one key: a file that nobody can read."""
    with pytest.raises(ArtifactError):
        write_container(target, {"__metadata__": torch.zeros(2)}, {}, error=ArtifactError)
    assert_old_file_alone(target)


def test_a_target_that_is_a_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="cannot write"):
        write_container(tmp_path, {}, {}, error=ArtifactError)
    assert list(tmp_path.parent.glob(".*.tmp")) == []


# --- files that are not what they should be -------------------------------------------------------


def refused(path: Path, match: str = ".") -> None:
    for error in (ArtifactError, CheckpointError):
        with pytest.raises(error, match=match) as caught:
            read_container(path, error=error)
        assert type(caught.value) is error
        assert str(path) in str(caught.value)


@pytest.fixture
def good(tmp_path: Path) -> bytes:
    """The bytes of a small file with tensors of two types."""
    tensors = {"weight": torch.arange(5, dtype=torch.int8), "scale": torch.tensor([0.5, 2.0]), "none": torch.zeros(0)}
    write_container(tmp_path / "good", tensors, {"kind": "test"}, error=ArtifactError)
    return (tmp_path / "good").read_bytes()


def test_no_file_and_a_folder(tmp_path: Path) -> None:
    refused(tmp_path / "absent", "there is no file")
    refused(tmp_path, "there is no file")


def test_truncated_anywhere(tmp_path: Path, good: bytes) -> None:
    for length in range(len(good)):
        (tmp_path / "cut").unlink(missing_ok=True)  # ext4 waits for the disk where a file is written over
        (tmp_path / "cut").write_bytes(good[:length])
        refused(tmp_path / "cut", "truncated or damaged")


def test_flipped_bits_anywhere(tmp_path: Path, good: bytes) -> None:
    """Wherever it falls: header length, header, padding or data."""
    path = tmp_path / "flipped"
    for i in range(len(good)):
        for bit in (0, 2, 5, 7):
            data = bytearray(good)
            data[i] ^= 1 << bit
            path.unlink(missing_ok=True)  # ext4 waits for the disk where a file is written over
            path.write_bytes(data)
            with pytest.raises(ArtifactError) as caught:
                read_container(path, error=ArtifactError)
            assert str(path) in str(caught.value)


@pytest.mark.parametrize("tail", [b"\0", b"\n", b"x" * 100])
def test_appended_bytes(tmp_path: Path, good: bytes, tail: bytes) -> None:
    (tmp_path / "longer").write_bytes(good + tail)
    refused(tmp_path / "longer")


@pytest.mark.parametrize(
    "data", [b"", b"{}", b"PK\x03\x04 a zip", b"\x80\x02}q\x00.", b"\x89HDF\r\n\x1a\n", b"\0" * 64]
)
def test_not_a_safetensors_file(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "other").write_bytes(data)
    refused(tmp_path / "other", "not a readable safetensors file")


@settings(max_examples=50, deadline=None)
@given(st.binary(max_size=200))
def test_random_bytes(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "random"
    path.write_bytes(data)
    refused(path, "not a readable safetensors file")


@pytest.mark.parametrize("length", [0, 1, 2**31, 2**40, 2**63 - 1, 2**63, 2**64 - 1])
def test_a_header_length_that_lies(tmp_path: Path, good: bytes, length: int) -> None:
    (tmp_path / "length").write_bytes(struct.pack("<Q", length) + good[8:])
    refused(tmp_path / "length", "not a readable safetensors file")


@pytest.mark.parametrize(
    "change",
    [
        {"data_offsets": [0, 4]},
        {"data_offsets": [3, 8]},
        {"data_offsets": [5, 0]},
        {"data_offsets": [0, 2**62]},
        {"data_offsets": [-1, 4]},
        {"data_offsets": [0]},
        {"data_offsets": "0-5"},
        {"shape": [6]},
        {"shape": [2**63, 2]},
        {"shape": [0, 2**63]},
        {"shape": [-5]},
        {"shape": None},
        {"dtype": "I16"},
        {"dtype": "F6_E2M3"},
        {"dtype": "os.system"},
        {"dtype": None},
    ],
    ids=str,
)
def test_a_header_that_lies_about_a_tensor(tmp_path: Path, good: bytes, change: dict[str, Any]) -> None:
    header, metadata, buffer = parse(good)
    header["weight"] |= change
    (tmp_path / "lie").write_bytes(assemble({"__metadata__": metadata} | header, buffer))
    refused(tmp_path / "lie")


def test_two_tensors_on_the_same_bytes(tmp_path: Path, good: bytes) -> None:
    header, metadata, buffer = parse(good)
    header["again"] = header["weight"]
    (tmp_path / "twice").write_bytes(assemble({"__metadata__": metadata} | header, buffer))
    refused(tmp_path / "twice")


def write_with(path: Path, metadata: dict[str, str] | None, tensors: dict[str, Tensor] | None = None) -> None:
    save_file(tensors or {"x": torch.ones(2)}, path, metadata)


@pytest.mark.parametrize(
    "metadata",
    [
        None,
        {},
        {"format": "pt"},
        {"manifest": "{}"},
        {"digest": "0" * 64},
        {"manifest": "{}", "digest": "0" * 64, "format": "pt"},
    ],
)
def test_other_metadata(tmp_path: Path, metadata: dict[str, str] | None) -> None:
    write_with(tmp_path / "other", metadata)
    refused(tmp_path / "other", "not written by bitdial")


@pytest.mark.parametrize("digest", ["", "0" * 64, "no digest at all"])
def test_a_wrong_digest(tmp_path: Path, digest: str) -> None:
    write_with(tmp_path / "wrong", {"manifest": "{}", "digest": digest})
    refused(tmp_path / "wrong", "does not match its digest")


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "null", '"text"', "[" * 100_000, '{"a": NaN}'])
def test_a_manifest_that_is_no_json_object(tmp_path: Path, text: str) -> None:
    """With a digest that holds: anybody can compute one."""
    path = tmp_path / "manifest"
    write_with(path, {"manifest": text, "digest": ""})
    header, metadata, buffer = parse(path.read_bytes())
    metadata["digest"] = docstring_digest(path.read_bytes())
    path.write_bytes(assemble({"__metadata__": metadata} | header, buffer))
    refused(path, "manifest")


def test_a_changed_manifest(tmp_path: Path, good: bytes) -> None:
    changed = good.replace(b"test", b"best")
    assert changed != good
    (tmp_path / "changed").write_bytes(changed)
    refused(tmp_path / "changed", "does not match its digest")


@pytest.mark.parametrize("dtype", [torch.complex64, torch.float8_e4m3fn, torch.uint64])
def test_a_type_that_is_never_written(tmp_path: Path, dtype: torch.dtype) -> None:
    write_with(tmp_path / "odd", {"manifest": "{}", "digest": ""}, {"strange": torch.zeros(2, dtype=dtype)})
    refused(tmp_path / "odd", "'strange' has a type that bitdial does not write")


def test_reading_while_the_file_is_being_replaced(tmp_path: Path) -> None:
    """A reader sees one version or the other, never the header of one with the data of the other."""
    for i in range(2):
        content = {"x": torch.full((1000,), float(i))}
        write_container(tmp_path / f"version{i}", content, {"number": i}, error=ArtifactError)
    path, stop = tmp_path / "file", threading.Event()
    os.link(tmp_path / "version0", path)

    def replace_again_and_again() -> None:
        for i in itertools.cycle((1, 0)):
            os.link(tmp_path / f"version{i}", tmp_path / "next")
            os.replace(tmp_path / "next", path)
            if stop.is_set():
                return

    replacer = threading.Thread(target=replace_again_and_again)
    replacer.start()
    try:
        for _ in range(2000):
            tensors, manifest, _ = read_container(path, error=ArtifactError)
            assert bool((tensors["x"] == manifest["number"]).all())
    finally:
        stop.set()
        replacer.join()


# --- places to write at ---------------------------------------------------------------------------


def test_places_that_are_there_or_can_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.chdir(tmp_path)
    for folder in (tmp_path, tmp_path / "a" / "b", Path(), Path("a/b")):
        check_folder("--out", folder)
        check_target("--results", folder / "file")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file"], "nothing is made"


def test_places_where_nothing_can_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for place in ("file", "link"):
        for folder in (tmp_path / place, tmp_path / place / "a" / "b"):
            with pytest.raises(ConfigError, match=rf"--out .*{place}.* is not a folder"):
                check_folder("--out", folder)
            with pytest.raises(ConfigError, match=rf"--results .*{place}.* is not a folder"):
                check_target("--results", folder / "a.json")
    with pytest.raises(ConfigError, match=r"--results .*: this is a folder; name a file"):
        check_target("--results", tmp_path)


def test_a_folder_that_may_not_be_written_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(ConfigError, match=r"--out .*a: you may not write in"):
        check_folder("--out", tmp_path / "a")
