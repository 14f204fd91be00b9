"""One live model switched thousands of times: it stays equal to a fresh load, and its memory stays as it was.

    python tests/long/switches.py                 # 10,000 switches on each kind of kernels, results/reliability.json

A switch goes to a random width, a pair of widths, a random plan or a stored plan. After every hundredth and after the
last, the outputs are compared, bit for bit, with those of a model that is loaded anew and set once. Memory is counted
after the first tenth of the switches, when everything that is kept has been made, and at the end.
"""

import gc
import random
import resource
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from campaign import counted, end, options, random_plan, record, seeded

from bitdial import BitPlan, QuantConfig, build_model, get_bits, load, prepare, save, set_bits

WIDTHS = (8, 6, 4, 3, 2)
EVERY = 100
MOST_MIB = 16.0  # that a process may grow by: its allocator keeps some pages
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "float": ("float", {}),
    "integer": ("integer", {"scheme": "nested"}),
    "packed": ("packed", {"scheme": "double_rounding", "activations": "float"}),
}


def resident() -> float:
    """MiB of this process in memory."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20


def make(path: Path, kernels: str, config: dict[str, Any]) -> tuple[Any, torch.Tensor]:
    """Save a network with two stored plans: the float model (None if the file knows it) and a batch."""
    torch.manual_seed(0)
    if kernels == "packed":
        net, x = (
            torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(6))),
            torch.randn(5, 64, generator=seeded(1)),
        )
    else:
        net = build_model("cifar_resnet", blocks=1, width=16)
        x = torch.randn(4, 3, 16, 16, generator=seeded(1))
    model = prepare(net, QuantConfig(**{"bit_choices": WIDTHS, "start": "3std", **config}), x).eval()
    mixed = random_plan(get_bits(model), WIDTHS, random.Random(1))
    save(model, path, plans={"mixed": mixed, "low": BitPlan({}, default=2)})
    return (net if kernels == "packed" else None), x


def campaign(kernels: str, config: dict[str, Any], count: int, seed: int) -> tuple[dict[str, Any], list[str]]:
    """The figures of one kind of kernels, and what failed."""
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "model.safetensors"
        net, x = make(path, kernels, config)
        live, draw = load(path, net, kernels=kernels), random.Random(seed)
        layers, failures, compared, before = list(get_bits(live)), [], 0, resident()
        began = time.monotonic()
        for number in counted(range(1, count + 1), count, f"switches, {kernels}"):
            width = draw.choice(WIDTHS)
            settings = (
                width,
                (width, draw.choice(WIDTHS)),
                random_plan(layers, WIDTHS, draw),
                draw.choice(("mixed", "low")),
            )
            setting = draw.choice(settings)
            set_bits(live, setting)
            if number % EVERY == 0 or number == count:
                fresh = load(path, net, kernels=kernels)
                set_bits(fresh, setting)
                with torch.no_grad():
                    same = torch.equal(live(x), fresh(x)) and get_bits(live) == get_bits(fresh)
                del fresh
                compared += 1
                if not same:
                    failures.append(f"{kernels}, switch {number}: not what a fresh load gives at {setting}")
            if number == max(1, count // 10):
                before = resident()
        growth = resident() - before
        if growth > MOST_MIB:
            failures.append(f"{kernels}: the process grew by {growth:.1f} MiB")
    figures = {
        "switches": count,
        "compared_with_a_fresh_load": compared,
        "failed": len(failures),
        "growth_mib": round(growth, 2),
        "seconds": round(time.monotonic() - began, 1),
    }
    return figures, failures


def main() -> None:
    """Run the campaign."""
    chosen = options(__doc__, 10_000)
    torch.set_num_threads(1)
    figures, failures = {}, []
    for name, (kernels, config) in CASES.items():
        figures[name], wrong = campaign(kernels, config, chosen.count, chosen.seed)
        print(name, figures[name], flush=True)
        failures += wrong
    record(chosen.out, "switches", "switches", chosen.seed, figures)
    end(failures)


if __name__ == "__main__":
    main()
