"""What the long campaigns share: options, a small model of every kind of part, a line of progress, the results file.

`make test-long` runs them one after the other. Each takes its number of cases and its seed as options, so
tests/long/test_campaigns.py runs the same code with tens of cases.
"""

import argparse
import importlib.metadata
import json
import os
import platform
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bitdial import BitPlan, QuantConfig, __version__, build_model, prepare

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "results" / "reliability.json"
NET = {"blocks": 1, "width": 8, "in_channels": 1}  # of `cifar_resnet`: 8 quantised layers, 10 kB


def options(description: str | None, count: int, **more: int) -> argparse.Namespace:
    """The options of a campaign; `more` are further whole numbers with their defaults."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=count, help="cases (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of everything that is drawn (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="results file (default: results/reliability.json)")
    for name, default in more.items():
        parser.add_argument(f"--{name}", type=int, default=default, help="default: %(default)s")
    return parser.parse_args()


def seeded(seed: int) -> torch.Generator:
    """A generator of random numbers."""
    return torch.Generator().manual_seed(seed)


def images(count: int = 4) -> Tensor:
    """Inputs of the small network."""
    return torch.randn(count, 1, 8, 8, generator=seeded(1))


def network(**config: Any) -> nn.Module:
    """A prepared network whose norm sets differ, as training leaves them."""
    torch.manual_seed(0)
    model = prepare(build_model("cifar_resnet", **NET), QuantConfig(**{"start": "3std", **config}), images()).eval()
    generator = seeded(2)
    with torch.no_grad():
        for name, value in model.state_dict(keep_vars=True).items():
            if value.is_floating_point() and ("norm" in name or "bn" in name or "running" in name):
                value.copy_(value * (0.9 + torch.rand(value.shape, generator=generator) / 5))
    return model


def random_plan(layers: Iterable[str], widths: tuple[int, ...], draw: Any) -> BitPlan:
    """A width for the weights and one for the activations of each layer."""
    return BitPlan({name: (draw.choice(widths), draw.choice(widths)) for name in layers})


def counted(cases: Iterable[Any], total: int, what: str) -> Iterator[Any]:
    """`cases`, with a line that says how many have been and how long the rest will take."""
    began = time.monotonic()
    for done, case in enumerate(cases, start=1):
        yield case
        if done == total or done % max(1, total // 200) == 0:
            left = (time.monotonic() - began) * (total - done) / done
            end = "\n" if done == total or not sys.stdout.isatty() else "\r"
            if sys.stdout.isatty() or done == total or done % max(1, total // 20) == 0:
                print(f"{what}: {done:,} of {total:,}, {left / 60:.1f} minutes left   ", end=end, flush=True)


def processor() -> str:
    """The processor by name, if the system says it."""
    names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return names[0].partition(":")[2].strip() if names else platform.machine()


def record(path: Path, campaign: str, script: str, seed: int, figures: dict[str, Any]) -> None:
    """Put the figures of a campaign into the results file, in the place of older ones of the same campaign."""
    arguments = sys.argv[1:]
    if "--out" in arguments:
        at = arguments.index("--out")
        arguments = arguments[:at] + arguments[at + 2 :]
    entry = {
        "command": " ".join([f"python tests/long/{script}.py", *arguments]),
        "seed": seed,
        "device": f"{processor()}, {os.cpu_count()} cores",
        "versions": {
            "python": platform.python_version(),
            "bitdial": __version__,
            **{name: importlib.metadata.version(name) for name in ("torch", "numpy", "safetensors")},
        },
        **figures,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    found = json.loads(path.read_text()) if path.exists() else {}
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps({**found, campaign: entry}, indent=2) + "\n")
    temporary.replace(path)  # at once: a reader finds the old file or the new one


def end(failures: list[str]) -> None:
    """Leave with what went wrong, if anything did."""
    for failure in failures[:20]:
        print(failure, file=sys.stderr)
    if failures:
        sys.exit(f"{len(failures)} failures")
