"""`bitdial search --measure`: plans by their measured distance from the float model, instead of sensitivities."""

import argparse
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from bitdial.artifact import Artifact, read_artifact
from bitdial.cli.data import fitting, held_out_data
from bitdial.cli.images import chosen_settings, float_model, given_settings, settings_of, weights_of
from bitdial.cli.search_settings import costs_of, fastest_device, keep_plans, plan_name, search_settings
from bitdial.cli.tables import bits_text, number, show_table
from bitdial.errors import ConfigError
from bitdial.images import ImageBatches, stored_settings
from bitdial.live.load import load, load_trainable
from bitdial.planning import MeasuredSearch, measured_search

BATCH = {"cuda": 256, "cpu": 16}  # what is fastest there
SAMPLES = 1024
STOPPED = {
    "done": "no step or swap helps",
    "patience": "many swaps in a row did not help",
    "seconds": "the time was up: this is the best so far",
}


def check_measuring(options: argparse.Namespace) -> None:
    """Raise ConfigError for options that do not go together: some are for --measure, some for sensitivities."""
    measuring = ("data", "images", "samples", "count", "seconds", "reference", "model", "classes", "seed")
    given = [name for name in measuring if getattr(options, name) is not None]
    given += given_settings(options)
    if given and not options.measure:
        raise ConfigError(f"--{given[0]} is for searches that measure; add --measure, or leave it out")
    _check_data(given, {"count", *given_settings(options)})
    if options.measure and (options.sensitivity is not None or options.objective != "error"):
        odd = "--sensitivity" if options.sensitivity is not None else "--objective"
        raise ConfigError(f"{odd} is for searches by sensitivities; leave it out, or --measure")
    if options.measure and options.input is not None:
        raise ConfigError("--input is for searches without data; with --measure, the data says it")


def _check_data(given: list[str], of_images: set[str]) -> None:
    """Raise ConfigError if the options `given` are for data and for folders of images."""
    if "images" not in given:
        if odd := [name for name in given if name in of_images]:
            raise ConfigError(f"--{odd[0]} is for folders of images; give --images DIR too, or leave it out")
        return
    if "data" in given:
        raise ConfigError("--data and --images are different data; give one of them")
    if odd := [name for name in given if name in ("samples", "seed")]:
        raise ConfigError(f"--{odd[0]} is for --data; of a folder of images, --count N are taken, evenly spread")


def find_measured_plans(options: argparse.Namespace, combined: list[dict[str, float]]) -> None:
    """Find a plan for each of the budgets; print, write and store them."""
    artifact = read_artifact(options.file)
    device = fastest_device()
    model = float_model(options, artifact, options.reference)
    batches = _inputs(options, artifact, model, device)
    costs = costs_of(options, load_trainable(artifact, model), batches[0][:1].cpu())
    settings = search_settings(options, artifact)
    live = load(artifact, model, device=device, kernels="float")  # as in training
    reference = None if model is None or weights_of(options, options.reference) is None else model.to(device)
    with fitting(batches[0]), torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        found = {
            options.name or plan_name(budgets): measured_search(
                live, batches, costs, budgets,
                reference=reference, activation_bits=options.activation_bits, seconds=options.seconds, **settings,
            )
            for budgets in combined
        }  # fmt: skip
    show_plans(options, found)
    if reference is None:
        print("The file has no float model to compare with; --reference with its float weights brings it")
    keep_plans(options, found)


def _inputs(
    options: argparse.Namespace, artifact: Artifact, model: nn.Module | None, device: torch.device
) -> list[Tensor]:
    """The inputs that `--data` or `--images` names, in batches on `device`."""
    size = BATCH[device.type]
    if options.images is None:
        x = held_out_data(options.data, artifact)[0]
        generator = torch.Generator().manual_seed(options.seed or 0)
        x = x[torch.randperm(len(x), generator=generator)[: options.samples or SAMPLES]]
        return list(x.to(device).split(size))
    known = [
        stored_settings(artifact.metrics, options.file),
        *settings_of(model, weights_of(options, options.reference)),
    ]
    settings, count = chosen_settings(options, *known), options.count or SAMPLES
    images = ImageBatches(options.images, settings, batch_size=size, count=count, device=device)
    print(f"Images: {images.settings}")
    return list(images)


def show_plans(options: argparse.Namespace, found: Mapping[str, MeasuredSearch]) -> None:
    """Print what each plan costs, how far it is from the float model, and where it is kept."""
    first = next(iter(found.values()))
    quantities = list(first.costs)
    rows = []
    for name, one in found.items():
        rows.append([name, *(number(one.costs[q]) for q in quantities), f"{one.distance:.4g}", f"{one.measured}"])
        if one.uniform is not None and one.uniform_costs is not None:
            widths = ", ".join(dict.fromkeys(bits_text(bits) for bits in one.uniform.values()))
            costs = (number(one.uniform_costs[q]) for q in quantities)
            rows.append([f"  beside {widths} bits everywhere", *costs, f"{one.uniform_distance:.4g}", ""])
    title = f"{options.file}: plans by their distance from {first.reference}, on {first.samples} samples"
    show_table(title, ["plan", *(q.replace("_", " ") for q in quantities), "KL divergence", "plans measured"], rows)
    layers = [[name, *(bits_text(one.plan[name]) for one in found.values())] for name in first.plan]
    show_table("Bits by layer", ["layer", *found], layers)
    for name, one in found.items():
        print(f"{name}: ended after {one.seconds:.0f} s, since {STOPPED[one.stopped]}")
