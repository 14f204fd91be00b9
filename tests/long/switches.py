"""One live model switched thousands of times: it stays equal to a fresh load, and its memory stays as it was.

    python tests/long/switches.py                 # 10,000 switches on each kind of kernels, results/reliability.json

A switch goes to a random width, a pair of widths, a random plan or a stored plan. After every hundredth and after the
last, the outputs are kept. Memory is counted after the first tenth of the switches, when everything that is kept has
been made, and at the end. Then the outputs are compared, bit for bit, with those of models that are loaded anew and set
once. Memory of these loads is counted apart, over their second half: the allocator keeps pages of the first ones.
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
MOST_MIB_OF_SWITCHES = 2.0  # that a process may grow by: its allocator keeps some pages
MOST_MIB_OF_LOADS = 16.0
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


def random_setting(layers: list[str], draw: random.Random) -> Any:
    """A width, a pair of widths, a plan, or the name of a stored plan."""
    width = draw.choice(WIDTHS)
    settings = (width, (width, draw.choice(WIDTHS)), random_plan(layers, WIDTHS, draw), draw.choice(("mixed", "low")))
    return draw.choice(settings)


def campaign(kernels: str, config: dict[str, Any], count: int, seed: int) -> tuple[dict[str, Any], list[str]]:
    """The figures of one kind of kernels, and what failed."""
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "model.safetensors"
        net, x = make(path, kernels, config)
        live, draw = load(path, net, kernels=kernels), random.Random(seed)
        gc.collect()
        gc.freeze()  # what is imported stays; each count of memory would look through it
        layers, kept, before = list(get_bits(live)), [], resident()
        began = time.monotonic()
        for number in counted(range(1, count + 1), count, f"switches, {kernels}"):
            setting = random_setting(layers, draw)
            set_bits(live, setting)
            if number % EVERY == 0 or number == count:
                with torch.no_grad():
                    kept.append((number, setting, live(x), get_bits(live)))
            if number == max(1, count // 10):
                with torch.no_grad():
                    live(x)  # what the first run makes is there before memory is counted
                before = resident()
        grown = {"switches": resident() - before}
        failures, before = [], resident()
        for place, (number, setting, output, bits) in enumerate(kept):
            if place == len(kept) // 2:
                before = resident()
            fresh = load(path, net, kernels=kernels)
            set_bits(fresh, setting)
            with torch.no_grad():
                same = torch.equal(output, fresh(x)) and bits == get_bits(fresh)
            if not same:
                failures.append(f"{kernels}, switch {number}: not what a fresh load gives at {setting}")
            del fresh
        grown["loads"] = resident() - before
        for what, most in (("switches", MOST_MIB_OF_SWITCHES), ("loads", MOST_MIB_OF_LOADS)):
            if grown[what] > most:
                failures.append(f"{kernels}: the process grew by {grown[what]:.1f} MiB over its {what}")
    figures = {
        "switches": count,
        "compared_with_a_fresh_load": len(kept),
        "failed": len(failures),
        "growth_mib": round(grown["switches"], 2),
        "growth_mib_of_loads": round(grown["loads"], 2),
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
