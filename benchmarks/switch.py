"""What a switch of bit-widths costs: a whole model, against a device copy of the same bytes and against a file.

    python benchmarks/switch.py            # a table, and results/switch-h200.json
    python benchmarks/switch.py --tiny     # a try on any machine, under Triton's interpreter without a GPU

**Packed words** (`resnet50`, `linears-1b`). `double_rounding`: the master codes are read and the words of the new width
written, one launch for all layers. The device time of the launch is set against that of a copy which reads and writes
as many bytes in sum; both are queued behind a waiting kernel, so that the host's part is not in them. `wall_ms` is all
of it, from the call of `set_bits` to the end on the device. `reload_ms` reads the words of the new width from a file
that is in the host's cache. `nested` moves nothing: a width is the number of planes that the next call reads.

**A live model** (`live resnet50`): ResNet50 from a file, on integer kernels, switched by `bitdial.set_bits`. Its
integers, and all other operands of layers and norms, change in one launch; `ms` has the copy of the widths to the
device too. "plan 1" and "plan 2" are drawn at random: weight and activation bits of each layer. The file that
`reload_ms` reads has the same operands.

After all this, random plans are switched through; memory must not have grown, and the words or operands must be those
of a pool that was made anew, or of a model that was loaded anew.
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

from bitdial import BitPlan, QuantConfig, build_model, get_bits, load, prepare, save, set_bits
from bitdial.dial.dial import SWITCHBOARD, dialled_layers
from bitdial.kernels.weight_pool import PackedWeightPool

BITS = (8, 6, 4, 3, 2)
MODELS = ["resnet50", "linears-1b", "live resnet50"]
LIVE_SCHEMES = ("double_rounding", "nested")
OPERANDS = ("integers", "pad", "correction", "factor", "quantizer", "doubled", "affine_now")
WAIT_CYCLES = 10_000_000  # about 5 milliseconds, in which the host queues what is measured


def resnet50_shapes() -> dict[str, tuple[int, int]]:
    """Every convolution and linear layer; a repacked weight may be in any order, so each is cut into 16 rows."""
    with torch.device("meta"):
        model = build_model("resnet50")
    layers = {n: m.weight.numel() for n, m in model.named_modules() if isinstance(m, nn.Conv2d | nn.Linear)}
    return {name: (16, count // 16) for name, count in layers.items()}


def stack_shapes(layers: int, size: int) -> dict[str, tuple[int, int]]:
    return {f"layers.{i}": (size, size) for i in range(layers)}


def make_pool(shapes: dict[str, tuple[int, int]], seed: int, device: torch.device) -> PackedWeightPool:
    """Random 8-bit codes in a pool with room for every width."""
    generator = torch.Generator(device).manual_seed(seed)

    def codes(shape: tuple[int, int]) -> Tensor:
        return torch.randint(-128, 128, shape, generator=generator, device=device, dtype=torch.int8)

    return PackedWeightPool({n: codes(s) for n, s in shapes.items()}, high=8, bit_choices=BITS, device=device)


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


def bytes_moved(pool: PackedWeightPool, target: int) -> int:
    """What a switch of every layer to `target` reads and writes: the master and the new words."""
    changed = [pool.words(name).nbytes // bits for name, bits in pool.bits.items() if bits != target]  # a plane of each
    return sum(changed) * (pool.high + target)


def bytes_held(pool: PackedWeightPool) -> int:
    """What the master, the active words and the tables take on the device."""
    return sum(getattr(pool, part).nbytes for part in pool.on_device)


def measure(
    name: str, pool: PackedWeightPool, pairs: list[tuple[int, int]], rounds: int, folder: Path
) -> list[dict[str, Any]]:
    """A row for each pair of widths, and one for `nested`."""
    device, rows = pool.device, []
    tables = {bits: torch.full_like(pool._bits, bits) for bits in BITS}
    for source, target in pairs:
        pool.set_bits(source)
        moved = bytes_moved(pool, target)
        there = torch.empty(moved // 8, dtype=torch.int32, device=device)
        here = torch.zeros_like(there)
        device_ms, copy_ms, wall_ms = [], [], []
        for _ in range(rounds):
            pool.set_bits(source)
            pool._bits.copy_(tables[target])
            device_ms.append(queued(pool.repack, device))
            copy_ms.append(queued(lambda here=here, there=there: there.copy_(here), device))
            pool.set_bits(source)
            wall_ms.append(wall(lambda target=target: pool.set_bits(target), device))
        del there, here
        row = {"model": name, "scheme": "double_rounding", "from": source, "to": target,
               "ms": round(statistics.median(device_ms), 5), "copy_ms": round(statistics.median(copy_ms), 5),
               "bytes_moved": moved, "wall_ms": round(statistics.median(wall_ms), 4),
               "reload_ms": round(reload_ms({n: pool.words(n) for n in pool.names}, folder), 3)}  # fmt: skip
        rows.append(row)
        show(row)
    return rows


def show(row: dict[str, Any]) -> None:
    """Print a row."""
    print(f"{row['model']:16} {row['scheme']:15} {row['from']} -> {row['to']}  {row['ms']:8.4f} ms  "
          f"copy {row['copy_ms']:8.4f} ms  {row['ms'] / row['copy_ms']:5.2f}x  wall {row['wall_ms']:8.4f} ms  "
          f"file {row['reload_ms']:9.2f} ms  {row['bytes_moved'] / 1e6:9.2f} MB", flush=True)  # fmt: skip


def reload_ms(tensors: dict[str, Tensor], folder: Path) -> float:
    """Milliseconds to read `tensors` from a file to where they are, the better of two tries."""
    file, device = folder / "words.safetensors", next(iter(tensors.values())).device
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file)
    return min(wall(lambda: load_file(file, device=str(device)), device) for _ in range(2))


def random_switches(
    pool: PackedWeightPool, fresh: Callable[[], PackedWeightPool], count: int, seed: int
) -> dict[str, Any]:
    """Switch through random plans; what memory did, and whether the words are those of a fresh pool."""
    draw, on_gpu = random.Random(seed), pool.device.type == "cuda"
    before = torch.cuda.memory_allocated() if on_gpu else bytes_held(pool)
    for _ in range(count):
        pool.set_bits({name: draw.choice(BITS) for name in pool.names})
    if on_gpu:
        torch.cuda.synchronize()
    grown = (torch.cuda.memory_allocated() if on_gpu else bytes_held(pool)) - before
    other = fresh()
    other.set_bits(pool.bits)
    equal = all(torch.equal(pool.words(name), other.words(name)) for name in pool.names)
    return {"switches": count, "bytes_grown": grown, "equal_to_fresh": equal}


# --- a live model -----------------------------------------------------------------------------------


def write_model(file: Path, scheme: str, options: argparse.Namespace) -> nn.Module:
    """A network with random weights, all layers quantised, as a file; returns the float model."""
    torch.manual_seed(options.seed)
    model = build_model("cifar_resnet", blocks=1, width=4) if options.tiny else build_model("resnet50")
    config = QuantConfig(bit_choices=BITS, scheme=scheme, start="lsq", keep_first_last=False)
    images = torch.randn(2, 3, 32, 32)
    save(prepare(model, config, images), file)
    return model


def operands(live: nn.Module) -> dict[str, Tensor]:
    """What the kernels read and a width changes, by name."""
    return {name: tensor for name, tensor in live.named_buffers() if name.rpartition(".")[2] in OPERANDS}


def deciding(live: nn.Module) -> dict[str, object]:
    """For each operand, what its contents depend on, as it is set now."""
    found: dict[str, object] = {}
    for name in operands(live):
        part, _, kind = name.rpartition(".")
        owner: Any = live.get_submodule(part).owner  # the layer or norm whose operand it is
        if kind == "affine_now":
            found[name] = owner.bits, owner.fed_bits
        else:
            weight, act = owner.weight_bits, owner.act_bits
            found[name] = {"integers": weight, "pad": act, "quantizer": act}.get(kind, (weight, act))
    return found


def moved_bytes(live: nn.Module, source: int | BitPlan, target: int | BitPlan) -> int:
    """What a switch must read and write: the operands that change."""
    set_bits(live, source)
    before = deciding(live)
    set_bits(live, target)
    after, tensors = deciding(live), operands(live)
    return 2 * sum(t.numel() * t.element_size() for n, t in tensors.items() if before[n] != after[n])


def random_plan(live: nn.Module, draw: random.Random) -> BitPlan:
    return BitPlan({name: (draw.choice(BITS), draw.choice(BITS)) for name in dialled_layers(live)})


def measure_live(
    live: nn.Module, scheme: str, pairs: list[tuple[int, int]], options: argparse.Namespace, folder: Path
) -> list[dict[str, Any]]:
    """A row for each pair of widths, and for two plans."""
    device, rows, draw = next(live.buffers()).device, [], random.Random(options.seed)
    settings: dict[int | str, int | BitPlan] = {bits: bits for bits in BITS}
    settings |= {f"plan {i}": random_plan(live, draw) for i in (1, 2)}
    for begin, end in [*pairs, (8, "plan 1"), ("plan 1", "plan 2")]:
        source, target = settings[begin], settings[end]
        moved = moved_bytes(live, source, target)
        there = torch.empty(moved // 8, dtype=torch.int32, device=device)
        here = torch.zeros_like(there)
        device_ms, copy_ms, wall_ms = [], [], []
        for _ in range(options.rounds):
            for times, take in ((device_ms, queued), (wall_ms, wall)):
                set_bits(live, source)
                times.append(take(lambda target=target: set_bits(live, target), device))
            copy_ms.append(queued(lambda here=here, there=there: there.copy_(here), device))
        rows.append({
            "model": "live tiny" if options.tiny else "live resnet50", "scheme": scheme, "from": begin, "to": end,
            "ms": round(statistics.median(device_ms), 5), "copy_ms": round(statistics.median(copy_ms), 5),
            "bytes_moved": moved, "wall_ms": round(statistics.median(wall_ms), 4),
            "reload_ms": round(reload_ms(operands(live), folder), 3),
        })  # fmt: skip
        show(rows[-1])
    return rows


def random_live_switches(live: nn.Module, fresh: Callable[[], nn.Module], count: int, seed: int) -> dict[str, Any]:
    """Switch through random plans; what memory did, and whether the operands are those of a model loaded anew."""
    draw, on_gpu = random.Random(seed), next(live.buffers()).is_cuda
    addresses = {name: tensor.data_ptr() for name, tensor in operands(live).items()}
    before = torch.cuda.memory_allocated() if on_gpu else 0
    for _ in range(count):
        set_bits(live, random_plan(live, draw))
    if on_gpu:
        torch.cuda.synchronize()
    grown = torch.cuda.memory_allocated() - before if on_gpu else 0
    other = fresh()
    set_bits(other, get_bits(live))
    mine, theirs = operands(live), operands(other)
    return {"switches": count, "bytes_grown": grown,
            "equal_to_fresh": all(torch.equal(mine[name], theirs[name]) for name in theirs),
            "addresses_kept": addresses == {name: tensor.data_ptr() for name, tensor in mine.items()}}  # fmt: skip


def measure_live_models(
    pairs: list[tuple[int, int]], device: torch.device, options: argparse.Namespace, record: dict[str, Any]
) -> None:
    """Add the rows, memory and random switches of live models to `record`, and write it after each scheme."""
    for scheme in LIVE_SCHEMES:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "model.safetensors"
            model = write_model(file, scheme, options)

            def fresh(file: Path = file, model: nn.Module = model) -> nn.Module:
                return load(file, model, device=device, kernels="integer")

            live = fresh()
            rows = measure_live(live, scheme, pairs, options, Path(folder))
            record["rows"] += rows
            name = f"{rows[0]['model']}, {scheme}"
            record["memory"][name] = getattr(live, SWITCHBOARD).bytes_held()
            record["random"][name] = random_live_switches(live, fresh, 3 if options.tiny else 1000, options.seed)
        print(f"{name} {record['memory'][name]} {record['random'][name]}", flush=True)
        write_record("switch", options, complete=False, **record)


def main() -> None:
    """Measure, print a table, write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    add_arguments(parser, rounds=9)
    options = parser.parse_args()
    device = torch.device(options.device)
    if device.type == "cpu":
        if not options.tiny:
            print("No GPU here: nothing to measure. --tiny tries the script under Triton's interpreter.")
            return
        os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported, which the first kernel does
    record: dict[str, Any] = {"rows": [], "memory": {}, "random": {}}
    shapes_of = {"resnet50": resnet50_shapes, "linears-1b": lambda: stack_shapes(60, 4096)}
    shapes_of = {"tiny": lambda: stack_shapes(2, 256)} if options.tiny else shapes_of
    models = {name: make() for name, make in shapes_of.items() if options.tiny or name in options.models}
    pairs = [(8, 2), (2, 4)] if options.tiny else list(itertools.permutations(BITS, 2))
    for name, shapes in models.items():
        pool = make_pool(shapes, options.seed, device)
        weights = sum(rows * columns for rows, columns in shapes.values())
        with tempfile.TemporaryDirectory() as folder:
            record["rows"] += measure(name, pool, pairs, options.rounds, Path(folder))
        record["rows"] += [{"model": name, "scheme": "nested", "from": a, "to": b, "ms": 0.0, "copy_ms": 0.0,
                            "bytes_moved": 0, "note": "by construction, not timed"} for a, b in pairs]  # fmt: skip
        record["memory"][name] = {
            "weights": weights,
            "master_bytes": pool.master.numel() * 4,
            "active_bytes": pool.active.numel() * 4,
            "held_bytes": bytes_held(pool),
        }
        record["random"][name] = random_switches(
            pool, lambda shapes=shapes: make_pool(shapes, options.seed, device), 3 if options.tiny else 1000,
            options.seed,
        )  # fmt: skip
        print(f"{name:12} {record['memory'][name]} {record['random'][name]}", flush=True)
        write_record("switch", options, complete=False, **record)
        del pool
    if "live resnet50" in options.models:
        measure_live_models(pairs, device, options, record)
    write_record("switch", options, **record)


if __name__ == "__main__":
    main()
