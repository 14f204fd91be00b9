"""A .safetensors file in parts, of which the first ones are enough: what `container` writes, laid out to be cut.

The tensors of the first part come first, then those of the second, and so on: a part is a range of bytes, and a file
that ends behind one is a file with fewer parts. The metadata has exactly three entries, `manifest`, `parts`, `digest`:

    parts    JSON text, [{"bits": number, "end": where its data ends, "digest": sha256 of its bytes}, ...], ascending
    digest = sha256( manifest text "\\n" parts text
                     then for each tensor, in the order of the data: "\\n" name " " dtype " " shape )

So the digest says what all parts are, and is checked when any of them is read; that of a part only with the part.
"""

import hashlib
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from io import FileIO
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bitdial.errors import BitdialError
from bitdial.files.atomic import replacing
from bitdial.files.container import (
    DTYPES,
    METADATA,
    UNREADABLE,
    Entry,
    check_storable,
    check_types,
    header_size,
    manifest_text,
    next_bytes,
    parsed_header,
    parsed_manifest,
    reading,
    tensor_in,
)

_ENTRIES = {"manifest", "parts", "digest"}
_FIELDS = {"bits", "end", "digest"}
_MOST_PARTS = 7


class FilePart(NamedTuple):
    """Bytes `begin` to `end` of a file, counted from 0, `end` exclusive: with those before, all up to `bits` bits."""

    bits: int
    begin: int
    end: int
    digest: str


class PartedFile(NamedTuple):
    """What the header of a file in parts says, the file's `size` at present, and the tensors of the parts read."""

    manifest: dict[str, Any]
    digest: str
    parts: tuple[FilePart, ...]
    entries: dict[str, Entry]
    size: int
    tensors: dict[str, Tensor]

    @property
    def there(self) -> tuple[int, ...]:
        """The `bits` of the parts that the file has, ascending; it may end earlier than its header says."""
        return tuple(part.bits for part in self.parts if part.end <= self.size)

    def part_of(self, name: str) -> int:
        """The `bits` of the part that the tensor called `name` lies in."""
        return next(part.bits for part in self.parts if self.entries[name]["data_offsets"][1] <= part.end)


def write_parts(
    path: str | os.PathLike[str],
    parts: Sequence[tuple[int, Mapping[str, Tensor]]],
    manifest: dict[str, Any],
    *,
    error: type[BitdialError],
    check: Callable[[Path], None] | None = None,
) -> str:
    """Write `parts`, (bits, tensors) each, and `manifest` to `path` atomically and return the digest.

    `check` is as that of `write_container`.
    """
    path = Path(path)
    held: list[tuple[str, Tensor]] = []
    ends: list[dict[str, Any]] = []
    end = 0
    for bits, tensors in parts:
        check_storable(path, tensors, error)
        plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        # Elements of many bytes first, so that they begin where their type can; tensors without any bytes at last.
        mine = sorted(plain.items(), key=lambda item: (item[1].nbytes == 0, -item[1].element_size(), item[0]))
        total = hashlib.sha256()
        for _, tensor in mine:
            total.update(_bytes(tensor))
            end += tensor.nbytes
        held += mine
        ends.append({"bits": bits, "end": end, "digest": total.hexdigest()})
    head, digest = _head(manifest_text(path, manifest, error), ends, held)
    with replacing(path, error=error) as temporary:
        with temporary.open("wb") as file:
            file.write(head)
            for _, tensor in held:
                file.write(_bytes(tensor))
        held.clear()  # a reader needs as much memory again
        if check is not None:
            check(temporary)
    return digest


def _head(text: str, ends: list[dict[str, Any]], held: Sequence[tuple[str, Tensor]]) -> tuple[bytes, str]:
    """The bytes before the data, and the digest."""
    entries: dict[str, Entry] = {}
    end = 0
    for name, tensor in held:
        begin, end = end, end + tensor.nbytes
        entries[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    entries = dict(sorted(entries.items(), key=lambda item: (*item[1]["data_offsets"], item[0])))
    listed = json.dumps(ends, separators=(",", ":"))
    metadata = {"manifest": text, "parts": listed, "digest": _digest(text, listed, entries)}
    header = json.dumps({METADATA: metadata, **entries}, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header, metadata["digest"]


def _bytes(tensor: Tensor) -> memoryview:
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy().data) if tensor.numel() else memoryview(b"")


def read_parts(
    path: str | os.PathLike[str], *, error: type[BitdialError], above: int = 0, upto: int = 0
) -> PartedFile | None:
    """The file at `path` with its parts of more than `above` and at most `upto` bits; None if it is not in parts.

    Not a byte of other parts is read. Parts that the file ends before are left out: see `there`. A part whose digest
    does not hold is an `error`. What is no readable file at all is None too, which `read_container` explains.
    """
    path = Path(path)
    with reading(path, error), path.open("rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        try:
            header = next_bytes(file, header_size(next_bytes(file, min(8, size)).numpy().tobytes(), size))
            metadata, entries, end = parsed_header(header.numpy().tobytes())
        except (ValueError, RecursionError):
            return None
        if "parts" not in metadata:
            return None
        if set(metadata) != _ENTRIES:
            raise error(f"{path} was not written by bitdial: its metadata is not {', '.join(sorted(_ENTRIES))}")
        check_types(path, entries, error)
        if _digest(metadata["manifest"], metadata["parts"], entries) != metadata["digest"]:
            raise error(f"{path} is damaged: its header does not match its digest; get a fresh copy")
        try:
            parts = _parts(metadata["parts"], 8 + header.numel(), entries, end)
            if size > end:
                raise ValueError(f"its tensors end at byte {end} of {size}")
        except (ValueError, RecursionError) as cause:
            raise error(f"{path} is {UNREADABLE}: {cause}") from cause
        manifest = parsed_manifest(path, metadata["manifest"], error)
        found = PartedFile(manifest, metadata["digest"], parts, entries, size, {})
        for part in parts:
            if above < part.bits <= upto and part.end <= size:
                found.tensors.update(_tensors(file, path, part, found, error))
    return found


def _tensors(
    file: FileIO, path: Path, part: FilePart, found: PartedFile, error: type[BitdialError]
) -> dict[str, Tensor]:
    """The tensors of one part, as parts of the memory that it is read into."""
    file.seek(part.begin)
    data = next_bytes(file, part.end - part.begin)
    if hashlib.sha256(data.numpy().data).hexdigest() != part.digest:
        below = ", ".join(str(other.bits) for other in reversed(found.parts) if other.bits < part.bits)
        others = f"; the parts before it serve {below} bits" if below else ""
        raise error(
            f"{path}: its part of {part.bits} bits is damaged: bytes {part.begin} to {part.end} do not match their "
            f"digest; get a fresh copy of them{others}"
        )
    names = [name for name in found.entries if found.part_of(name) == part.bits]
    return {name: tensor_in(data, found.entries[name], part.begin) for name in names}


def _parts(text: str, begin: int, entries: Mapping[str, Entry], end: int) -> tuple[FilePart, ...]:
    """The parts that a header lists, from byte `begin` on; ValueError unless they are tensors one after the other."""
    listed = json.loads(text)
    if not isinstance(listed, list) or not 0 < len(listed) <= _MOST_PARTS:
        raise ValueError("its parts are no list of a few")
    found: list[FilePart] = []
    stops = {begin, *(entry["data_offsets"][1] for entry in entries.values())}
    start, bits = begin, 0
    for each in listed:
        if not isinstance(each, dict) or set(each) != _FIELDS:
            raise ValueError("a part lacks its bits, its end or its digest")
        if any(type(each[key]) is not int for key in ("bits", "end")):
            raise ValueError("a part has bits or an end that is no whole number")
        if not isinstance(each["digest"], str) or re.fullmatch("[0-9a-f]{64}", each["digest"]) is None:
            raise ValueError("the digest of a part is not 64 hexadecimal digits")
        part = FilePart(each["bits"], start, begin + each["end"], each["digest"])
        if not bits < part.bits <= 8 or part.end < start or part.end not in stops:
            raise ValueError(f"its part of {part.bits} bits is out of order, or ends within a tensor")
        found.append(part)
        start, bits = part.end, part.bits
    if start != end:
        raise ValueError(f"its parts end at byte {start}, its tensors at {end}")
    return tuple(found)


def _digest(text: str, parts: str, entries: Mapping[str, Entry]) -> str:
    """That of the header; `entries` in the order of the data, which with types and shapes says where each lies."""
    total = hashlib.sha256(f"{text}\n{parts}".encode())
    for name, entry in entries.items():
        total.update(f"\n{name} {entry['dtype']} {'x'.join(map(str, entry['shape']))}".encode())
    return total.hexdigest()
