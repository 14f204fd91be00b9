"""Mixed precision on CIFAR-10: from a multi-precision file to a supernet, searched plans and their accuracy."""

import itertools
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bitdial.artifact import Artifact, read_artifact, save
from bitdial.errors import ConfigError
from bitdial.live.load import load_trainable
from bitdial.planning import Candidate, candidates, evaluate_plans, require_highspy
from bitdial.planning.cost import measure_costs
from bitdial.prepare.config import QuantConfig
from bitdial.prepare.transitions import add_transitions
from bitdial.recipes.cifar10 import Split, cifar10_data
from bitdial.recipes.cifar10_training import (
    BATCH,
    EPOCHS,
    augmented,
    autocast_on,
    check_cutout,
    float_network,
    run_device,
    teacher_network,
    where_it_ran,
)
from bitdial.recipes.outcome import OF_FOLDERS, RecipeOptions, RecipeOutcome, add_result, run_name, settings_of
from bitdial.recipes.run import RecipeRun
from bitdial.sensitivity.hutchinson import hessian_trace
from bitdial.sensitivity.result import Sensitivity
from bitdial.train import TrainConfig, accuracy, batched, evaluate, recalibrate_norms, train

LR = 1e-4
IMAGES = 1000  # for the Hessian traces
BUDGETS = 25  # average bits, from the lowest to the highest width
_OF_THE_FILE = ("scheme", "ties", "per_channel", "start", "scale_gradient", "history")


def cifar10_resnet20_mixed(options: RecipeOptions) -> RecipeOutcome:
    """Train the model of `options.start_from` on with sampled plans; add a result row for each plan of the search.

    The file is one that `cifar10-resnet20` wrote with the same `holdout`. What was trained is saved with its searched
    plans, by names such as "3.0 bits". Plans are chosen by the search alone; the images that they are evaluated on (the
    test set, or with `options.holdout` those held out) decide nothing.
    """
    return _train_mixed("resnet20", options)


def cifar10_mobilenetv2_mixed(options: RecipeOptions) -> RecipeOutcome:
    """The same for a file that `cifar10-mobilenetv2` wrote."""
    return _train_mixed("mobilenetv2", options)


def _train_mixed(network: str, options: RecipeOptions) -> RecipeOutcome:
    require_highspy()
    check_cutout(options)
    recipe = f"cifar10-{network}"
    start = _read_start(recipe, options)
    settings, changed = options.settings(epochs=EPOCHS, float_epochs=EPOCHS, lr=LR, batch=BATCH)
    settings["bit_choices"] = start.bit_choices
    name = run_name(f"mixed-{start.digest[:8]}", changed)
    run = RecipeRun(
        recipe=f"{recipe}-mixed",
        name=name,
        options=options,
        settings=settings | {"start_from": start.digest},
        changed=changed,
        artifact=options.out / f"{name}.safetensors",
        checkpoint=options.out / f"{name}.ckpt",
    )
    with run.alone():
        return _train(network, run, start)


def _train(network: str, run: RecipeRun[RecipeOptions], start: Artifact) -> RecipeOutcome:
    options, settings, changed = run.options, run.settings, run.changed
    device = run_device()
    config = TrainConfig(**settings_of(TrainConfig, settings), autocast=autocast_on(device))
    images, held = cifar10_data(options.data or Path("data"), holdout=options.holdout, device=device)
    test = batched(*held, batch_size=1000)
    with torch.backends.cudnn.flags(enabled=True, benchmark=True):
        before = load_trainable(start).to(device)
        sensitivity = start.sensitivity or _sensitivity(before, images, options)
        model = before if options.transitions == "none" else add_transitions(before, options.transitions)
        data = augmented(images, settings["batch"], options.seed, cutout=options.cutout)
        history = train(
            model,
            data,
            config,
            teacher=_teacher(network, options, images, settings),
            sensitivity=sensitivity,
            checkpoint=run.checkpoint,
            progress=options.progress,
        )
    found = _search(model, sensitivity, images, start.bit_choices, options.progress)
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        if settings["recalibrate"]:
            plans_and_widths = [*dict.fromkeys(one.plan for one in found), *start.bit_choices]
            several = itertools.chain.from_iterable(data.batches(epoch) for epoch in itertools.count(config.epochs))
            batches = itertools.islice(several, settings["recalibrate"] * len(plans_and_widths))
            recalibrate_norms(model, (batch.inputs for batch in batches), plans_and_widths)
        top1 = evaluate(model, test, start.bit_choices)
        measured = evaluate_plans(model, found, test, accuracy, progress=options.progress)
    metrics = run.metrics(float_top1=start.metrics["float_top1"], top1=top1, data="CIFAR-10", test=test)
    plans = {_plan_name(one.budgets["average_bits"]): one.plan for one in found}
    save(model, run.artifact, metrics=metrics, plans=plans, sensitivity=sensitivity)
    if options.results is not None:
        others = changed if network == "resnet20" else {"model": network, **changed}
        for one in found:
            row = _row(settings, others, one, measured[one.plan], metrics, start) | where_it_ran(device, history)
            add_result(options.results, row | {"command": options.command})
    run.checkpoint.unlink()
    return RecipeOutcome(
        model=model,
        float_model=None,
        artifact=run.artifact,
        history=history,
        metrics=metrics,
        float_top1=start.metrics["float_top1"],
        top1=top1,
        test=test,
    )


def _plan_name(budget: float) -> str:
    """As the front's plans are named: "3.0 bits", "2.25 bits"."""
    return f"{budget:.2f}".removesuffix("0") + " bits"


def _read_start(recipe: str, options: RecipeOptions) -> Artifact:
    """The file of `recipe` to start from, if it goes with the options."""
    options.refuse(OF_FOLDERS, f"{recipe}-mixed")
    if options.start_from is None or options.sampling == "none":
        raise ConfigError(
            f"this recipe goes on from a file that {recipe} wrote, with sampled plans: say --start-from FILE "
            "and --sampling hasb (or random)"
        )
    start = read_artifact(options.start_from)
    if start.metrics.get("recipe") != recipe or not {"holdout", "float_top1", "top1"} <= start.metrics.keys():
        raise ConfigError(f"{options.start_from} was not written by `bitdial train {recipe}`")
    if start.metrics["holdout"] != options.holdout:
        raise ConfigError(
            f"{options.start_from} was trained {'with' if start.metrics['holdout'] else 'without'} --holdout, and this "
            "run is to go on the other way: what is held out of one of them would be trained on in the other"
        )
    if options.bit_choices not in (QuantConfig.bit_choices, start.bit_choices):
        raise ConfigError(f"the widths of {options.start_from} are {start.bit_choices}; leave --bits out")
    defaults = {name: getattr(type(options), name) for name in _OF_THE_FILE}
    if options.float_epochs is not None and not options.taught:
        raise ConfigError("--float-epochs: a run that starts from a file trains no float model but a teacher's")
    if given := [name for name, value in defaults.items() if getattr(options, name) != value]:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise ConfigError(f"{flags}: not for a run that starts from a file; leave it out")
    return start


def _sensitivity(model: nn.Module, images: Split, options: RecipeOptions) -> Sensitivity:
    generator = torch.Generator().manual_seed(options.seed)
    chosen = torch.randperm(len(images[0]), generator=generator)[:IMAGES].to(images[0].device)
    batches = batched(images[0][chosen], images[1][chosen])
    return hessian_trace(model, batches, generator=generator, progress=options.progress)


def _teacher(network: str, options: RecipeOptions, images: Split, settings: dict[str, Any]) -> nn.Module | None:
    if not options.taught:
        return None
    if options.teacher is None:
        return float_network(network, images, settings, options.out, progress=options.progress)
    return teacher_network(options.teacher, images, settings, options.out, progress=options.progress)


def _search(
    model: nn.Module, sensitivity: Sensitivity, images: Split, bit_choices: tuple[int, ...], progress: bool
) -> list[Candidate]:
    """The plan of least predicted loss for each budget of average bits."""
    highest, lowest = bit_choices[0], bit_choices[-1]
    budgets = [lowest + (highest - lowest) * step / (BUDGETS - 1) for step in range(BUDGETS)]
    costs = measure_costs(model, images[0][:1])
    return candidates(model, sensitivity, costs, {"average_bits": budgets}, progress=progress)


def _row(
    settings: dict[str, Any],
    changed: dict[str, Any],
    found: Candidate,
    top1: float,
    metrics: dict[str, Any],
    start: Artifact,
) -> dict[str, Any]:
    """The result row of one plan."""
    always = {
        "sampling": settings["sampling"],
        "scheme": start.scheme,
        "bit_choices": list(settings["bit_choices"]),
        "seed": settings["seed"],
        "epochs": settings["epochs"],
        "lr": settings["lr"],
        "alrs": settings["alrs"],
        "split": "holdout" if settings["holdout"] else "test",
    }
    return {
        **always,
        **{name: value for name, value in changed.items() if name not in (*always, "holdout")},
        "budget": found.budgets["average_bits"],
        "average_bits": found.costs["average_bits"],
        "plan": {name: bits[0] for name, bits in found.plan.items()},
        "top1": round(100 * top1, 2),
        "uniform_top1": {bits: round(100 * value, 2) for bits, value in metrics["top1"].items()},
        "start_top1": {bits: round(100 * value, 2) for bits, value in start.metrics["top1"].items()},
        "predicted_loss": found.predicted_loss,
        "bytes": found.costs["bytes"],
        "bitops": found.costs["bitops"],
    }
