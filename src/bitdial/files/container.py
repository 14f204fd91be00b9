"""The file under artifacts and checkpoints: one .safetensors file with a JSON manifest and a digest.

The metadata has exactly two entries, `manifest` (JSON text) and `digest`:

    digest = sha256( manifest text
                     then for each tensor, sorted by name: "\\n" name " " dtype " " shape "\\n" data )

with shape written as `2x3` (empty for a scalar), dtype as safetensors spells it and data the tensor's bytes, row-major
and little-endian. A file whose digest does not hold is refused whole. Writing goes to a temporary file beside the
target, which then replaces it: a reader sees the old file or the new one, never a part. Nothing is ever unpickled.
"""

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from bitdial.errors import BitdialError
from bitdial.files.atomic import replacing

DTYPES: dict[torch.dtype, str] = {
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
_TYPES = {name: dtype for dtype, name in DTYPES.items()}
Entry = dict[str, Any]  # of a tensor in a header: its dtype, shape and data_offsets
METADATA = "__metadata__"
CHANGED = "it changed while it was read"
UNREADABLE = "not a readable safetensors file (truncated or damaged?)"
_MOST_LEVELS = 900
_LARGEST_HEADER = 100_000_000  # that safetensors reads


def write_container(
    path: str | os.PathLike[str],
    tensors: Mapping[str, Tensor],
    manifest: dict[str, Any],
    *,
    error: type[BitdialError],
    check: Callable[[Path], None] | None = None,
) -> str:
    """Write `tensors` and `manifest` (JSON values) to `path` atomically and return the digest.

    `check` is given the temporary file, before that takes its name. A failure, also one that `check` raises, leaves
    what was at `path` alone.
    """
    path = Path(path)
    check_storable(path, tensors, error)
    plain = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    text = manifest_text(path, manifest, error)
    metadata = {"manifest": text, "digest": _digest(text, plain)}
    with replacing(path, error=error) as temporary:
        save_file(plain, temporary, metadata)
        plain.clear()  # a reader needs as much memory again
        if check is not None:
            check(temporary)
    return metadata["digest"]


@contextmanager
def reading(path: Path, error: type[BitdialError]) -> Iterator[None]:
    """Turn what can go wrong in reading bytes of the file at `path` into `error`."""
    try:
        yield
    except (FileNotFoundError, IsADirectoryError) as cause:
        raise error(f"there is no file {path}") from cause
    except OSError as cause:
        raise error(f"cannot read {path}: {cause.strerror or cause}") from cause
    except RuntimeError as cause:  # of torch, which has no such memory
        raise error(f"cannot read {path}: {cause}") from cause


def check_storable(path: Path, tensors: Mapping[str, Tensor], error: type[BitdialError]) -> None:
    """Raise `error` unless `tensors` are of types that bitdial writes, and their names can be in a file."""
    if unknown := [f"{n!r} ({t.dtype})" for n, t in tensors.items() if t.dtype not in DTYPES]:
        raise error(
            f"cannot write {path}: bitdial does not store tensors of the type of {unknown[0]}; convert it, or keep it "
            "out of the model's state (persistent=False)"
        )
    if METADATA in tensors:
        raise error(f"cannot write {path}: {METADATA!r} is a reserved name")
    try:
        "".join(tensors).encode()
    except ValueError as cause:  # halves of a pair of UTF-16 are no text
        raise error(f"cannot write {path}: {cause}") from cause


def manifest_text(path: Path, manifest: dict[str, Any], error: type[BitdialError]) -> str:
    """The manifest as a file has it; `error` if it holds what JSON cannot say."""
    try:
        return json.dumps(manifest, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as cause:
        raise error(f"cannot write {path}: {cause}") from cause


def read_container(
    path: str | os.PathLike[str], *, error: type[BitdialError], shared: bool = False
) -> tuple[dict[str, Tensor], dict[str, Any], str]:
    """The tensors, the manifest and the digest of the file at `path`, checked; `error` if anything is off.

    The file is read once. With `shared`, the tensors are parts of that memory, which saves a copy. They begin wherever
    their type can, and not where PyTorch's own memory begins: its random generators crash on such a state.
    """
    path = Path(path)
    with reading(path, error):
        data = _read(path)
    try:
        metadata, entries = _header(data)
    except (ValueError, RecursionError) as cause:
        raise error(f"{path} is {UNREADABLE}: {cause}") from cause
    if set(metadata) != {"manifest", "digest"}:
        raise error(f"{path} was not written by bitdial: its metadata lacks 'manifest' and 'digest'")
    text, digest = metadata["manifest"], metadata["digest"]
    check_types(path, entries, error)
    tensors = {name: tensor_in(data, entry) for name, entry in entries.items()}
    if _digest(text, tensors) != digest:
        raise error(f"{path} is damaged: its content does not match its digest; get a fresh copy")
    manifest = parsed_manifest(path, text, error)
    return tensors if shared else {name: tensor.clone() for name, tensor in tensors.items()}, manifest, digest


def check_types(path: Path, entries: Mapping[str, Entry], error: type[BitdialError]) -> None:
    """Raise `error` if a tensor of a header is of a type that bitdial does not write."""
    if unknown := [name for name, entry in entries.items() if entry["dtype"] not in _TYPES]:
        raise error(f"{path}: tensor {unknown[0]!r} has a type that bitdial does not write")


def parsed_manifest(path: Path, text: str, error: type[BitdialError]) -> dict[str, Any]:
    """The manifest of a file; `error` unless it is a JSON object of not too many levels."""
    try:
        manifest = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError) as cause:
        raise error(f"{path}: its manifest is not JSON: {cause}") from cause
    if not isinstance(manifest, dict) or _deeper_than(_MOST_LEVELS, manifest):
        raise error(f"{path}: its manifest must be a JSON object of at most {_MOST_LEVELS} levels")
    return manifest


def _read(path: Path) -> Tensor:
    """The bytes of a file, read in one go: it may be replaced at any time, and is then still the old one here."""
    with path.open("rb", buffering=0) as file:
        data = next_bytes(file, os.fstat(file.fileno()).st_size)
        if file.read(1):
            raise OSError(CHANGED)
    return data


def next_bytes(file: FileIO, count: int) -> Tensor:
    """The next `count` bytes of `file`; OSError if there are fewer."""
    data = torch.empty(count, dtype=torch.uint8)
    rest = memoryview(data.numpy().data)
    while len(rest) and (got := file.readinto(rest)):
        rest = rest[got:]
    if len(rest):
        raise OSError(CHANGED)
    return data


def _header(data: Tensor) -> tuple[dict[str, str], dict[str, Entry]]:
    """The metadata and the entries of a whole file; ValueError if anything is off."""
    size = header_size(data[:8].numpy().tobytes(), data.numel())
    metadata, entries, end = parsed_header(data[8 : 8 + size].numpy().tobytes())
    if end != data.numel():
        raise ValueError(f"its tensors end at byte {end} of {data.numel()}")
    return metadata, entries


def header_size(first: bytes, total: int) -> int:
    """The length of the header, by the `first` 8 bytes of a file of `total` bytes; ValueError if that is too long."""
    size = int.from_bytes(first, "little")
    if not 2 <= size <= min(_LARGEST_HEADER, total - 8):
        raise ValueError(f"its header would take {size} of {total} bytes")
    return size


def parsed_header(text: bytes) -> tuple[dict[str, str], dict[str, Entry], int]:
    """The metadata, {tensor: {dtype, shape, data_offsets}} in the order of the data, and where the data ends.

    Offsets count from the beginning of the file. Tensors must lie one after the other. ValueError if anything is off.
    """
    header = json.loads(text.decode(), object_pairs_hook=_without_doubles)
    if not isinstance(header, dict):
        raise ValueError("its header is no JSON object")
    metadata = header.pop(METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError("its metadata is no table of texts")
    "".join((*metadata, *metadata.values(), *header)).encode()  # halves of a pair of UTF-16 are no text
    end = 8 + len(text)
    entries = {name: _entry(name, entry, end) for name, entry in header.items()}
    entries = dict(sorted(entries.items(), key=lambda item: (*item[1]["data_offsets"], item[0])))
    for name, entry in entries.items():
        if entry["data_offsets"][0] != end:
            raise ValueError(f"the data of tensor {name!r} begins in the wrong place")
        end = entry["data_offsets"][1]
    return metadata, entries, end


def _entry(name: str, entry: Any, begin: int) -> Entry:
    """What the header says of a tensor, checked, with offsets from the beginning of the file."""
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"tensor {name!r} lacks its type, its shape or its place")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    lists = isinstance(shape, list) and isinstance(offsets, list) and len(offsets) == 2
    if not lists or not isinstance(dtype, str) or not all(type(n) is int and n >= 0 for n in (*shape, *offsets)):
        raise ValueError(f"tensor {name!r} has a type, a shape or a place that cannot be")
    if dtype in _TYPES and offsets[1] - offsets[0] != math.prod(shape) * _TYPES[dtype].itemsize:
        raise ValueError(f"tensor {name!r} has not as many bytes as its shape takes")
    return {"dtype": dtype, "shape": shape, "data_offsets": (begin + offsets[0], begin + offsets[1])}


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("its header says something twice")
    return found


def tensor_in(data: Tensor, entry: Entry, start: int = 0) -> Tensor:
    """What of `data`, a file's bytes from `start` on, is a tensor; a copy if it does not begin where its type can."""
    begin, end = (offset - start for offset in entry["data_offsets"])
    dtype = _TYPES[entry["dtype"]]
    part = data[begin:end] if begin % dtype.itemsize == 0 else data[begin:end].clone()
    return part.view(dtype).view(entry["shape"])


def _deeper_than(levels: int, value: object) -> bool:
    """Whether lists and objects nest deeper than `levels`; what Python itself can parse depends on its version."""
    level = [value]
    for _ in range(levels):
        level = [
            inner
            for outer in level
            if isinstance(outer, dict | list)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
        if not level:
            return False
    return True


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def _digest(text: str, tensors: Mapping[str, Tensor]) -> str:
    total = hashlib.sha256(text.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        shape = "x".join(map(str, tensor.shape))
        total.update(f"\n{name} {DTYPES[tensor.dtype]} {shape}\n".encode())
        if tensor.numel():
            total.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return total.hexdigest()
