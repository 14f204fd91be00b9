"""What one joint training of ResNet20 costs beside a training for each of its widths, measured in one run.

    python benchmarks/training_cost.py          # a table, and results/training-cost-h200.json (-cpu, -cuda)
    python benchmarks/training_cost.py --tiny   # two small images, on any device

The jobs: a joint step for {8, 6, 4, 2} and one for {4, 3, 2} (Double Rounding), and an LSQ step for one width alone, as
people train without this library, all in the same engine, on batches of 256 images. The jobs alternate, and times are
medians over rounds, so the ratios hold although the machine's speed may drift. An epoch of CIFAR-10 is 196 such steps.
"""

import argparse
import statistics

import torch
from timing import add_arguments, significant, write_record
from torch import nn
from train_step import CIFAR10_STEPS, MOST_STEPS, WARM_UP, Step, milliseconds

from bitdial import JointStep, QuantConfig, TrainConfig, build_model, prepare

WIDTHS = ((8, 6, 4, 2), (4, 3, 2))
BATCH, TINY_BATCH = (256, 3, 32, 32), (2, 3, 8, 8)


def build(model: nn.Module, widths: tuple[int, ...], shape: tuple[int, ...], device: str) -> Step:
    """A step of `model` for `widths`: jointly, or by LSQ for one alone."""
    inputs = torch.randn(shape).to(device, memory_format=torch.channels_last)
    targets = torch.randint(0, 10, shape[:1]).to(device)
    config = QuantConfig(bit_choices=widths, scheme="double_rounding" if len(widths) > 1 else "lsq")
    prepared = prepare(model.to(device, memory_format=torch.channels_last), config, inputs[:16])  # type: ignore[call-overload]
    step = JointStep(prepared.train(), TrainConfig(autocast="bfloat16"), steps_per_epoch=1000)
    return lambda: step(inputs, targets)


def compared(times: dict[tuple[int, ...], float]) -> list[dict[str, object]]:
    """A row for each set of widths: milliseconds of a joint step, of a step for each width, and the share saved."""
    rows: list[dict[str, object]] = []
    for widths in WIDTHS:
        joint, alone = times[widths], {str(bits): significant(times[(bits,)]) for bits in widths}
        separate = sum(times[(bits,)] for bits in widths)
        rows.append(
            {
                "bit_choices": list(widths),
                "joint_ms": significant(joint),
                "separate_ms": alone,
                "joint_epoch_s": significant(CIFAR10_STEPS * joint / 1000),
                "separate_epoch_s": significant(CIFAR10_STEPS * separate / 1000),
                "saved": significant(1 - joint / separate),
            }
        )
    return rows


def main() -> None:
    """Measure, print a table, write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    on_gpu = options.device == "cuda"
    shape, count = (TINY_BATCH, 1) if options.tiny else (BATCH, MOST_STEPS if on_gpu else 1)
    jobs = [*WIDTHS, *((bits,) for bits in sorted({b for widths in WIDTHS for b in widths}, reverse=True))]
    steps = {widths: build(build_model("resnet20"), widths, shape, options.device) for widths in jobs}
    for step in steps.values():
        for _ in range(WARM_UP if on_gpu else 1):
            step()
    times: dict[tuple[int, ...], list[float]] = {widths: [] for widths in jobs}
    for _ in range(options.rounds):
        for widths, step in steps.items():
            times[widths].append(milliseconds(step, count, on_gpu=on_gpu))
    rows = compared({widths: statistics.median(found) for widths, found in times.items()})
    for row in rows:
        print(
            f"{row['bit_choices']}: jointly {row['joint_epoch_s']} s an epoch, separately {row['separate_epoch_s']} s, "
            f"saved {100 * float(str(row['saved'])):.1f} %"
        )
    write_record("training-cost", options, script="training_cost", batch=list(shape), rows=rows)


if __name__ == "__main__":
    main()
