"""ResNet20 on CIFAR-10: the paper's setting, float first, then all widths jointly."""

import platform
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bitdial._version import __version__
from bitdial.artifact import save
from bitdial.config import QuantConfig
from bitdial.models import build_model
from bitdial.prepare import prepare
from bitdial.recipes.cifar10 import cifar10_data
from bitdial.recipes.float_training import train_float
from bitdial.recipes.outcome import RecipeOptions, RecipeOutcome, add_result
from bitdial.train import ArrayData, Shift, TrainConfig, accuracy, batched, evaluate, train

BATCH = 256
FLOAT_LR = 0.1
LR = 1e-3


def cifar10_resnet20(options: RecipeOptions) -> RecipeOutcome:
    """Train ResNet20 in float (kept in `options.out` for other runs) and jointly; save the artifact, add a result row.

    With `options.holdout`, train on 45,000 images and evaluate on the other 5,000: for choices. Without, train on all
    50,000 and evaluate on the test set, once, after the last epoch.
    """
    with torch.backends.cudnn.flags(enabled=True, benchmark=True):
        return _run(options)


def _run(options: RecipeOptions) -> RecipeOutcome:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    (x, y), held = cifar10_data(options.data or Path("data"), holdout=options.holdout, device=device)
    epochs, test = options.epochs or 90, batched(*held, batch_size=1000)
    data = ArrayData(x, y, batch_size=BATCH, seed=options.seed, augment=Shift(pixels=4, flip=True))
    autocast = "bfloat16" if device.type == "cuda" else None
    name = f"{'holdout-' if options.holdout else ''}{options.seed}-{epochs}"

    with torch.random.fork_rng():
        torch.manual_seed(options.seed)
        float_model = build_model("resnet20").to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    train_float(
        float_model,
        data,
        epochs=epochs,
        lr=FLOAT_LR,
        weight_decay=5e-4,
        optimizer="sgd",
        checkpoint=options.out / f"float-{name}.ckpt",
        autocast=autocast,
    )
    config = TrainConfig(
        epochs=epochs,
        lr=LR if options.lr is None else options.lr,
        alrs=options.alrs,
        distill=options.distill,
        autocast=autocast,
    )
    quant = QuantConfig(bit_choices=options.bit_choices, scheme=options.scheme, start=options.start)
    model = prepare(float_model, quant, x[:1024])
    bits = "".join(map(str, options.bit_choices))
    settings = (options.scheme, bits, options.alrs, options.distill, options.start, f"{config.lr:g}", name)
    run = "-".join([options.name or "cifar10-resnet20", *settings])  # all that differs between runs in one folder
    checkpoint = options.out / f"{run}.ckpt"
    history = train(
        model,
        data,
        config,
        teacher=float_model if options.distill == "teacher" else None,
        checkpoint=checkpoint,
        progress=options.progress,
    )
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        float_top1 = accuracy(float_model, test)
        top1 = evaluate(model, test, options.bit_choices)
    metrics = {"recipe": "cifar10-resnet20", "float_top1": float_top1, "top1": {str(b): v for b, v in top1.items()}}
    artifact = options.out / f"{run}.safetensors"
    save(model, artifact, metrics=metrics)
    if options.results is not None:
        seconds = sorted(row["seconds"] for row in history.rows)[len(history.rows) // 2]
        stopped = {b: sum(row["stopped"][b] for row in history.rows) / epochs for b in history.rows[0]["stopped"]}
        add_result(options.results, _row(options, config, metrics, seconds, stopped, model))
    checkpoint.unlink()
    return RecipeOutcome(
        model=model,
        float_model=float_model,
        artifact=artifact,
        history=history,
        float_top1=float_top1,
        top1=top1,
        test=test,
    )


def _row(
    options: RecipeOptions,
    config: TrainConfig,
    metrics: dict[str, Any],
    seconds: float,
    stopped: dict[str, float],
    model: nn.Module,
) -> dict[str, Any]:
    device = next(model.parameters()).device
    narrows = options.scheme not in ("lsq", "dorefa")
    return {
        "scheme": options.scheme,
        "alrs": config.alrs,
        "kd": config.distill,
        "start": options.start,
        "lr": config.lr,
        "bit_choices": list(options.bit_choices),
        "seed": options.seed,
        "epochs": config.epochs,
        "split": "holdout" if options.holdout else "test",
        "float_top1": round(100 * metrics["float_top1"], 2),
        "top1": {bits: round(100 * value, 2) for bits, value in metrics["top1"].items()},
        "stopped": {bits: round(share, 4) for bits, share in stopped.items()},
        "epoch_seconds": round(seconds, 3),
        "stored_bits": options.bit_choices[0] if narrows else 32,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine(),
        "versions": {"bitdial": __version__, "python": platform.python_version(), "torch": torch.__version__},
        "command": options.command,
    }
