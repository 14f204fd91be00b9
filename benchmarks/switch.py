"""What a switch of bit-widths costs: a whole model, against a device copy of the same bytes and against a file.

    python benchmarks/switch.py            # a table, and results/switch-h200.json
    python benchmarks/switch.py --tiny     # a try on any machine, under Triton's interpreter without a GPU

`double_rounding`: the master codes are read and the words of the new width written, one launch for all layers. The
device time of the launch is set against that of a copy which reads and writes as many bytes in sum; both are queued
behind a waiting kernel, so that the host's part is not in them. `wall_ms` is all of it, from the call of `set_bits` to
the end on the device. `reload_ms` reads the words of the new width from a file that is in the host's cache. `nested`
moves nothing: a width is the number of planes that the next call reads.

After all this, random plans are switched through; memory must not have grown, and the words must be those of an arena
that was made anew.
"""

import argparse
import itertools
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from timing import add_arguments, write_record
from torch import Tensor, nn

from bitdial import build_model
from bitdial.kernels.arena import PackedArena

BITS = (8, 6, 4, 3, 2)
WAIT_CYCLES = 2_000_000  # about a millisecond, in which the host queues what is measured


def resnet50_shapes() -> dict[str, tuple[int, int]]:
    """Every convolution and linear layer; a repacked weight may be in any order, so each is cut into 16 rows."""
    with torch.device("meta"):
        model = build_model("resnet50")
    layers = {n: m.weight.numel() for n, m in model.named_modules() if isinstance(m, nn.Conv2d | nn.Linear)}
    return {name: (16, count // 16) for name, count in layers.items()}


def stack_shapes(layers: int, size: int) -> dict[str, tuple[int, int]]:
    return {f"layers.{i}": (size, size) for i in range(layers)}


def make_arena(shapes: dict[str, tuple[int, int]], seed: int, device: torch.device) -> PackedArena:
    """Random 8-bit codes in an arena with room for every width."""
    generator = torch.Generator(device).manual_seed(seed)

    def codes(shape: tuple[int, int]) -> Tensor:
        return torch.randint(-128, 128, shape, generator=generator, device=device, dtype=torch.int8)

    return PackedArena({n: codes(s) for n, s in shapes.items()}, high=8, bit_choices=BITS, device=device)


def queued(action: Callable[[], object], device: torch.device) -> float:
    """Milliseconds of `action` on the device; on the CPU, all of it."""
    if device.type != "cuda":
        began = time.perf_counter()
        action()
        return 1e3 * (time.perf_counter() - began)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    torch.cuda._sleep(WAIT_CYCLES)
    begin.record()
    action()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def wall(action: Callable[[], object], device: torch.device) -> float:
    """Milliseconds from the call until the device has done it."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    action()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - began)


def measure(
    name: str, arena: PackedArena, pairs: list[tuple[int, int]], rounds: int, folder: Path
) -> list[dict[str, Any]]:
    """A row for each pair of widths, and one for `nested`."""
    device, rows = arena.device, []
    tables = {bits: torch.full_like(arena._bits, bits) for bits in BITS}
    for source, target in pairs:
        arena.set_bits(source)
        moved = arena.bytes_moved(target)
        there = torch.empty(moved // 8, dtype=torch.int32, device=device)
        here = torch.zeros_like(there)
        device_ms, copy_ms, wall_ms = [], [], []
        for _ in range(rounds):
            arena.set_bits(source)
            arena._bits.copy_(tables[target])
            device_ms.append(queued(arena.repack, device))
            copy_ms.append(queued(lambda here=here, there=there: there.copy_(here), device))
            arena.set_bits(source)
            wall_ms.append(wall(lambda target=target: arena.set_bits(target), device))
        del there, here
        row = {"model": name, "scheme": "double_rounding", "from": source, "to": target,
               "ms": round(statistics.median(device_ms), 5), "copy_ms": round(statistics.median(copy_ms), 5),
               "bytes_moved": moved, "wall_ms": round(statistics.median(wall_ms), 4),
               "reload_ms": round(reload_ms(arena, folder), 3)}  # fmt: skip
        rows.append(row)
        print(f"{name:12} {source} -> {target}  {row['ms']:8.4f} ms  copy {row['copy_ms']:8.4f} ms  "
              f"{row['ms'] / row['copy_ms']:5.2f}x  wall {row['wall_ms']:8.4f} ms  file {row['reload_ms']:9.2f} ms  "
              f"{moved / 1e6:9.2f} MB", flush=True)  # fmt: skip
    return rows


def reload_ms(arena: PackedArena, folder: Path) -> float:
    """Milliseconds to read the active words from a file, the better of two tries."""
    file = folder / "words.safetensors"
    save_file({name: arena.words(name).contiguous() for name in arena.names}, file)
    return min(wall(lambda: load_file(file, device=str(arena.device)), arena.device) for _ in range(2))


def random_switches(arena: PackedArena, fresh: Callable[[], PackedArena], count: int, seed: int) -> dict[str, Any]:
    """Switch through random plans; what memory did, and whether the words are those of a fresh arena."""
    draw, on_gpu = random.Random(seed), arena.device.type == "cuda"
    before = torch.cuda.memory_allocated() if on_gpu else arena.bytes_held()
    for _ in range(count):
        arena.set_bits({name: draw.choice(BITS) for name in arena.names})
    if on_gpu:
        torch.cuda.synchronize()
    grown = (torch.cuda.memory_allocated() if on_gpu else arena.bytes_held()) - before
    other = fresh()
    other.set_bits(arena.bits)
    equal = all(torch.equal(arena.words(name), other.words(name)) for name in arena.names)
    return {"switches": count, "bytes_grown": grown, "equal_to_fresh": equal}


def main() -> None:
    """Measure, print a table, write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=["resnet50", "linears-1b"], default=["resnet50", "linears-1b"])
    add_arguments(parser, rounds=9)
    options = parser.parse_args()
    device = torch.device(options.device)
    if device.type == "cpu":
        if not options.tiny:
            print("No GPU here: nothing to measure. --tiny tries the script under Triton's interpreter.")
            return
        os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported, which the first kernel does
    record: dict[str, Any] = {"rows": [], "memory": {}, "random": {}}
    models = {"tiny": stack_shapes(2, 256)} if options.tiny else {
        name: resnet50_shapes() if name == "resnet50" else stack_shapes(60, 4096) for name in options.models
    }  # fmt: skip
    pairs = [(8, 2), (2, 4)] if options.tiny else list(itertools.permutations(BITS, 2))
    for name, shapes in models.items():
        arena = make_arena(shapes, options.seed, device)
        weights = sum(rows * columns for rows, columns in shapes.values())
        with tempfile.TemporaryDirectory() as folder:
            record["rows"] += measure(name, arena, pairs, options.rounds, Path(folder))
        record["rows"] += [{"model": name, "scheme": "nested", "from": a, "to": b, "ms": 0.0, "copy_ms": 0.0,
                            "bytes_moved": 0, "note": "by construction, not timed"} for a, b in pairs]  # fmt: skip
        record["memory"][name] = {
            "weights": weights,
            "master_bytes": arena.master.numel() * 4,
            "active_bytes": arena.active.numel() * 4,
            "held_bytes": arena.bytes_held(),
        }
        record["random"][name] = random_switches(
            arena, lambda shapes=shapes: make_arena(shapes, options.seed, device), 3 if options.tiny else 1000,
            options.seed,
        )  # fmt: skip
        print(f"{name:12} {record['memory'][name]} {record['random'][name]}", flush=True)
        del arena
    write_record("switch", options, **record)


if __name__ == "__main__":
    main()
