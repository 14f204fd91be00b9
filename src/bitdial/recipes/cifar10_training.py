"""ResNet20 (the paper's setting) and MobileNetV2 on CIFAR-10: float first, then all widths jointly."""

import itertools
import platform
import statistics
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bitdial._version import __version__
from bitdial.artifact import save
from bitdial.errors import ConfigError
from bitdial.functional import scheme_of
from bitdial.models import build_model
from bitdial.prepare.config import QuantConfig
from bitdial.prepare.prepare import prepare
from bitdial.recipes.cifar10 import SIDE, Split, cifar10_data
from bitdial.recipes.outcome import (
    OF_FOLDERS,
    RecipeOptions,
    RecipeOutcome,
    add_result,
    run_name,
    settings_of,
    write_history,
)
from bitdial.recipes.run import RecipeRun
from bitdial.train import ArrayData, History, Shift, TrainConfig, accuracy, batched, evaluate, recalibrate_norms, train
from bitdial.train.float_loop import train_float

BATCH = 256
EPOCHS = 90
FLOAT_LR = 0.1
LR = 1e-3
NETWORKS: dict[str, tuple[str, dict[str, Any]]] = {
    "resnet20": ("resnet20", {}),
    "resnet56": ("resnet56", {}),
    "mobilenetv2": ("mobilenet_v2", {"num_classes": 10, "small_input": True, "dropout": 0.0}),
}


def cifar10_resnet20(options: RecipeOptions) -> RecipeOutcome:
    """Train ResNet20 in float (kept in `options.out` for other runs) and jointly; save the artifact, add a result row.

    With `options.holdout`, train on 45,000 images and evaluate on the other 5,000: for choices. Without, train on all
    50,000 and evaluate on the test set after the last epoch; with `options.history` after each, which decides nothing.
    """
    return _train_on_cifar10("resnet20", options)


def cifar10_mobilenetv2(options: RecipeOptions) -> RecipeOutcome:
    """The same with MobileNetV2, its first two strides taken out for images of 32 x 32, without dropout."""
    return _train_on_cifar10("mobilenetv2", options)


def _train_on_cifar10(network: str, options: RecipeOptions) -> RecipeOutcome:
    if options.start_from is not None:
        raise ConfigError(f"--start-from and --sampling are for the recipe cifar10-{network}-mixed")
    options.refuse(OF_FOLDERS, f"cifar10-{network}")
    check_cutout(options)
    float_epochs = options.epochs or EPOCHS
    settings, changed = options.settings(epochs=EPOCHS, float_epochs=float_epochs, lr=LR, batch=BATCH)
    recipe = f"cifar10-{network}"
    name = run_name(options.name or recipe, changed)
    run = RecipeRun(
        recipe=recipe,
        name=name,
        options=options,
        settings=settings,
        changed=changed,
        artifact=options.out / f"{name}.safetensors",
        checkpoint=options.out / f"{name}.ckpt",
    )
    with run.alone(), torch.backends.cudnn.flags(enabled=True, benchmark=True):
        return _train(network, run)


def _train(network: str, run: RecipeRun[RecipeOptions]) -> RecipeOutcome:
    options, settings, changed = run.options, run.settings, run.changed
    device = run_device()
    quant = QuantConfig(**settings_of(QuantConfig, settings))
    config = TrainConfig(**settings_of(TrainConfig, settings), autocast=autocast_on(device))
    images, held = cifar10_data(options.data or Path("data"), holdout=options.holdout, device=device)
    test = batched(*held, batch_size=1000)

    float_model = float_network(network, images, settings, options.out, progress=options.progress)
    teacher = float_model if options.taught else None
    if options.teacher is not None:
        teacher = teacher_network(options.teacher, images, settings, options.out, progress=options.progress)
    model = prepare(float_model, quant, images[0][:1024])
    data = augmented(images, settings["batch"], options.seed, cutout=options.cutout)
    history = train(
        model,
        data,
        config,
        teacher=teacher,
        evaluate_on=test if options.history else None,
        checkpoint=run.checkpoint,
        progress=options.progress,
    )
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        for bits in options.bit_choices if settings["recalibrate"] else ():
            batches = itertools.islice(data.batches(config.epochs), settings["recalibrate"])
            recalibrate_norms(model, (batch.inputs for batch in batches), bits)
        float_top1 = accuracy(float_model, test)
        teacher_top1 = accuracy(teacher, test) if teacher is not None and options.teacher is not None else None
        top1 = evaluate(model, test, options.bit_choices)
    metrics = run.metrics(float_top1=float_top1, top1=top1, data="CIFAR-10", test=test)
    save(model, run.artifact, metrics=metrics)
    others = changed if network == "resnet20" else {"model": network, **changed}
    row = result_row(settings, others, metrics, history, device) | {"command": options.command}
    if teacher_top1 is not None:
        row["teacher_top1"] = round(100 * teacher_top1, 2)
    if options.history is not None:
        write_history(options.history, history, row)
    if options.results is not None:
        add_result(options.results, row)
    run.checkpoint.unlink()
    return RecipeOutcome(
        model=model,
        float_model=float_model,
        artifact=run.artifact,
        history=history,
        metrics=metrics,
        float_top1=float_top1,
        top1=top1,
        test=test,
    )


def check_cutout(options: RecipeOptions) -> None:
    """Refuse a square that can hide a whole image."""
    if options.cutout >= SIDE:
        raise ConfigError(f"--cutout {options.cutout}: the images are {SIDE} x {SIDE}; give less than {SIDE}")


def run_device() -> torch.device:
    """The GPU if there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def autocast_on(device: torch.device) -> str | None:
    """The type in which convolutions work there."""
    return "bfloat16" if device.type == "cuda" else None


def augmented(split: Split, batch: int, seed: int, *, cutout: int = 0) -> ArrayData:
    """The images in batches, shifted by up to 4 pixels and mirrored at random, and a square of each blank."""
    return ArrayData(*split, batch_size=batch, seed=seed, augment=Shift(pixels=4, flip=True, cutout=cutout))


def float_network(network: str, split: Split, settings: dict[str, Any], folder: Path, *, progress: bool) -> nn.Module:
    """`network` trained in float, or taken from `folder`, where it is kept for other runs."""
    name, arguments = NETWORKS[network]
    seed, epochs, device = settings["seed"], settings["float_epochs"], split[0].device
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = build_model(name, **arguments).to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    train_float(
        model,
        augmented(split, BATCH, seed),
        epochs=epochs,
        lr=FLOAT_LR,
        weight_decay=5e-4,
        optimizer="sgd",
        checkpoint=folder / f"float-{network}-{'holdout-' if settings['holdout'] else ''}{seed}-{epochs}.ckpt",
        autocast=autocast_on(device),
        progress=progress,
    )
    return model


def teacher_network(network: str, split: Split, settings: dict[str, Any], folder: Path, *, progress: bool) -> nn.Module:
    """The same for a teacher, which may be of another seed."""
    seed = settings["seed"] if settings["teacher_seed"] is None else settings["teacher_seed"]
    return float_network(network, split, settings | {"seed": seed}, folder, progress=progress)


def result_row(
    settings: dict[str, Any],
    changed: dict[str, Any],
    metrics: dict[str, Any],
    history: History,
    device: torch.device,
) -> dict[str, Any]:
    """The result row: the settings that every row has, others only where they are `changed`, and the outcome."""
    stopped = {b: [row["stopped"][b] for row in history.rows] for b in history.rows[0]["stopped"]}
    always = {
        "scheme": settings["scheme"],
        "alrs": settings["alrs"],
        "kd": settings["distill"],
        "start": settings["start"],
        "lr": settings["lr"],
        "bit_choices": list(settings["bit_choices"]),
        "seed": settings["seed"],
        "epochs": settings["epochs"],
        "split": "holdout" if settings["holdout"] else "test",
    }
    return {
        **always,
        **{name: value for name, value in changed.items() if name not in (*always, "distill", "holdout")},
        "float_top1": None if metrics["float_top1"] is None else round(100 * metrics["float_top1"], 2),
        "top1": {bits: round(100 * value, 2) for bits, value in metrics["top1"].items()},
        "stopped": {bits: round(statistics.fmean(shares), 4) for bits, shares in stopped.items()},
        "stored_bits": settings["bit_choices"][0] if scheme_of(settings["scheme"]).narrows else 32,
        **where_it_ran(device, history),
    }


def where_it_ran(device: torch.device, history: History) -> dict[str, Any]:
    """The part of a row about the machine: device, versions, the median of the seconds of an epoch."""
    seconds = sorted(row["seconds"] for row in history.rows)
    return {
        "epoch_seconds": round(seconds[len(seconds) // 2], 3),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine(),
        "versions": {"bitdial": __version__, "python": platform.python_version(), "torch": torch.__version__},
    }
