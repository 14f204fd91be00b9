"""`bitdial search --measure`: plans by their measured distance from the float model, instead of sensitivities."""

import argparse
from collections.abc import Mapping

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from bitdial.artifact import Artifact, read_artifact
from bitdial.cli.data import fitting, held_out_data
from bitdial.cli.search_settings import costs_of, fastest_device, keep_plans, plan_name, search_settings
from bitdial.cli.tables import bits_text, number, show_table
from bitdial.errors import ConfigError
from bitdial.live.load import load, load_trainable
from bitdial.live.skeleton import built
from bitdial.planning import MeasuredSearch, measured_search

BATCH = {"cuda": 256, "cpu": 16}  # what is fastest there
STOPPED = {
    "done": "no step or swap helps",
    "patience": "many swaps in a row did not help",
    "seconds": "the time was up: this is the best so far",
}


def check_measuring(options: argparse.Namespace) -> None:
    """Raise ConfigError for options that do not go together: some are for --measure, some for sensitivities."""
    measuring = ("data", "samples", "seconds", "reference", "seed")
    given = [name for name in measuring if getattr(options, name) is not None]
    if given and not options.measure:
        raise ConfigError(f"--{given[0]} is for searches that measure; add --measure, or leave it out")
    if options.measure and (options.sensitivity is not None or options.objective != "error"):
        odd = "--sensitivity" if options.sensitivity is not None else "--objective"
        raise ConfigError(f"{odd} is for searches by sensitivities; leave it out, or --measure")
    if options.measure and options.input is not None:
        raise ConfigError("--input is for searches without data; with --measure, the data says it")


def find_measured_plans(options: argparse.Namespace, combined: list[dict[str, float]]) -> None:
    """Find a plan for each of the budgets; print, write and store them."""
    artifact = read_artifact(options.file)
    x = held_out_data(options.data, artifact)[0]
    generator = torch.Generator().manual_seed(options.seed or 0)
    x = x[torch.randperm(len(x), generator=generator)[: options.samples or 1024]]
    costs = costs_of(options, load_trainable(artifact), x[:1])
    settings = search_settings(options, artifact)
    device = fastest_device()
    reference = None if options.reference is None else _float_model(options, artifact).to(device)
    live = load(artifact, device=device, kernels="float")  # as in training
    batches = list(x.to(device).split(BATCH[device.type]))
    with fitting(x), torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        found = {
            options.name or plan_name(budgets): measured_search(
                live, batches, costs, budgets,
                reference=reference, activation_bits=options.activation_bits, seconds=options.seconds, **settings,
            )
            for budgets in combined
        }  # fmt: skip
    _show_plans(options, found)
    keep_plans(options, found)


def _float_model(options: argparse.Namespace, artifact: Artifact) -> nn.Module:
    """The file's model with the float weights that --reference names."""
    model = built(artifact)
    try:
        model.load_state_dict(load_file(options.reference))
    except (OSError, SafetensorError, RuntimeError) as problem:
        raise ConfigError(
            f"--reference {options.reference}: not a .safetensors file with the float weights of the file's model "
            f"({problem})"[:500]
        ) from problem
    return model.eval()


def _show_plans(options: argparse.Namespace, found: Mapping[str, MeasuredSearch]) -> None:
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
    if options.reference is None:
        print("The file has no float model to compare with; --reference with its float weights brings it")
