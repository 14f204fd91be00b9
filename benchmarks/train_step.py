"""What joint training costs: one joint step for all widths against as many float steps, in one run.

    python benchmarks/train_step.py            # a table, and results/train-step-cpu.json

Both steps train the same network on the same batch with Adam in eager mode. They alternate, and each time is the median
over the rounds, so the ratio holds although the machine's speed may drift.
"""

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F

from bitdial import JointStep, QuantConfig, TrainConfig, build_model, prepare

SHAPES = {"resnet20": (64, 3, 32), "resnet18": (8, 3, 112), "mobilenet_v2": (8, 3, 112)}
ROOT = Path(__file__).resolve().parent.parent


def seconds(action: Callable[[], object]) -> float:
    """How long one call takes."""
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def measure(name: str, bit_choices: tuple[int, ...], rounds: int, seed: int) -> dict[str, object]:
    """One row: seconds of a float step and of a joint step of the model called `name`."""
    torch.manual_seed(seed)
    batch, channels, size = SHAPES[name]
    model = build_model(name)
    inputs, targets = torch.randn(batch, channels, size, size), torch.randint(0, 10, (batch,))
    joint = JointStep(prepare(model, QuantConfig(bit_choices=bit_choices), inputs), TrainConfig(), steps_per_epoch=1000)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    model.train()

    def float_step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), targets).backward()
        optimizer.step()

    def joint_step() -> None:
        joint(inputs, targets)

    for warm_up in (float_step, joint_step):
        warm_up()
    times = [(seconds(float_step), seconds(joint_step)) for _ in range(rounds)]
    float_time, joint_time = (statistics.median(column) for column in zip(*times, strict=True))
    return {
        "model": name,
        "batch": list(inputs.shape),
        "bit_choices": list(bit_choices),
        "float_step_s": round(float_time, 4),
        "joint_step_s": round(joint_time, 4),
        "joint_vs_float_steps": round(joint_time / (len(bit_choices) * float_time), 3),
    }


def main() -> None:
    """Measure, print a table, write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "train-step-cpu.json")
    options = parser.parse_args()
    rows = []
    for name in options.models:
        row = measure(name, (8, 6, 4, 2), options.rounds, options.seed)
        rows.append(row)
        print(
            f"{name:14} float step {row['float_step_s']:7.3f} s   joint step (4 widths) {row['joint_step_s']:7.3f} s   "
            f"against 4 float steps {row['joint_vs_float_steps']:.2f}x",
            flush=True,
        )
    record = {
        "command": f"python benchmarks/train_step.py {' '.join(sys.argv[1:])}".strip(),
        "seed": options.seed,
        "rounds": options.rounds,
        "device": f"CPU, {torch.get_num_threads()} threads, {platform.machine()}",
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "rows": rows,
    }
    options.out.parent.mkdir(exist_ok=True)
    options.out.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
