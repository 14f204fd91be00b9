"""What transitional norms bring to mixed plans, and what their cheaper form loses: MobileNetV2 on digits.

    python benchmarks/transitions.py             # a table, and results/transitions-cpu.json

A narrow MobileNetV2 learns 896 digits in float, then at 4, 3 and 2 bits jointly, then with plans drawn at random: in
each form from the same start, on the same batches and plans.

    none          a set of parameters and statistics per width
    statistics    statistics for each pair of widths, parameters per own width: learns what `none` learns
    full          both for each pair
    recalibrated  `none`, with statistics estimated anew from the training images for each plan

`mixed_top1` is the mean accuracy over plans that draw each layer's width alike, on 500 test images; `bytes` is what the
norms of the file take, `share` that over its codes. The epochs and rates below were settled after a look at such
numbers of a first, shorter try (docs/log.md), so this compares forms and says little of how good each is.
"""

import argparse
import copy
import json
import platform
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
from timing import command
from torch import nn

from bitdial import (
    BitPlan,
    QuantConfig,
    TrainConfig,
    accuracy,
    add_transitions,
    build_model,
    prepare,
    read_artifact,
    recalibrate_norms,
    save,
    set_bits,
    train,
)
from bitdial.artifact import sizes
from bitdial.recipes.digits import digits_data, digits_test
from bitdial.train import ArrayData, Shift
from bitdial.train.float_loop import train_float

ROOT = Path(__file__).resolve().parent.parent
BIT_CHOICES = (4, 3, 2)
FORMS = ("none", "statistics", "full")


def trained(seed: int, epochs: int, width: float) -> dict[str, nn.Module]:
    """The model in each form, trained."""
    x, y, _, _ = digits_data(holdout=True)
    torch.manual_seed(seed)
    arguments = {"num_classes": 10, "in_channels": 1, "width_mult": width, "dropout": 0.0, "small_input": True}
    plain = build_model("mobilenet_v2", **arguments)
    data = ArrayData(x, y, batch_size=64, seed=seed, augment=Shift(pixels=1))
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = Path(folder) / "float.ckpt"
        train_float(plain, data, epochs=epochs, lr=3e-3, weight_decay=5e-5, checkpoint=checkpoint)
    start = prepare(plain, QuantConfig(bit_choices=BIT_CHOICES), x[:256])
    train(start, data, TrainConfig(epochs=epochs, lr=2e-3, seed=seed), progress=False)
    config = TrainConfig(epochs=epochs, lr=1e-3, seed=seed, sampling="random", sigma=0.5, sigma_warmup=0)
    models = {}
    for form in FORMS:
        models[form] = copy.deepcopy(start) if form == "none" else add_transitions(start, form)
        train(models[form], data, config, progress=False)
    return models


def drawn_plans(model: nn.Module, count: int) -> list[BitPlan]:
    """Plans that draw every layer's width alike; always the same."""
    names = [name for name, module in model.named_modules() if hasattr(module, "select_bits")]
    numbers = torch.randint(len(BIT_CHOICES), (count, len(names)), generator=torch.Generator().manual_seed(0))
    return [BitPlan({n: BIT_CHOICES[i] for n, i in zip(names, row, strict=True)}) for row in numbers.tolist()]


def measure(seed: int, epochs: int, width: float, plans: int) -> list[dict[str, Any]]:
    """A row for each form."""
    images, test = digits_data(holdout=True)[0].split(64), digits_test()
    models = trained(seed, epochs, width)
    rows = []
    for form in (*FORMS, "recalibrated"):
        model = models["none" if form == "recalibrated" else form]
        drawn, found = drawn_plans(model, plans), []
        for setting in (*BIT_CHOICES, *drawn):
            one = copy.deepcopy(model) if form == "recalibrated" else model
            if form == "recalibrated":
                recalibrate_norms(one, images, setting)
            set_bits(one, setting)
            found.append(100 * accuracy(one, test))
        uniform, mixed = found[: len(BIT_CHOICES)], found[len(BIT_CHOICES) :]
        with tempfile.TemporaryDirectory() as folder:
            save(model, Path(folder) / "model.safetensors")
            size = sizes(read_artifact(Path(folder) / "model.safetensors"))
        rows.append(
            {
                "seed": seed,
                "form": form,
                "uniform_top1": {str(b): round(v, 2) for b, v in zip(BIT_CHOICES, uniform, strict=True)},
                "mixed_top1": round(statistics.fmean(mixed), 2),
                "worst_mixed_top1": round(min(mixed), 2),
                "bytes": size["norms"],
                "share": round(size["norms"] / size["codes"], 3),
            }
        )
        print(rows[-1], flush=True)
    return rows


def main() -> None:
    """Measure, print, write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=24, help="of each stage")
    parser.add_argument("--width", type=float, default=0.25, help="width_mult of MobileNetV2")
    parser.add_argument("--plans", type=int, default=30)
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "transitions-cpu.json")
    options = parser.parse_args()
    options.out.parent.mkdir(exist_ok=True)
    record: dict[str, Any] = {
        "command": command("transitions"),
        "model": f"mobilenet_v2, width_mult {options.width}",
        "bit_choices": list(BIT_CHOICES),
        "device": f"CPU, {torch.get_num_threads()} thread(s), {platform.machine()}",
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "rows": [],
    }
    for seed in range(options.seeds):  # a seed takes minutes, so what is there is kept
        record["rows"] += measure(seed, options.epochs, options.width, options.plans)
        options.out.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
