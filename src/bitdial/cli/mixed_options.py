"""The options of `bitdial sensitivity`, `search` and `pareto`. Nothing here imports PyTorch."""

import argparse
from pathlib import Path

from bitdial.cli.arguments import file_argument, layer_list, pin, plan_name, positive, seconds, seed, shape
from bitdial.cli.image_options import setting_arguments

# As in the library, which would take a second to import; tests/cli/test_parser.py compares.
OBJECTIVES = ("error", "bits")
BUDGETS = {
    "average_bits": "mean weight bits over all weights",
    "layer_average_bits": "mean weight bits over the layers, the paper's average",
    "bytes": "of a file that holds the plan alone",
    "bitops": "multiply-accumulates x weight bits x activation bits, on one input",
    "activation_bytes": "of the quantised inputs of all layers, on one input",
    "latency": "in the unit of --latency-table, which it needs",
}


def sensitivity_options(sensitivity: argparse.ArgumentParser) -> None:
    """The options of `sensitivity`."""
    file_argument(sensitivity)
    sensitivity.add_argument(
        "--data",
        metavar="DATA",
        help="training data: digits, the folder with CIFAR-10, or an .npz with arrays x (float, as in training) "
        "and y (class numbers) (default: the recipe's that made the file)",
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
    _no_store_argument(sensitivity)


def search_options(search: argparse.ArgumentParser) -> None:
    """The options of `search`."""
    file_argument(search)
    budgets = search.add_argument_group(
        "budgets", "at least one; a plan keeps within all of them; repeat one for several plans"
    )
    for quantity, text in BUDGETS.items():
        budgets.add_argument(flag(quantity), type=float, action="append", metavar="MOST", help=text)
    _search_arguments(search)
    search.add_argument(
        "--input", type=shape, metavar="3x32x32", help="shape of one input (default: that of the file's recipe)"
    )
    search.add_argument(
        "--activation-bits", type=positive, metavar="B", help="of all layers (default: as the weights of each)"
    )
    _measure_arguments(search)
    search.add_argument("--out", type=Path, help="JSON file for the plans")
    search.add_argument("--store", action="store_true", help="store the plans in the file, by the names in the table")
    search.add_argument("--name", type=plan_name, help="of the plan, instead of one made from its budgets")


def pareto_options(pareto: argparse.ArgumentParser) -> None:
    """The options of `pareto`."""
    file_argument(pareto)
    pareto.add_argument(
        "--data",
        metavar="DATA",
        help="held-out data to measure plans on, never the test set: digits or the folder with CIFAR-10 (both: what "
        "--holdout keeps out of training), or an .npz with arrays x (float, as in training) and y (class numbers) "
        "(default: the recipe's that made the file)",
    )
    pareto.add_argument(
        "--cost",
        choices=list(BUDGETS),
        default="average_bits",
        help="what the front weighs accuracy against (default: %(default)s)",
    )
    pareto.add_argument(
        "--points", type=positive, default=60, help="budgets of the sweep, least to most (default: %(default)s)"
    )
    pareto.add_argument(
        "--alternatives-at",
        type=float,
        metavar="MOST",
        help="budget at which each layer is also tried at each other width (default: the middle of the sweep)",
    )
    _search_arguments(pareto)
    pareto.add_argument("--out", type=Path, help="JSON file for all candidates with their accuracy")
    pareto.add_argument(
        "--compare",
        type=Path,
        action="append",
        default=[],
        metavar="JSON",
        help="what --out wrote for another file, to draw its front beside; repeat for several",
    )
    pareto.add_argument("--report", type=Path, metavar="HTML", help="the page (default: the file's name with .html)")
    _no_store_argument(pareto)


def _measure_arguments(search: argparse.ArgumentParser) -> None:
    measure = search.add_argument_group("measuring", "plans by the distance of their outputs from the float model's")
    measure.add_argument(
        "--measure", action="store_true", help="measure plans on data, instead of predicting them by sensitivities"
    )
    measure.add_argument(
        "--data",
        metavar="DATA",
        help="inputs to measure on, never the test set: as for `bitdial pareto`; labels are not used",
    )
    measure.add_argument("--samples", type=positive, help="how many of them, at random (default: 1024)")
    measure.add_argument("--seed", type=seed, help="of the samples (default: 0)")
    measure.add_argument("--images", type=Path, metavar="DIR", help="a folder of images to measure on, instead of data")
    measure.add_argument("--count", type=positive, metavar="N", help="images, evenly spread (default: 1024)")
    measure.add_argument("--seconds", type=seconds, metavar="S", help="time limit for each plan; then the best so far")
    measure.add_argument(
        "--reference",
        type=Path,
        metavar="WEIGHTS",
        help="a .safetensors file with the float weights of the model, to compare with (default: the file at its "
        "highest width)",
    )
    measure.add_argument(
        "--model",
        metavar="MODEL",
        help="the float model, for files of models from elsewhere: torchvision:NAME, timm:NAME",
    )
    measure.add_argument(
        "--classes", type=positive, metavar="N", help="of --model, if it has another number than usual"
    )
    setting_arguments(search)


def _search_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--objective",
        choices=OBJECTIVES,
        default="error",
        help="sensitivity x quantization error, or the paper's sensitivity x bits (default: %(default)s)",
    )
    parser.add_argument(
        "--group", type=layer_list, action="append", default=[], metavar="LAYERS",
        help="names or patterns, comma-separated, of layers that share their bits; repeat for several groups",
    )  # fmt: skip
    parser.add_argument(
        "--pin",
        type=pin,
        action="append",
        default=[],
        metavar="LAYER=BITS",
        help="keep a layer (or pattern) there; LAYER=free lets one that has a width of its own have others",
    )
    parser.add_argument(
        "--latency-table", type=Path, metavar="JSON", help='times that you measured: {layer: {"4": time}}'
    )
    parser.add_argument(
        "--sensitivity",
        type=Path,
        metavar="JSON",
        help="what `bitdial sensitivity --out` wrote (default: what the file stores)",
    )


def _no_store_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--no-store", action="store_false", dest="store", help="leave the artifact as it is")


def flag(quantity: str) -> str:
    """The option of a budget: '--average-bits' for 'average_bits'."""
    return f"--{quantity.replace('_', '-')}"
