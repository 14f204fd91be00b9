"""What searches for plans take from the command line, and where their plans go."""

import argparse
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch

from bitdial.artifact import Artifact, amend
from bitdial.cli.data import fitting, latency_table
from bitdial.errors import ConfigError
from bitdial.files.atomic import write_json
from bitdial.planning import Candidate, MeasuredSearch
from bitdial.planning.cost import Costs, measure_costs


def fastest_device() -> torch.device:
    """The GPU if there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def costs_of(options: argparse.Namespace, model: torch.nn.Module, sample: torch.Tensor) -> Costs:
    """What plans cost on `sample`, with the times of `--latency-table`."""
    latency = None if options.latency_table is None else latency_table(options.latency_table)
    with fitting(sample):
        return measure_costs(model, sample, latency=latency)


def search_settings(options: argparse.Namespace, artifact: Artifact) -> dict[str, Any]:
    """The layers that share bits or keep theirs."""
    groups = [[name for pattern in group for name in _matching(pattern, artifact)] for group in options.group]
    pinned = {name: bits for pattern, bits in options.pin for name in _matching(pattern, artifact)}
    return {"groups": groups, "pinned": pinned}


def _matching(pattern: str, artifact: Artifact) -> list[str]:
    found = [name for name in artifact.layers if fnmatchcase(name, pattern)]
    if not found:
        raise ConfigError(
            f"{pattern!r} matches no quantised layer of the file; those are {', '.join(map(repr, artifact.layers))}"
        )
    return found


def plan_name(budgets: Mapping[str, float]) -> str:
    """'3.0 bits' for an average, else the budgets as they were given."""
    if list(budgets) == ["average_bits"]:
        value = budgets["average_bits"]
        return f"{value:.1f} bits" if round(value, 1) == value else f"{value:.10g} bits"
    return " and ".join(f"{name} {value:.10g}" for name, value in budgets.items())


def keep_plans(options: argparse.Namespace, found: Mapping[str, Candidate | MeasuredSearch]) -> None:
    """Write what was found to `--out` and, with `--store`, into the artifact; say so."""
    if options.out:
        write_json(options.out, {"plans": {name: one.to_dict() for name, one in found.items()}})
        print(f"Saved {options.out}")
    if options.store:
        amend(options.file, plans={name: one.plan for name, one in found.items()})
        print(f"Stored in {options.file}: {', '.join(map(repr, found))}")
