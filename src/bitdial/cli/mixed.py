"""The commands of mixed precision: sensitivity, search and pareto."""

import argparse
from pathlib import Path

import torch

from bitdial.artifact import read_artifact
from bitdial.cli.arguments import file_argument, positive, seed
from bitdial.cli.data import does_not_fit, training_data
from bitdial.cli.tables import show_table
from bitdial.hessian import hessian_trace
from bitdial.runtime import load_trainable
from bitdial.train import batched


def sensitivity_command(sensitivity: argparse.ArgumentParser) -> None:
    """The options of `sensitivity`."""
    file_argument(sensitivity)
    sensitivity.add_argument(
        "--data",
        metavar="DATA",
        help="training data: digits, the folder with CIFAR-10, or an .npz with arrays x and y "
        "(default: the recipe's that made the file)",
    )
    sensitivity.add_argument("--images", type=positive, default=1000, help="how many, at random (default: %(default)s)")
    sensitivity.add_argument(
        "--tolerance",
        type=float,
        default=0.1,
        help="a layer is done when its standard error is this share of its trace (default: %(default)s)",
    )
    sensitivity.add_argument(
        "--most-samples", type=positive, default=200, help="random vectors for a layer at most (default: %(default)s)"
    )
    sensitivity.add_argument("--seed", type=seed, default=0, help="of images and vectors (default: %(default)s)")
    sensitivity.add_argument("--out", type=Path, help="JSON file for the result")
    sensitivity.set_defaults(run=_sensitivity)


def _sensitivity(options: argparse.Namespace) -> None:
    artifact = read_artifact(options.file)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    generator = torch.Generator().manual_seed(options.seed)
    x, y = training_data(options.data, artifact)
    chosen = torch.randperm(len(x), generator=generator)[: options.images]
    try:
        found = hessian_trace(
            load_trainable(artifact).to(device),
            batched(x[chosen].to(device), y[chosen].to(device)),
            tolerance=options.tolerance,
            most_samples=options.most_samples,
            generator=generator,
        )
    except (RuntimeError, IndexError) as problem:
        raise does_not_fit(x, problem) from problem
    rows = [
        [name, f"{entry.parameters:,}", f"{entry.trace:.4g}", f"{entry.error:.2g}", f"{entry.normalized:.3g}"]
        for name, entry in found.layers.items()
    ]
    title = f"{options.file}: Hessian trace on {found.images} images"
    show_table(title, ["layer", "weights", "trace", "standard error", "trace per weight"], rows)
    if options.out:
        found.save(options.out)
        print(f"Saved {options.out}")
