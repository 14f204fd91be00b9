"""The commands of mixed precision: sensitivity, search and pareto."""

import argparse
import itertools
import sys
from pathlib import Path

import torch

from bitdial.artifact import Artifact, amend, read_artifact
from bitdial.cli.data import (
    fitting,
    float_accuracy,
    held_out_data,
    sample_input,
    training_data,
    was_trained_on,
)
from bitdial.cli.measured import check_measuring, find_measured_plans
from bitdial.cli.mixed_options import BUDGETS, flag
from bitdial.cli.places import ARTIFACT, writing
from bitdial.cli.search_settings import costs_of, fastest_device, keep_plans, plan_name, search_settings
from bitdial.cli.tables import bits_text, number, percent, show_table
from bitdial.dial.plan import BitPlan
from bitdial.errors import ConfigError
from bitdial.live.load import load, load_trainable
from bitdial.live.skeleton import built
from bitdial.planning import Candidate, MeasuredFront, candidates, measure_front, search
from bitdial.planning.cost import QUANTITIES, Costs
from bitdial.report import Known, check_comparable, front_report
from bitdial.sensitivity.hutchinson import hessian_trace
from bitdial.sensitivity.result import Sensitivity
from bitdial.train import accuracy, batched

# --- commands -------------------------------------------------------------------------------------


def run_sensitivity(options: argparse.Namespace) -> None:
    """The command `sensitivity`."""
    with writing(options, {ARTIFACT: options.file if options.store else None, "--out": options.out}):
        _find_sensitivity(options)


def _find_sensitivity(options: argparse.Namespace) -> None:
    artifact = read_artifact(options.file)
    device = fastest_device()
    generator = torch.Generator().manual_seed(options.seed)
    x, y = training_data(options.data, artifact)
    chosen = torch.randperm(len(x), generator=generator)[: options.images]
    with fitting(x):
        found = hessian_trace(
            load_trainable(artifact).to(device),
            batched(x[chosen].to(device), y[chosen].to(device)),
            tolerance=options.tolerance,
            most_samples=options.most_samples,
            generator=generator,
        )
    rows = [
        [name, f"{entry.parameters:,}", f"{entry.trace:.4g}", f"{entry.error:.2g}", f"{entry.normalized:.3g}"]
        for name, entry in found.layers.items()
    ]
    title = f"{options.file}: Hessian trace on {found.images} images"
    show_table(title, ["layer", "weights", "trace", "standard error", "trace per weight"], rows)
    if options.out:
        found.save(options.out)
        print(f"Saved {options.out}")
    if options.store:
        amend(options.file, sensitivity=found)
        print(f"Stored in {options.file}")


def run_search(options: argparse.Namespace) -> None:
    """The command `search`."""
    given = {quantity: getattr(options, quantity) for quantity in QUANTITIES if getattr(options, quantity) is not None}
    if not given:
        raise ConfigError(
            f"give at least one budget, such as --average-bits 3 (they are {', '.join(map(flag, BUDGETS))})"
        )
    combined = [dict(zip(given, values, strict=True)) for values in itertools.product(*given.values())]
    if options.name is not None and len(combined) > 1:
        raise ConfigError(f"--name names one plan, but these budgets ask for {len(combined)}; leave it out")
    check_measuring(options)
    with writing(options, {ARTIFACT: options.file if options.store else None, "--out": options.out}):
        (find_measured_plans if options.measure else _find_plans)(options, combined)


def _find_plans(options: argparse.Namespace, combined: list[dict[str, float]]) -> None:
    artifact = read_artifact(options.file)
    sensitivity = _stored_sensitivity(options, artifact)
    model = load_trainable(artifact)
    costs = costs_of(options, model, sample_input(options.input, artifact))
    settings = {**search_settings(options, artifact), "activation_bits": options.activation_bits}
    found = {
        options.name or plan_name(budgets): search(
            model, sensitivity, costs, budgets, objective=options.objective, **settings
        )
        for budgets in combined
    }
    _show_plans(f"{options.file}: the plans of least predicted loss", found)
    _show_bits(sensitivity, {name: one.plan for name, one in found.items()})
    keep_plans(options, found)


def run_pareto(options: argparse.Namespace) -> None:
    """The command `pareto`."""
    page = options.report or options.file.with_suffix(".html")
    stored = options.file if options.store else None
    with writing(options, {ARTIFACT: stored, "--out": options.out, "--report": page}):
        _find_front(options, page)


def _find_front(options: argparse.Namespace, page: Path) -> None:
    artifact = read_artifact(options.file)
    sensitivity = _stored_sensitivity(options, artifact)
    others = [MeasuredFront.load(path) for path in options.compare]
    check_comparable(options.file.stem, options.cost, others)
    x, y = held_out_data(options.data, artifact)
    if was_trained_on(options.data, artifact):
        print(
            "bitdial: the file's training did not hold these images out, so the accuracies are those of images it has "
            "seen; train with --holdout, or pass --data with other images",
            file=sys.stderr,
        )
    model = load_trainable(artifact)
    costs = costs_of(options, model, x[:1])
    found = _candidates(options, artifact, model, sensitivity, costs)
    device = fastest_device()
    with fitting(x), torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        front = measure_front(
            load(artifact, device=device, kernels="float"),  # as in training
            found,
            costs,
            batched(x.to(device), y.to(device)),
            accuracy,
            label=options.file.stem,
            quantity=options.cost,
            uniform_on_front=not options.pin,
        )
    _show_front(f"{options.file}: the front on {front.samples} held-out images", front)
    if options.out:
        front.save(options.out)
        print(f"Saved {options.out}")
    if options.store:
        amend(options.file, plans=_front_plans(artifact, front), metrics={"front": front.summary()})
        print(f"Stored in {options.file}: {', '.join(map(repr, front.plans))}")
    float_bytes = sum(tensor.nbytes for tensor in built(artifact).state_dict().values())
    known = Known(float_accuracy=float_accuracy(options.data, artifact), float_bytes=float_bytes)
    front_report(page, front, sensitivity, file=options.file.name, known=known, others=others)
    print(f"Page: {page}")


def _candidates(
    options: argparse.Namespace, artifact: Artifact, model: torch.nn.Module, sensitivity: Sensitivity, costs: Costs
) -> list[Candidate]:
    """The plans of the sweep and, in its middle or where the user says, of the alternatives."""
    settings, cost = {**search_settings(options, artifact), "objective": options.objective}, options.cost
    found = candidates(model, sensitivity, costs, {cost: options.points}, **settings)
    reached = [one.costs[cost] for one in found]
    middle = (min(reached) + max(reached)) / 2
    budget = middle if options.alternatives_at is None else options.alternatives_at
    found += candidates(model, sensitivity, costs, {}, alternatives_at={cost: budget}, **settings)
    return list({one.plan: one for one in found}.values())


# --- helpers --------------------------------------------------------------------------------------


def _stored_sensitivity(options: argparse.Namespace, artifact: Artifact) -> Sensitivity:
    if options.sensitivity is not None:
        return Sensitivity.load(options.sensitivity)
    if artifact.sensitivity is None:
        raise ConfigError(
            f"{options.file} stores no sensitivities, by which plans are found; run `bitdial sensitivity "
            f"{options.file}` first, or pass --sensitivity with the JSON file of an earlier one"
        )
    return artifact.sensitivity


def _show_plans(title: str, plans: dict[str, Candidate]) -> None:
    quantities = list(next(iter(plans.values())).costs)
    rows = [
        [name, *(number(one.costs[quantity]) for quantity in quantities), f"{one.predicted_loss:.4g}"]
        for name, one in plans.items()
    ]
    show_table(title, ["plan", *(q.replace("_", " ") for q in quantities), "predicted loss"], rows)


def _show_bits(sensitivity: Sensitivity, plans: dict[str, BitPlan]) -> None:
    rows = [
        [name, f"{entry.normalized:.3g}", *(bits_text(plan[name]) for plan in plans.values())]
        for name, entry in sensitivity.layers.items()
    ]
    show_table("Bits by layer", ["layer", "trace per weight", *plans], rows)


def _show_front(title: str, front: MeasuredFront) -> None:
    quantities = list(dict.fromkeys(("average_bits", "bytes", "bitops", front.quantity)))
    points = [(one.name or "", one) for one in front.front]
    points += [(one.uniform_name, one) for one in front.uniform]
    rows = [[name, percent(one.accuracy), *(number(one.costs[q]) for q in quantities)] for name, one in points]
    show_table(title, ["plan", "accuracy", *(q.replace("_", " ") for q in quantities)], rows)
    show_correlation(front)


def show_correlation(front: MeasuredFront) -> None:
    """Print how well the predicted losses of a front's candidates go with their accuracies."""
    texts = [
        f"{name.capitalize()} {'not defined' if value is None else f'{value:.2f}'}"
        for name, value in front.correlation.items()
    ]
    print(
        f"Correlation of predicted loss and measured accuracy over {len(front.predictions[0])} candidates: "
        f"{', '.join(texts)} (-1 is a perfect prediction)"
    )


def _front_plans(artifact: Artifact, front: MeasuredFront) -> dict[str, BitPlan | None]:
    """The plans to store: those of `front`; those of the front that the file had before go."""
    before = artifact.metrics.get("front")
    names = before.get("names") if isinstance(before, dict) else None
    old = [name for name in names if isinstance(name, str)] if isinstance(names, list) else []
    return {**dict.fromkeys(old), **front.plans}
