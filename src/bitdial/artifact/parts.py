"""An artifact in parts, one for each width: what belongs to which, taken apart and put together again.

A layer has its codes as bit planes, the highest first, and a part holds those planes that its width needs beyond the
widths before it. What else a file has for each width (activation scales, sets of norms) is in rows, and goes with them.
All the rest is in the first part, with the lowest width. What a part of `b` bits holds of a tensor `NAME` is called
`.b/NAME`; see docs/artifact-format.md.

    .2/conv1/codes       planes 0 and 1
    .4/conv1/codes       planes 2 and 3
    .4/conv1/act_scale   the row of 4 bits

A layer with a width of its own (`fixed_bits`) is in the first part up to that width.

Where parts are missing, the artifact in memory is as large as ever: missing planes are zero, and a missing row is that
of the lowest width. So codes of the widths that are there are what they should be, and those of others are not offered.
"""

import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from bitdial import functional as bf
from bitdial.artifact.format import FLOAT
from bitdial.artifact.tensors import are_sizes
from bitdial.errors import ArtifactError, BitdialError
from bitdial.files.container import write_container
from bitdial.files.parts import FilePart, PartedFile, read_parts, write_parts
from bitdial.functional.bitstream import pack_bytes, pack_planes, unpack_bytes, unpack_planes

_OF_WIDTH = ("act_scale", "act_clip_ratio", "act_zero_point")  # of a layer, a row for each width
_NAME = re.compile(r"\.([2-8])/(.+)", re.DOTALL)


class Piece(NamedTuple):
    """The rows that a part has of a tensor, and which rows of the whole tensor they are."""

    name: str
    rows: tuple[int, ...]
    values: Tensor


def file_parts(path: str | os.PathLike[str]) -> tuple[FilePart, ...]:
    """The parts of the progressive file at `path`, the lowest width first: (bits, begin, end, digest) each.

    Only the header of the file is read, and nothing else need be there: whoever fetches a file piece by piece finds
    here which bytes to fetch next. `end` of the last part is the size of the whole file.
    """
    found = read_parts(path, error=ArtifactError)
    if found is None:
        raise ArtifactError(
            f"{path} is not a progressive file, or its header is cut; save(..., progressive=True) writes one, and "
            "repack(path, out) makes one of another file"
        )
    return found.parts


def write_tensors(
    path: str | os.PathLike[str],
    tensors: Mapping[str, Tensor],
    manifest: dict[str, Any],
    layout: "Layout | None",
    check: Callable[[Path], None] | None = None,
) -> str:
    """Write the file of an artifact, whole or in the parts of `layout`; returns its digest."""
    if layout is None:
        return write_container(path, tensors, manifest, error=ArtifactError, check=check)
    return write_parts(path, layout.split(tensors), manifest, error=ArtifactError, check=check)


class Layout:
    """Which part of a file has what; made of a `manifest` whose scheme and widths are checked."""

    def __init__(self, manifest: dict[str, Any]):
        self.manifest = manifest
        self.widths: tuple[int, ...] = tuple(manifest["bit_choices"])
        self.high, self.lowest = self.widths[0], self.widths[-1]
        if not bf.scheme_of(manifest["scheme"]).nests:
            raise ArtifactError(
                f"scheme {manifest['scheme']!r} rounds at each width anew, so low codes are no prefixes and parts are "
                "not possible; train with 'nested', or save a whole file"
            )

    # --- what belongs where -------------------------------------------------------------------------

    def part(self, layer: str, bits: int) -> int:
        """The part that completes `layer` at `bits`, by its width."""
        entry = self._entry("layers", layer)
        fixed = entry.get("fixed_bits", 0)
        if type(fixed) is not int:
            raise ArtifactError(f"layer {layer!r}: fixed_bits={fixed!r} is not a width")
        return self.lowest if bits <= fixed else bits

    def planes(self, layer: str) -> list[int]:
        """For each plane of the layer's codes, the highest first, the part that it is in."""
        return [self.part(layer, min(b for b in self.widths if b >= plane)) for plane in range(1, self.high + 1)]

    def rows(self, name: str, count: int) -> list[int] | None:
        """For each of the `count` rows of the tensor called `name`, its part; None if it has nothing for each width."""
        owner, _, part = name.rpartition("/")
        if name.startswith(FLOAT):
            return None
        if part in _OF_WIDTH and owner in self.manifest["layers"]:
            return [self.part(owner, bits) for bits in self.widths]
        if owner in self.manifest.get("sites", {}):
            return self._follow(self._entry("sites", owner).get("follows"))
        if owner not in self.manifest["norms"]:
            return None
        entry = self._entry("norms", owner)
        own = self._follow(entry.get("follows"))
        if entry.get("fed_by") is None or (count == len(own) and "transitions" in entry):
            return own
        return [max(fed, mine) for fed in self._follow(entry["fed_by"]) for mine in own]

    def _follow(self, layer: Any) -> list[int]:
        if not isinstance(layer, str) or layer not in self.manifest["layers"]:
            raise ArtifactError(f"something follows {layer!r}, which is not a quantised layer")
        return [self.part(layer, bits) for bits in self.widths]

    def _entry(self, table: str, name: str) -> dict[str, Any]:
        entry = self.manifest[table].get(name)
        if not isinstance(entry, dict):
            raise ArtifactError(f"{table}: the entry of {name!r} is not a JSON object")
        return entry

    # --- taken apart --------------------------------------------------------------------------------

    def split(self, tensors: Mapping[str, Tensor]) -> list[tuple[int, dict[str, Tensor]]]:
        """The parts of a whole artifact's `tensors`, the lowest width first: its width, and its tensors by name."""
        found: dict[int, dict[str, Tensor]] = {bits: {} for bits in reversed(self.widths)}
        for name, tensor in tensors.items():
            owner, _, part = name.rpartition("/")
            if part == "codes" and owner in self.manifest["layers"] and not name.startswith(FLOAT):
                rows, tensor = self.planes(owner), self._planes(owner, tensor)
            elif (others := self.rows(name, len(tensor) if tensor.dim() else 0)) is not None:
                rows = others
            else:
                found[self.lowest][name] = tensor
                continue
            for bits in set(rows):
                found[bits][f".{bits}/{name}"] = tensor[[i for i, each in enumerate(rows) if each == bits]]
        return list(found.items())

    def _planes(self, owner: str, codes: Tensor) -> Tensor:
        if self.high < 8:
            codes = unpack_bytes(codes, self.high, self._weights(owner))
        return pack_planes(codes, self.high)

    def _weights(self, owner: str) -> int:
        shape = self._entry("layers", owner).get("shape")
        if not isinstance(shape, list) or not shape or not are_sizes(tuple(shape)):
            raise ArtifactError(f"layer {owner!r}: {shape!r} is not the shape of a weight")
        return math.prod(shape)

    # --- put together -------------------------------------------------------------------------------

    def join(self, file: PartedFile) -> dict[str, Tensor]:
        """The tensors of a whole artifact, of a file whose first parts have been read."""
        tensors = {name: tensor for name, tensor in file.tensors.items() if not _NAME.fullmatch(name)}
        for name, pieces in self._pieces(file).items():
            if self._has_planes(name):
                tensors[name] = self._codes(name.rpartition("/")[0], pieces)
                continue
            last = pieces[0].values[-1:]  # the lowest width's
            count = 1 + max(row for rows in self.places(file, name).values() for row in rows)
            tensors[name] = last.expand(count, *last.shape[1:]).clone()
            for piece in pieces:
                tensors[name][list(piece.rows)] = piece.values
        return tensors

    def pieces(self, file: PartedFile) -> Iterator[Piece]:
        """The rows that the parts which have been read hold of tensors; of codes, which planes."""
        for found in self._pieces(file).values():
            yield from found

    def new_codes(self, piece: Piece) -> Tensor:
        """The codes of a layer (weights,) as far as `piece`, some of their planes, says them; int8."""
        owner = piece.name.rpartition("/")[0]
        try:
            return unpack_planes(piece.values, self.high, self._weights(owner), first=piece.rows[0])
        except BitdialError as problem:
            raise ArtifactError(f"layer {owner!r}: {problem}") from problem

    def _codes(self, owner: str, pieces: list[Piece]) -> Tensor:
        """The codes as a whole artifact has them, with zeros for planes that are missing."""
        codes = self.new_codes(pieces[0])
        for piece in pieces[1:]:
            codes |= self.new_codes(piece)
        if self.high < 8:
            return pack_bytes(codes, self.high)
        return codes.view(self.manifest["layers"][owner]["shape"])

    def _has_planes(self, name: str) -> bool:
        owner, _, part = name.rpartition("/")
        return part == "codes" and owner in self.manifest["layers"]

    def _pieces(self, file: PartedFile) -> dict[str, list[Piece]]:
        """By tensor, what has been read of it, the lowest width first; checks what the header says of all parts."""
        if tuple(part.bits for part in reversed(file.parts)) != self.widths:
            raise ArtifactError(f"its parts are not for its widths {self.widths}")
        groups: dict[str, dict[int, str]] = {}
        for name, entry in file.entries.items():
            found = _NAME.fullmatch(name)
            bits = self.lowest if found is None else int(found[1])
            if bits not in self.widths or (file.part_of(name) != bits and math.prod(entry["shape"])):
                raise ArtifactError(f"the tensor {name!r} is not in the part that it belongs to")
            if found is not None:
                groups.setdefault(found[2], {})[bits] = name
        result: dict[str, list[Piece]] = {}
        for name, group in groups.items():
            if name in file.entries:
                raise ArtifactError(f"the tensor {name!r} is there as a whole and in parts")
            places = self.places(file, name)
            self._check_group(file, name, group, places)
            read = [bits for bits in sorted(group) if group[bits] in file.tensors]
            result[name] = [Piece(name, places[bits], file.tensors[group[bits]]) for bits in read]
        return {name: pieces for name, pieces in result.items() if pieces}

    def places(self, file: PartedFile, name: str) -> dict[int, tuple[int, ...]]:
        """For each part that has some of it, which rows of the tensor called `name`, or planes of codes."""
        owner, _, _ = name.rpartition("/")
        if self._has_planes(name):
            rows: list[int] | None = self.planes(owner)
        else:
            shapes = [file.entries[each]["shape"] for b in self.widths if (each := f".{b}/{name}") in file.entries]
            rows = self.rows(name, sum(shape[0] if shape else 0 for shape in shapes))
        if rows is None:
            raise ArtifactError(f"the tensor {name!r} is in parts, but has nothing for each width")
        return {bits: tuple(i for i, each in enumerate(rows) if each == bits) for bits in set(rows)}

    def _check_group(
        self, file: PartedFile, name: str, group: dict[int, str], places: dict[int, tuple[int, ...]]
    ) -> None:
        """Raise ArtifactError unless the header has every piece of a tensor, each of its shape."""
        if odd := sorted(group.keys() ^ places.keys()):
            raise ArtifactError(f"the tensor {f'.{odd[0]}/{name}'!r} is {'missing' if odd[0] in places else 'unknown'}")
        first = file.entries[group[self.lowest]]
        tail, dtype = list(first["shape"])[1:], first["dtype"]
        if self._has_planes(name):
            tail, dtype = [-(-self._weights(name.rpartition("/")[0]) // 8)], "U8"
        for bits, full in group.items():
            entry = file.entries[full]
            if entry["dtype"] != dtype or list(entry["shape"]) != [len(places[bits]), *tail]:
                raise ArtifactError(
                    f"the tensor {full!r} is {entry['dtype']} of shape {tuple(entry['shape'])}, expected {dtype} of "
                    f"shape {(len(places[bits]), *tail)}"
                )
