"""Damaged files through `read_artifact` and `load`: each is refused with a BitdialError, or loads and is consistent.

    python tests/long/damaged_files.py            # 100,000 files, results/reliability.json

A case is one of some fifteen small artifacts, three of them progressive, with one kind of damage:

    bits        1 to 8 flipped bits, anywhere or in the header
    cut         the file ends early, or has more bytes at its end
    splice      bytes replaced, put in or taken out, by random ones or those of another artifact
    manifest    the manifest, or the list of parts, edited at a random place, the digest computed anew
    tensors     bytes, types or shapes of tensors changed, the digests computed anew

A file that loads must give, at every width and stored plan, finite or not, the outputs of a fresh load at that setting;
so must one that is loaded at its lowest width and then grown.
What fails the campaign: another exception, a process that dies, 30 seconds for one file, more than 1 GiB of memory, two
different outputs. Cases are numbered: `--first N --count 1` repeats case N.
"""

import argparse
import copy
import dataclasses
import hashlib
import json
import logging
import multiprocessing
import random
import resource
import signal
import struct
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import torch
from campaign import counted, end, images, network, options, random_plan, record

from bitdial import (
    BitdialError,
    BitPlan,
    QuantConfig,
    Rule,
    get_bits,
    grow,
    load,
    read_artifact,
    repack,
    save,
    set_bits,
)

SECONDS = 30
SHARES_A_PROCESS = 20
MEMORY = 1 << 30
PROGRESSIVE = (1, 2, 3)  # the settings of which there is a progressive file, too
DTYPES = ("F32", "F64", "F16", "BF16", "I8", "I16", "I32", "I64", "U8", "BOOL", "X", "")
VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 2, 3, 8, 9, 255, 2**31, 2**63, 2**64, 10**30, 0.5, -0.0, 1e308, "", "a", "nested",
    "nested+8", "nested+" + "9" * 50, "../x", "\x00", "é" * 300, [], [[]], [8, 4, 2], [2, 4, 8], [8] * 9, {}, {"": {}},
    {"name": "mobilenet_v2", "arguments": {}}, {"layers": {}, "default": 4}, {"type": "Linear"},
]  # fmt: skip


Share = tuple[Counter[str], list[str], float, float]  # what `work` found


class TooLong(BaseException):
    """Raised where a file takes longer than SECONDS."""


# --- artifacts to damage --------------------------------------------------------------------------


def settings() -> list[dict[str, Any]]:
    """QuantConfigs that differ in what their files hold."""
    found: list[dict[str, Any]] = [
        {},
        {"scheme": "nested"},
        {"scheme": "nested+8", "activations": "asymmetric"},
        {"scheme": "centred", "bit_choices": (6, 4, 3)},
        {"scheme": "truncate", "per_channel": False, "bit_choices": (7, 5)},
        {"scheme": "adabits", "activations": "signed"},
        {"scheme": "lsq", "bit_choices": (4, 2)},
        {"scheme": "dorefa", "activations": "float", "bit_choices": (8, 2)},
        {"ties": "up", "bit_choices": (3, 2), "keep_first_last": False},
        {"rules": (Rule(type="Linear", quantize=True, activations="dynamic"),)},
    ]
    if "group_size" in {field.name for field in dataclasses.fields(QuantConfig)}:
        found += [{"group_size": 4}, {"group_size": 4, "scheme": "nested", "bit_choices": (4, 2)}]
    return found


def make_bases(folder: Path) -> None:
    """Write the artifacts into `folder`."""
    for number, config in enumerate(settings()):
        model, path = network(**config), folder / f"{number:02}.safetensors"
        widths = QuantConfig(**config).bit_choices
        plan = random_plan(get_bits(model), widths, random.Random(number))
        save(
            model, path, plans={"mixed": plan, "low": BitPlan({}, default=widths[-1])}, metrics={"accuracy": {"8": 0.5}}
        )
        if number in PROGRESSIVE:
            repack(path, folder / f"{number:02}-parts.safetensors")


# --- damage ---------------------------------------------------------------------------------------


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
    of_parts = parts is not None and draw.random() < 0.3
    for _ in range(draw.choice((1, 1, 1, 2, 4))):
        if not (all_places := places(parts if of_parts else manifest)):
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


def damaged(bases: list[bytes], seed: int, number: int) -> tuple[str, bytes]:
    """Case `number`: the kind of damage, and the file."""
    draw = random.Random(f"{seed}/{number}")
    data, other = draw.choice(bases), draw.choice(bases)
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
    return kind, changed


# --- what became of it ----------------------------------------------------------------------------


def outcome(path: Path) -> str:
    """'refused', 'consistent', or what went wrong."""
    try:
        artifact = read_artifact(path, cut=True)
        live = load(path)
        if artifact.parts:
            live = load(path, bit_choices=artifact.bit_choices[-1:])
            grow(live, path)
        for setting in (*artifact.available, *artifact.available_plans()):
            set_bits(live, setting)
            fresh = load(path)
            set_bits(fresh, setting)
            if get_bits(live) != get_bits(fresh) or read_artifact(path, cut=True).digest != artifact.digest:
                return f"two loads differ at {setting}"
            results = []
            for model in (live, fresh):
                try:
                    with torch.no_grad():
                        results.append(model(images()))
                except BitdialError as problem:
                    results.append(torch.tensor(list(str(problem).encode())))
            if not torch.equal(results[0].nan_to_num(1e9), results[1].nan_to_num(1e9)):
                return f"two outputs at {setting}"
    except BitdialError:
        return "refused"
    return "consistent"


def tried(path: Path) -> str:
    """`outcome`, with a limit on its time."""

    def stop(*_: object) -> None:
        raise TooLong

    signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        return outcome(path)
    except TooLong:
        return f"more than {SECONDS} s"
    except MemoryError:
        return f"more than {MEMORY >> 20} MiB"
    except Exception as problem:
        return f"{type(problem).__name__}: {problem}"[:300]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def resident() -> float:
    """MiB of this process in memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def work(folder: Path, seed: int, first: int, count: int) -> Share:
    """Try some cases: how many ended how, what failed, MiB that this process has grown by, the longest in seconds."""
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)  # of files that are cut
    bases = [path.read_bytes() for path in sorted(folder.glob("*.safetensors"))]
    path = folder / f"case.{first}"
    path.write_bytes(bases[0])
    assert tried(path) == "consistent"  # and everything that is loaded once is loaded now
    virtual = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (virtual + MEMORY, resource.RLIM_INFINITY))
    ends: Counter[str] = Counter()
    failures, before, longest = [], resident(), 0.0
    for number in range(first, first + count):
        kind, data = damaged(bases, seed, number)
        path.write_bytes(data)
        began = time.monotonic()
        found = tried(path)
        longest = max(longest, time.monotonic() - began)
        ends[f"{kind}, {found if found in ('refused', 'consistent') else 'failed'}"] += 1
        if found not in ("refused", "consistent"):
            failures.append(f"case {number} ({kind}): {found}")
    path.unlink()
    return ends, failures, resident() - before, longest


def shares(folder: Path, chosen: argparse.Namespace, starts: list[int]) -> Iterator[tuple[int, Share | None]]:
    """The first case of each share and what came of it, None if its process died; processes are new now and then.

    (`max_tasks_per_child` would renew them, but in Python 3.11 the pool waits forever once all have ended at a time.)
    """
    after, most = chosen.first + chosen.count, SHARES_A_PROCESS * chosen.workers
    for at in range(0, len(starts), most):
        with ProcessPoolExecutor(chosen.workers, mp_context=multiprocessing.get_context("spawn")) as pool:
            waiting = {
                pool.submit(work, folder, chosen.seed, start, min(chosen.chunk, after - start)): start
                for start in starts[at : at + most]
            }
            for done in as_completed(waiting):
                try:
                    yield waiting[done], done.result()
                except BrokenProcessPool:
                    yield waiting[done], None


def main() -> None:
    """Run the campaign."""
    chosen = options(__doc__, 100_000, first=0, workers=2, chunk=500)
    began = time.monotonic()
    ends: Counter[str] = Counter()
    failures: list[str] = []
    growth, longest = 0.0, 0.0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_bases(folder)
        bases = len(list(folder.iterdir()))
        starts = list(range(chosen.first, chosen.first + chosen.count, chosen.chunk))
        for start, result in counted(
            shares(folder, chosen, starts), len(starts), f"damaged files, {chosen.chunk} each"
        ):
            if result is None:
                failures.append(f"the process died in cases {start} to {start + chosen.chunk - 1}")
                break
            found, wrong, grown, slowest = result
            ends.update(found)
            failures += wrong
            growth, longest = max(growth, grown), max(longest, slowest)
    figures = {
        "files": chosen.count,
        "artifacts": bases,
        "refused": sum(n for key, n in ends.items() if key.endswith("refused")),
        "consistent": sum(n for key, n in ends.items() if key.endswith("consistent")),
        "failed": len(failures),
        "kinds": dict(sorted(ends.items())),
        "largest_growth_mib": round(growth, 1),
        "longest_seconds": round(longest, 3),
        "seconds": round(time.monotonic() - began, 1),
    }
    print({key: value for key, value in figures.items() if key != "kinds"})
    record(chosen.out, "damaged_files", "damaged_files", chosen.seed, figures)
    end(failures)


if __name__ == "__main__":
    main()
