"""Whole networks on integer kernels against PyTorch, at each bit-width, measured in one run.

    python benchmarks/network.py                    # ResNet18 and 50: a table, and results/network-h200.json (-cpu)
    python benchmarks/network.py --device cpu       # ResNet18, batch 1 and 8, against float32
    python benchmarks/network.py --profile          # where the time of each goes, kernel by kernel
    python benchmarks/network.py --tiny             # a tiny network on any device, to see that it works

Contenders: the float model in eager mode and under torch.compile, in bf16 (on the CPU float32), channels last; and the
file of the prepared model, loaded with kernels="integer" and switched by `set_bits`. On a GPU all run as CUDA graphs,
one for each width. `exact` says that the outputs equal `code_exact`'s bit for bit, on the first images of the batch.

There is a row with the first and the last layer kept in float, as `prepare` does unless told, and one with all layers
quantised (`first_and_last`). The weights are random: speed does not depend on them.
"""

import argparse
import copy
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

if "--tiny" in sys.argv and not os.path.exists("/dev/nvidiactl"):
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton is imported

import torch
from timing import Call, add_arguments, medians, repeated, significant, write_record
from torch import Tensor, nn

from bitdial import QuantConfig, build_model, code_exact, load, prepare, save, set_bits

LAST = torch.channels_last
BATCHES = {"cuda": [1, 32, 256], "cpu": [1, 8]}
NETWORKS = {"cuda": ["resnet18", "resnet50"], "cpu": ["resnet18"]}
BIT_CHOICES = (8, 6, 4, 3, 2)
FIRST_AND_LAST = ["float", "quantised"]
CALLS = 4  # in a round; of the tiny network one
CHECKED = 2  # images whose outputs are compared with those of `code_exact`


def tiny() -> nn.Module:
    """A small residual network."""
    return build_model("cifar_resnet", blocks=1, width=4)


def build(name: str, seed: int) -> nn.Module:
    """A float network with random weights."""
    torch.manual_seed(seed)
    return (tiny() if name == "tiny" else build_model(name)).eval()


def live_model(model: nn.Module, x: Tensor, options: argparse.Namespace, *, keep_first_last: bool) -> nn.Module:
    """The model as a file, loaded on integer kernels."""
    config = QuantConfig(bit_choices=BIT_CHOICES, scheme=options.scheme, keep_first_last=keep_first_last)
    prepared = prepare(model, config, x[:CHECKED].cpu())
    with tempfile.TemporaryDirectory() as folder:
        save(prepared, Path(folder) / "model.safetensors")
        return load(Path(folder) / "model.safetensors", model, device=options.device, kernels="integer")


def float_actions(model: nn.Module, x: Tensor, options: argparse.Namespace) -> dict[str, Call]:
    """The float contenders."""
    dtype = torch.bfloat16 if options.device == "cuda" else torch.float32
    kind = "bf16" if options.device == "cuda" else "fp32"
    model = copy.deepcopy(model).to(options.device, dtype).to(memory_format=LAST)  # type: ignore[call-overload]
    x = x.to(dtype)
    actions: dict[str, Call] = {f"{kind} eager": lambda: model(x)}
    if not options.no_compile:
        compiled = torch.compile(model)
        actions[f"{kind} compiled"] = lambda: compiled(x)
    return actions


def measure(name: str, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The rows of one network."""
    model = build(name, options.seed)
    size, calls = (8, 1) if options.tiny else (224, CALLS)
    largest = max(options.batches)
    images = torch.randn(largest, 3, size, size, generator=torch.Generator().manual_seed(options.seed))
    images = images.to(options.device, memory_format=LAST)
    lives = {
        kind: live_model(model, images, options, keep_first_last=kind == "float") for kind in options.first_and_last
    }
    exacts = {kind: code_exact(live) for kind, live in lives.items()}
    for batch in options.batches:
        x = images[:batch]
        floats = float_actions(model, x, options)
        base, actions = list(floats)[-1], dict(floats)
        for kind, live in lives.items():
            network = live._fused[0]  # without the look at the input, which waits for the device
            if options.device == "cpu" and not options.no_compile:
                network = torch.compile(network)
            actions[kind] = lambda network=network, x=x: network(x)
        for bits in options.bits:  # all widths share the operands' tensors: each is measured while it is set
            for network in (*lives.values(), *exacts.values()):
                set_bits(network, bits)
            runs = {kind: repeated([action] * calls, x.device) for kind, action in actions.items()}
            times = {kind: us / 1e3 for kind, us in medians(runs, options.rounds).items()}
            for kind, ms in times.items():
                row: dict[str, Any] = {"kernel": kind, "network": name, "batch": batch, "ms": significant(ms)}
                row |= {
                    "speedup": significant(times[base] / ms),
                    "against": base,
                    "against_ms": significant(times[base]),
                }
                if kind in lives:
                    equal = torch.equal(actions[kind]()[:CHECKED], exacts[kind](x[:CHECKED]))
                    row |= {"kernel": "integer", "weight_bits": bits, "act_bits": bits, "scheme": options.scheme}
                    row |= {"first_and_last": kind, "exact": equal}
                if kind in lives or bits == options.bits[0]:
                    yield row
        for kind, action in actions.items() if options.profile else ():
            print(f"{name} batch {batch} {kind}\n{profile(action, x.is_cuda)}", flush=True)


def profile(action: Call, cuda: bool) -> str:
    """A table of the kernels that take most of the time."""
    action()
    kinds = [torch.profiler.ProfilerActivity.CPU] + [torch.profiler.ProfilerActivity.CUDA] * cuda
    with torch.profiler.profile(activities=kinds) as found:
        action()
        if cuda:
            torch.cuda.synchronize()
    order = "self_cuda_time_total" if cuda else "self_cpu_time_total"
    return found.key_averages().table(sort_by=order, row_limit=15, max_name_column_width=60)


def line(row: dict[str, Any]) -> str:
    """A row as a line of the printed table."""
    bits = f"w{row['weight_bits']}a{row['act_bits']}" if "weight_bits" in row else ""
    kernel = f"{row['kernel']} {row['first_and_last']}" if bits else row["kernel"]
    text = f"{row['network']:9} batch {row['batch']:3} {kernel:18} {bits:5} {row['ms']:9.4f} ms"
    text += f" {row['speedup']:6.2f}x"
    return text + ("" if "exact" not in row else " exact" if row["exact"] else " WRONG")


def main() -> None:
    """Measure, print a table, write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--networks", nargs="+", choices=["resnet18", "resnet20", "resnet50", "mobilenet_v2"])
    parser.add_argument("--batches", nargs="+", type=int)
    parser.add_argument("--bits", nargs="+", type=int, choices=BIT_CHOICES, default=list(BIT_CHOICES))
    parser.add_argument("--scheme", choices=["double_rounding", "nested", "centred"], default="double_rounding")
    parser.add_argument("--first-and-last", nargs="+", choices=FIRST_AND_LAST, default=FIRST_AND_LAST)
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    parser.add_argument("--profile", action="store_true", help="print the kernels that take most of the time")
    options = parser.parse_args()
    names = options.networks or (["tiny"] if options.tiny else NETWORKS[options.device])
    options.batches = options.batches or ([3] if options.tiny else BATCHES[options.device])
    rows: list[dict[str, Any]] = []
    with torch.no_grad(), torch.backends.cudnn.flags(enabled=True, benchmark=True):
        for name in names:
            for row in measure(name, options):
                rows.append(row)
                print(line(row), flush=True)
                write_record("network", options, complete=False, rows=rows)
    write_record("network", options, rows=rows)


if __name__ == "__main__":
    main()
