"""What a live model holds in memory: a whole network beside its float model, and packed weights by scheme.

    python benchmarks/memory.py            # tables, and results/memory-h200.json or memory-cpu.json
    python benchmarks/memory.py --tiny     # a try on any machine

**Networks.** A ResNet50 with default settings, all of it random, is saved once and loaded in a fresh process for each
kind of kernels. In MB (10^6 bytes):

    held     what the process (on a GPU: its allocator) holds more after `load` than before
    peak     the most that it held more while it loaded
    float    the same for the float model: its construction

On the CPU that is resident memory (VmRSS, VmHWM), after a collection of garbage and with freed memory given back. A
tiny file is loaded before, so that the pages of libraries, which a process has once, do not count.

**Weights** (on a GPU, or with --tiny). A stack of square Linear layers whose weights have 8, 6, 4, 3 and 2 bits is
saved once for each scheme, loaded on packed kernels, and run at every width that is offered. In bits a weight:

    active, master, other    what `bitdial.resident_bytes` counts on the device: the words that layers read, the codes
                             that a switch starts from, and scales, tables and staging
    held                     what the GPU's allocator holds more than before loading; on the CPU there is no such number
    peak                     the most that it held while every width was used once, with inputs and outputs
    host                     codes in host memory

bf16 weights take 16.
"""

import argparse
import ctypes
import gc
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from timing import add_arguments, significant, write_record
from torch import nn

from bitdial import QuantConfig, build_model, load, prepare, read_artifact, resident_bytes, save, set_bits

BITS = (8, 6, 4, 3, 2)
OFFERS = (BITS, (4, 3, 2), (2,))
MASTERS = {"nested": ("device",), "double_rounding": ("device", "host")}


NETWORK_KERNELS = ("float", "integer")
STATUS = Path("/proc/self/status")

# --- networks ---------------------------------------------------------------------------------------


def write_network(folder: Path, *, tiny: bool, seed: int) -> tuple[Path, Path]:
    """The file to measure, and the small one that is loaded before."""
    torch.manual_seed(seed)
    files = folder / "network.safetensors", folder / "small.safetensors"
    small = build_model("cifar_resnet", blocks=1, width=4)
    network = build_model("cifar_resnet", blocks=1, width=16) if tiny else build_model("resnet50")
    for file, model in zip(files, (network, small), strict=True):
        save(prepare(model, QuantConfig(), torch.randn(2, 3, 64, 64)), file)
    return files


def resident(kind: str) -> int:
    """Bytes of this process that are in memory now ('VmRSS'), or were at most ('VmHWM')."""
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(kind))
    return int(line.split()[1]) * 1024


def give_back() -> None:
    """Collect garbage, and give freed memory back to the system."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)


def measure_network(file: Path, small: Path, kernels: str, device: torch.device) -> dict[str, int]:
    """Bytes that loading `file` adds to this process, after `small` was loaded; 'none' builds the float model."""
    held: list[nn.Module] = []
    built = {path: read_artifact(path).manifest["architecture"] for path in (file, small)}

    def make(path: Path) -> None:
        if kernels == "none":
            held.append(build_model(built[path]["name"], **built[path]["arguments"]).to(device))
        else:
            held.append(load(path, kernels=kernels, device=device))

    make(small)
    give_back()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        make(file)
        after, peak = torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device)
    else:
        Path("/proc/self/clear_refs").write_text("5")  # the most so far is what it is now
        before = resident("VmRSS")
        make(file)
        peak = resident("VmHWM")
        give_back()
        after = resident("VmRSS")
    return {"held": after - before, "peak": peak - before}


def measure_networks(options: argparse.Namespace) -> dict[str, Any]:
    """A row for each kind of kernels, each measured in a process of its own."""
    rows: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        file, small = write_network(Path(folder), tiny=options.tiny, seed=options.seed)
        name = "cifar_resnet" if options.tiny else "resnet50"
        rows |= {"model": name, "file_mb": significant(file.stat().st_size / 1e6)}
        print(f"{name}, a file of {rows['file_mb']} MB\n{'kernels':12}{'held':>8}{'peak':>10}  MB")
        for kernels in (*NETWORK_KERNELS, "none"):
            command = [sys.executable, __file__, "--device", options.device, "--one", kernels, str(file), str(small)]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            found = {key: significant(value / 1e6) for key, value in json.loads(done.stdout).items()}
            label = "float model" if kernels == "none" else kernels
            rows[label] = found
            print(f"{label:12}{found['held']:8.1f}{found['peak']:10.1f}", flush=True)
    return rows


# --- packed weights ---------------------------------------------------------------------------------


def stack(layers: int, size: int) -> nn.Sequential:
    """The float model."""
    return nn.Sequential(*(nn.Linear(size, size, bias=False) for _ in range(layers)))


def allocated(device: torch.device) -> int:
    """Bytes that tensors hold on the GPU; 0 without one."""
    if device.type != "cuda":
        return 0
    gc.collect()
    return torch.cuda.memory_allocated(device)


def measure(
    path: Path, model: nn.Sequential, offer: tuple[int, ...], master: str, device: torch.device
) -> dict[str, Any]:
    """The memory of the file at `path`, live: loaded, and used at every width."""
    weights = sum(parameter.numel() for parameter in model.parameters())
    before = allocated(device)
    live = load(path, model, device=device, dtype=torch.bfloat16, kernels="packed", bit_choices=offer, master=master)
    held = allocated(device) - before
    counted = resident_bytes(live)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    tokens = torch.ones(1, model[0].in_features, dtype=torch.bfloat16, device=device)
    for bits in (*offer, offer[0]):
        set_bits(live, bits)
        live(tokens)
    names = {"active": "active", "master": "master", "other": "other", "host": "host_master"}
    found = {name: significant(8 * counted[key] / weights) for name, key in names.items()}
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device) - before
        found |= {"held": significant(8 * held / weights), "peak": significant(8 * peak / weights)}
    return {"weights": weights, **found}


def measure_weights(options: argparse.Namespace, device: torch.device) -> list[dict[str, Any]]:
    """A row for each scheme, offer of widths and place of the master."""
    layers, size = (2, 256) if options.tiny else (options.layers, options.size)
    torch.manual_seed(options.seed)
    model, rows = stack(layers, size), []
    print(f"bits a weight        {'widths':12} master   active  master   other    host    held    peak")
    with tempfile.TemporaryDirectory() as folder:
        for scheme, masters in MASTERS.items():
            config = QuantConfig(
                scheme=scheme, bit_choices=BITS, activations="float", start="3std", keep_first_last=False
            )
            path = Path(folder) / f"{scheme}.safetensors"
            save(prepare(model, config, torch.randn(1, size)), path)
            for offer in OFFERS:
                for master in masters:
                    row = {"scheme": scheme, "bit_choices": list(offer), "master_on": master}
                    row |= measure(path, model, offer, master, device)
                    rows.append(row)
                    columns = [f"{row.get(c, 0):8.3f}" for c in ("active", "master", "other", "host", "held", "peak")]
                    print(f"{scheme:20} {','.join(map(str, offer)):12} {master:6} {''.join(columns)}", flush=True)
                    write_record("memory", options, complete=False, rows=rows)
    return rows


def main() -> None:
    """Measure, print tables, write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--size", type=int, default=4096, help="rows and columns of a layer")
    parser.add_argument("--one", nargs=3, metavar=("KERNELS", "FILE", "SMALL"), help="measure one network here")
    add_arguments(parser, rounds=1)
    options = parser.parse_args()
    device = torch.device(options.device)
    if options.one:
        kernels, file, small = options.one
        print(json.dumps(measure_network(Path(file), Path(small), kernels, device)))
        return
    networks = measure_networks(options)
    rows = measure_weights(options, device) if device.type == "cuda" or options.tiny else []
    write_record("memory", options, rows=rows, networks=networks)


if __name__ == "__main__":
    main()
