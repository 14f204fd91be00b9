"""What the weights of a live model hold in memory: by scheme, by the widths offered, by where the master is.

    python benchmarks/memory.py            # a table, and results/memory-h200.json
    python benchmarks/memory.py --tiny     # a try on any machine

A stack of square Linear layers whose weights have 8, 6, 4, 3 and 2 bits is saved once for each scheme, loaded on packed
kernels, and run at every width that is offered. In bits a weight:

    active, master, other    what `bitdial.resident_bytes` counts on the device: the words that layers read, the codes
                             that a switch starts from, and scales, tables and staging
    held                     what the GPU's allocator holds more than before loading; on the CPU there is no such number
    peak                     the most that it held while every width was used once, with inputs and outputs
    host                     codes in host memory

bf16 weights take 16.
"""

import argparse
import gc
import tempfile
from pathlib import Path
from typing import Any

import torch
from timing import add_arguments, significant, write_record
from torch import nn

from bitdial import QuantConfig, load, prepare, resident_bytes, save, set_bits

BITS = (8, 6, 4, 3, 2)
OFFERS = (BITS, (4, 3, 2), (2,))
MASTERS = {"nested": ("device",), "double_rounding": ("device", "host")}


def stack(layers: int, size: int) -> nn.Sequential:
    """The float model."""
    return nn.Sequential(*(nn.Linear(size, size, bias=False) for _ in range(layers)))


def allocated(device: torch.device) -> int:
    """Bytes that tensors hold on the GPU; 0 without one."""
    gc.collect()
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


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


def main() -> None:
    """Measure, print a table, write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--size", type=int, default=4096, help="rows and columns of a layer")
    add_arguments(parser, rounds=1)
    options = parser.parse_args()
    device = torch.device(options.device)
    if device.type == "cpu" and not options.tiny:
        print("No GPU here: nothing to measure. --tiny tries the script.")
        return
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
    write_record("memory", options, rows=rows)


if __name__ == "__main__":
    main()
