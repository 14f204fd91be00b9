"""The demo as `make demo` runs it: its accuracies, and the promises that the README makes of them.

    python tests/long/demo.py                     # results/reliability.json

Each width is within a point of the float model (2 bits within four), the reloaded model gives the logits of the trained
one bit for bit, and the exact evaluation agrees on at least 99.8 % of the test images.
"""

import tempfile
import time
from pathlib import Path

import torch
from campaign import end, options, record

from bitdial.demos.uniform import run_demo

POINTS = {"8": 1, "6": 1, "4": 1, "2": 4}


def main() -> None:
    """Run the demo."""
    chosen = options(__doc__, 1)
    torch.set_num_threads(1)
    began, failures = time.monotonic(), []
    for _ in range(chosen.count):
        with tempfile.TemporaryDirectory() as name:
            outcome = run_demo(Path(name), progress=False)
        top1, best = outcome.result["top1"], outcome.result["float_top1"]
        failures += [f"{b} bits are {100 * (best - top1[b]):.1f} points below" for b in POINTS
                     if 100 * (best - top1[b]) > POINTS[b]]  # fmt: skip
        if best <= 0.97 or not all(outcome.identical_logits.values()) or min(outcome.exact_agreement.values()) < 0.998:
            failures.append(f"{best}, {outcome.identical_logits}, {outcome.exact_agreement}")
        figures = {"float_top1": best, "top1": top1, "failed": len(failures)}
        print(figures, flush=True)
    record(chosen.out, "demo", "demo", chosen.seed, {**figures, "seconds": round(time.monotonic() - began, 1)})
    end(failures)


if __name__ == "__main__":
    main()
