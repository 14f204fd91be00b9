"""What the kernel benchmarks share: device time in CUDA graphs, memory speed, and the head of a results file."""

import contextlib
import importlib.metadata
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
Call = Callable[[], object]


def repeated(calls: Sequence[Call], device: torch.device) -> Callable[[], float]:
    """A function that runs all `calls` once and returns the microseconds of one; on a GPU from a CUDA graph."""
    if device.type != "cuda":

        def run_here() -> float:
            began = time.perf_counter()
            for call in calls:
                call()
            return 1e6 * (time.perf_counter() - began) / len(calls)

        return run_here
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # compiles kernels, warms up libraries
        for call in calls[:3]:
            call()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def replay() -> float:
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        return 1e3 * begin.elapsed_time(end) / len(calls)

    replay()
    return replay


def medians(runs: dict[str, Callable[[], float]], rounds: int) -> dict[str, float]:
    """The median time of each run; they alternate, so that a drifting clock meets all of them."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            times[name].append(run())
    return {name: statistics.median(found) for name, found in times.items()}


def copy_speed(device: torch.device, size: int) -> float:
    """Bytes a microsecond that a large device copy reads and writes together: the floor that can be reached."""
    source = torch.zeros(size // 4, dtype=torch.int32, device=device)
    target = torch.empty_like(source)
    taken = medians({"copy": repeated([lambda: target.copy_(source)] * 4, device)}, 5)["copy"]
    return 2 * source.numel() * 4 / taken


def head(script: str, seed: int, device: torch.device, packages: Sequence[str]) -> dict[str, Any]:
    """What a results file begins with: how to repeat it, and on what."""
    arguments = sys.argv[1:]
    if "--out" in arguments:
        at = arguments.index("--out")
        arguments = arguments[:at] + arguments[at + 2 :]
    found = {"python": platform.python_version(), "torch": torch.__version__}
    for package in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    name = torch.cuda.get_device_name() if device.type == "cuda" else f"CPU, {platform.machine()}"
    return {"command": f"python benchmarks/{script} {' '.join(arguments)}".strip(), "seed": seed, "device": name,
            "versions": found}  # fmt: skip


def write(record: dict[str, Any], stem: str, out: Path | None, *, tiny: bool) -> None:
    """Write the results to results/STEM-h200.json, or -cuda on another GPU; those of a tiny run only to `out`."""
    kind = "h200" if "H200" in record["device"] else "cuda"
    out = out or (None if tiny else ROOT / "results" / f"{stem}-{kind}.json")
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(record, indent=1) + "\n")
