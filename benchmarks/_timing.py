"""What the benchmarks of kernels share: times on a GPU and a CPU, and the record around the rows."""

import argparse
import contextlib
import importlib.metadata
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
ROUND_MS, MOST_CALLS = 20, 200  # calls a round, fewer where that would take longer

Action = Callable[[], object]


class Timer:
    """Milliseconds of one call of an action: recorded as a CUDA graph, or as it is on the CPU."""

    def __init__(self, action: Action, *, cuda: bool):
        self.cuda, self.action, self.calls = cuda, action, 1
        if cuda:
            self.action = _recorded(action)
        first = self._round()
        self.calls = max(1, min(MOST_CALLS, int(ROUND_MS / max(first, 1e-3))))

    def _round(self) -> float:
        if not self.cuda:
            began = time.perf_counter()
            for _ in range(self.calls):
                self.action()
            return (time.perf_counter() - began) * 1000 / self.calls
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(self.calls):
            self.action()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / self.calls

    def round(self) -> float:
        """Milliseconds of a call, the mean over one round."""
        return self._round()


def _recorded(action: Action) -> Action:
    """`action` as a CUDA graph, after calls that let libraries choose and kernels compile."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            action()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = action()

    def replay() -> object:
        graph.replay()
        return kept

    return replay


def medians(actions: dict[str, Action], *, cuda: bool, rounds: int) -> dict[str, float]:
    """Milliseconds of each action: rounds alternate, so that ratios hold although the machine's speed may drift."""
    timers = {name: Timer(action, cuda=cuda) for name, action in actions.items()}
    times: dict[str, list[float]] = {name: [] for name in timers}
    for _ in range(rounds):
        for name, timer in timers.items():
            times[name].append(timer.round())
    return {name: statistics.median(found) for name, found in times.items()}


def significant(value: float) -> float:
    """`value` to four digits."""
    return float(f"{value:.4g}")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that all of them have."""
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes, to see that it works, on any device")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="default: a file in results/ by device; none with --tiny")


def write_record(name: str, options: argparse.Namespace, rows: list[dict[str, Any]], **more: Any) -> None:
    """Write the rows with the command, seed, versions and device, to results/NAME-DEVICE.json or --out."""
    cpu = f"CPU, {torch.get_num_threads()} threads, {platform.machine()}"
    device = torch.cuda.get_device_name() if options.device == "cuda" else cpu
    kind = "h200" if "H200" in device else "cpu" if device is cpu else "cuda"
    out = options.out or (None if options.tiny else ROOT / "results" / f"{name}-{kind}.json")
    if out is None:
        return
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        versions["triton"] = importlib.metadata.version("triton")
    record = {
        "command": _command(name, sys.argv[1:]),
        "seed": options.seed,
        "rounds": options.rounds,
        "device": device,
        "versions": versions,
        **more,
        "rows": rows,
    }
    out.parent.mkdir(exist_ok=True)
    out.write_text(json.dumps(record, indent=2) + "\n")


def _command(name: str, arguments: list[str]) -> str:
    """What repeats the run; where its file went is left out."""
    if "--out" in arguments:
        at = arguments.index("--out")
        arguments = arguments[:at] + arguments[at + 2 :]
    return " ".join([f"python benchmarks/{name}.py", *arguments])
