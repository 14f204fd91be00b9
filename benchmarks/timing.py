"""What the benchmarks of kernels share: times in CUDA graphs or on the CPU, memory speed, and the results file."""

import argparse
import contextlib
import importlib.metadata
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from bitdial.files.atomic import write_json

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("triton", "humming-kernels", "gemlite", "torchao")
ROUND_US, MOST_REPLAYS = 5_000, 50  # a round, and how often a short graph is replayed in it

Call = Callable[[], object]
Run = Callable[[], float]


def repeated(calls: Sequence[Call], device: torch.device) -> Run:
    """A function that runs all `calls` and returns the microseconds of one; on a GPU from a CUDA graph."""
    if device.type != "cuda":

        def run_here() -> float:
            began = time.perf_counter()
            for call in calls:
                call()
            return 1e6 * (time.perf_counter() - began) / len(calls)

        run_here()
        return run_here
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # compiles kernels, warms up libraries
        for call in (*calls[:3], *calls[:1] * 2):
            call()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def replay(times: int) -> float:
        begin.record()
        for _ in range(times):
            graph.replay()
        end.record()
        end.synchronize()
        return 1e3 * begin.elapsed_time(end) / times

    replay(1)
    times = max(1, min(MOST_REPLAYS, int(ROUND_US / max(replay(1), 1.0))))
    return lambda: replay(times) / len(calls)


def medians(runs: dict[str, Run], rounds: int) -> dict[str, float]:
    """The median of each run's times; they alternate, so that a drifting clock meets all of them."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            times[name].append(run())
    return {name: statistics.median(found) for name, found in times.items()}


def copy_speed(device: torch.device, size: int) -> float:
    """Bytes a microsecond that a kernel which copies reads and writes together: the floor that can be reached.

    `copy_` itself would become a memory copy of the graph, which is slower than kernels are (2.7 TB/s on an H200, where
    a bf16 product reads 3.6).
    """
    source = torch.zeros(size // 4, dtype=torch.int32, device=device)
    target = torch.empty_like(source)
    taken = medians({"copy": repeated([lambda: torch.bitwise_not(source, out=target)] * 4, device)}, 5)["copy"]
    return 2 * source.numel() * 4 / taken


def significant(value: float) -> float:
    """`value` to four digits."""
    return float(f"{value:.4g}")


def add_arguments(parser: argparse.ArgumentParser, *, rounds: int = 7) -> None:
    """The options that all of them have."""
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes, to see that it works, on any device")
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="default: a file in results/ by device; none with --tiny")


def write_record(
    name: str, options: argparse.Namespace, *, script: str | None = None, complete: bool = True, **found: Any
) -> None:
    """Write what was found, behind the command, seed, versions and device, to results/NAME-DEVICE.json or --out.

    Called after each row or group with complete=False, so that a run that is stopped leaves what it has measured; the
    file is replaced as a whole.
    """
    cpu = f"CPU, {torch.get_num_threads()} threads, {platform.machine()}"
    device = torch.cuda.get_device_name() if options.device == "cuda" else cpu
    kind = "h200" if "H200" in device else "cpu" if device is cpu else "cuda"
    out = options.out or (None if options.tiny else ROOT / "results" / f"{name}-{kind}.json")
    if out is None:
        return
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    record = {
        "command": command(script or name),
        "seed": options.seed,
        "rounds": options.rounds,
        "device": device,
        "versions": versions,
        "complete": complete,
        **found,
    }
    write_json(out, record)


def command(script: str) -> str:
    """What repeats this run of `script`; where its file went is left out."""
    arguments = sys.argv[1:]
    if "--out" in arguments:
        at = arguments.index("--out")
        arguments = arguments[:at] + arguments[at + 2 :]
    return " ".join([f"python benchmarks/{script}.py", *arguments])
