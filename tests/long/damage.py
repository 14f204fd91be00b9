"""Damage to a file: five kinds, each drawn anew for every case. See tests/long/damaged_files.py."""

import copy
import hashlib
import json
import random
import struct
from typing import Any

DTYPES = ("F32", "F64", "F16", "BF16", "I8", "I16", "I32", "I64", "U8", "BOOL", "X", "")
VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 2, 3, 4, 8, 9, 255, 2**31, 2**63, 2**64, 10**30, 0.5, -0.0, 1e308, "", "a", "nested",
    "nested+8", "nested+" + "9" * 50, "../x", "\x00", "é" * 300, [], [[]], [8, 4, 2], [2, 4, 8], [8] * 9, {}, {"": {}},
    {"name": "mobilenet_v2", "arguments": {}}, {"layers": {}, "default": 4}, {"type": "Linear"}, "dynamic", "float",
    "half", "integer", "merged", "online", "hadamard", "turn", "turn_back", {"form": "hadamard", "size": 2},
]  # fmt: skip


def damage_bits(data: bytes, draw: random.Random) -> bytes:
    changed = bytearray(data)
    (header,) = struct.unpack("<Q", data[:8])
    most = draw.choice((len(data), 8 + header, 8))
    for _ in range(draw.randint(1, 8)):
        changed[draw.randrange(most)] ^= 1 << draw.randrange(8)
    return bytes(changed)


def damage_cut(data: bytes, draw: random.Random) -> bytes:
    if draw.random() < 0.2:
        return data + draw.randbytes(draw.randint(1, 64))
    return data[: draw.randrange(len(data))]


def damage_splice(data: bytes, other: bytes, draw: random.Random) -> bytes:
    at, size = draw.randrange(len(data)), draw.randint(1, draw.choice((4, 64, 4096)))
    start = draw.randrange(len(other))
    new = draw.choice((draw.randbytes(size), other[start : start + size], bytes(size), b""))
    out = draw.choice((0, len(new), size))
    return data[:at] + new + data[at + out :]


def split(data: bytes) -> tuple[dict[str, Any], dict[str, Any], bytes, Any]:
    """The entries of the tensors, the manifest, the bytes of the tensors, and the list of parts or None."""
    (size,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + size])
    metadata = header.pop("__metadata__")
    parts = json.loads(metadata["parts"]) if "parts" in metadata else None
    return header, json.loads(metadata["manifest"]), data[8 + size :], parts


def join(entries: dict[str, Any], manifest: Any, buffer: bytes, parts: Any) -> bytes:
    """A file whose digests are right for whatever is in it."""
    text = json.dumps(manifest)
    if parts is not None:
        return join_parts(entries, text, buffer, parts)
    total = hashlib.sha256(text.encode())
    for name in sorted(entries):
        begin, stop = entries[name]["data_offsets"]
        shape = "x".join(map(str, entries[name]["shape"]))
        total.update(f"\n{name} {entries[name]['dtype']} {shape}\n".encode() + buffer[begin:stop])
    head = json.dumps({"__metadata__": {"manifest": text, "digest": total.hexdigest()}, **entries}).encode()
    return struct.pack("<Q", len(head)) + head + buffer


def join_parts(entries: dict[str, Any], text: str, buffer: bytes, parts: Any) -> bytes:
    """The same for a progressive file."""
    begin = 0
    for part in parts if isinstance(parts, list) else []:
        if isinstance(part, dict) and type(part.get("end")) is int and "digest" in part:
            part["digest"] = hashlib.sha256(buffer[begin : part["end"]]).hexdigest()
            begin = part["end"]
    listed = json.dumps(parts)
    total = hashlib.sha256(f"{text}\n{listed}".encode())
    for name, entry in sorted(entries.items(), key=lambda item: (*item[1]["data_offsets"], item[0])):
        total.update(f"\n{name} {entry['dtype']} {'x'.join(map(str, entry['shape']))}".encode())
    metadata = {"manifest": text, "parts": listed, "digest": total.hexdigest()}
    head = json.dumps({"__metadata__": metadata, **entries}).encode()
    return struct.pack("<Q", len(head)) + head + buffer


def places(value: Any) -> list[tuple[Any, Any]]:
    """(container, key) of every entry of a JSON value, inner ones too."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [found for key, inner in items for found in [(value, key), *places(inner)]]


def damage_manifest(data: bytes, draw: random.Random) -> bytes:
    entries, manifest, buffer, parts = split(data)
    part: Any = manifest
    if parts is not None and draw.random() < 0.3:
        part = parts
    elif draw.random() < 0.5:  # by one field: else most edits are in the longest, the list of operations
        field = manifest[draw.choice(sorted(manifest))]
        part = field if places(field) else manifest
    for _ in range(draw.choice((1, 1, 1, 2, 4))):
        if not (all_places := places(part)):
            break
        where, key = draw.choice(all_places)
        kind = draw.choice(("set", "set", "swap", "remove", "rename", "nudge"))
        if kind == "set":
            where[key] = copy.deepcopy(draw.choice(VALUES))
        elif kind == "swap":
            other, its = draw.choice(all_places)
            where[key] = copy.deepcopy(other[its])
        elif kind == "nudge" and type(where[key]) in (int, float):
            where[key] += draw.choice((-1, 1, 0.5, 256))
        elif kind == "remove":
            del where[key]
        elif isinstance(where, dict):
            where[draw.choice(("", "x", f"{key}x", "conv1", "layers"))] = where.pop(key)
    return join(entries, manifest, buffer, parts)


def damage_tensors(data: bytes, draw: random.Random) -> bytes:
    entries, manifest, buffer, parts = split(data)
    changed = bytearray(buffer)
    for _ in range(draw.choice((1, 1, 2, 5))):
        name = draw.choice(sorted(entries))
        entry, kind = (
            entries[name],
            draw.choice(("bits", "bits", "word", "type", "shape", "offsets", "remove", "rename")),
        )
        begin, stop = entry["data_offsets"]
        if kind == "bits" and 0 <= begin < stop <= len(changed):
            changed[draw.randrange(begin, stop)] ^= 1 << draw.randrange(8)
        elif kind == "word" and 0 <= begin <= stop - 4 <= len(changed) - 4:
            at = begin + 4 * draw.randrange((stop - begin) // 4)
            number = draw.choice((float("nan"), float("inf"), 0.0, -1.0, 1e-45, 3e38, 1e30))
            changed[at : at + 4] = struct.pack("<f", number)
        elif kind == "type":
            entry["dtype"] = draw.choice(DTYPES)
        elif kind == "shape":
            entry["shape"] = draw.choice(
                ([], [0], [1], [2**40, 2**40], [-1], entry["shape"][::-1], [*entry["shape"], 1])
            )
        elif kind == "offsets":
            entry["data_offsets"] = draw.choice(([0, 0], [stop, begin], [begin, stop + 1], [-4, 0], [0, 2**62]))
        elif kind == "remove" and len(entries) > 1:
            del entries[name]
        elif kind == "rename":
            entries[draw.choice(("x", "conv1/codes", f"{name}x"))] = entries.pop(name)
    return join(entries, manifest, bytes(changed), parts)


def damaged(bases: list[bytes], seed: int, number: int) -> tuple[int, str, bytes]:
    """Case `number`: which of the `bases` it was made of, the kind of damage, and the file."""
    draw = random.Random(f"{seed}/{number}")
    chosen = draw.randrange(len(bases))
    data, other = bases[chosen], draw.choice(bases)
    kind = draw.choice(("bits", "cut", "splice", "manifest", "manifest", "tensors", "tensors"))
    ways = {
        "bits": damage_bits,
        "cut": damage_cut,
        "splice": lambda data, draw: damage_splice(data, other, draw),
        "manifest": damage_manifest,
        "tensors": damage_tensors,
    }
    plain = join(*split(data))
    while (changed := ways[kind](data, draw)) in (data, plain):  # some draws change nothing
        pass
    return chosen, kind, changed
