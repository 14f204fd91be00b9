"""The options of `bitdial calibrate`. Nothing here imports PyTorch."""

import argparse
from pathlib import Path

from bitdial.cli.arguments import bit_list, positive, seed, weight_scheme
from bitdial.cli.image_options import LABELS_HELP, setting_arguments, weights_argument
from bitdial.cli.train_options import SCHEMES

# As in the library; tests/cli/test_parser.py compares.
EFFORTS = ("quick", "medium", "full")
FIRST_LAST = ("float", "8", "same")


def calibrate_options(command: argparse.ArgumentParser) -> None:
    """The options of `calibrate`."""
    command.add_argument(
        "model",
        metavar="MODEL",
        help="bitdial's own by name (mobilenet_v2), torchvision:NAME, timm:NAME, or a .safetensors file of weights "
        "that names its model",
    )
    weights_argument(command)
    command.add_argument("--images", type=Path, required=True, metavar="DIR", help="images to calibrate on, no labels")
    command.add_argument(
        "--out",
        type=Path,
        required=True,
        metavar="FILE",
        help="the artifact (.safetensors); numbers and page beside it",
    )
    command.add_argument("--replace", action="store_true", help="although these files are there")
    command.add_argument("--count", type=positive, default=1000, metavar="N", help="images to use (default: 1000)")
    command.add_argument("--batch-size", type=positive, default=32, metavar="N", help="images at a time (default: 32)")
    command.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="where to calibrate (default: cpu)")
    command.add_argument(
        "--effort", choices=EFFORTS, default="quick", help="the more, the longer, the better (default: quick)"
    )
    command.add_argument("--activation-bits", type=int, metavar="B", help="of all widths (default: the weights')")
    command.add_argument("--iterations", type=int, help="in each block (default: 200 of medium, 2000 of full)")
    command.add_argument(
        "--views",
        type=positive,
        metavar="N",
        help="of each image in the last step: mirrored, and random parts of it (default: 4 of full, 1 of others)",
    )
    command.add_argument("--seed", type=seed, default=0, help="of what medium and full draw (default: 0)")
    scales = command.add_argument_group("quantisation")
    scales.add_argument(
        "--bits", type=bit_list, default=(8, 6, 4, 3), metavar="8,6,4,3", help="widths, descending (default: 8,6,4,3)"
    )
    scales.add_argument(
        "--scheme",
        type=weight_scheme,
        default="double_rounding",
        help=f"weight scheme: {', '.join(SCHEMES)} (default: double_rounding)",
    )
    scales.add_argument("--group-size", type=positive, metavar="N", help="a weight scale for each N inputs")
    scales.add_argument(
        "--first-last",
        choices=FIRST_LAST,
        default="float",
        help="the first and the last layers: in float, at 8 bits always, or as the others (default: float)",
    )
    measured = command.add_argument_group("what is measured (default: agreement with the float model)")
    measured.add_argument("--eval-images", type=Path, metavar="DIR", help="images to measure on")
    measured.add_argument(
        "--eval-count", type=positive, metavar="N", help="images to measure on, evenly spread (default: all of them)"
    )
    measured.add_argument("--labels", metavar="FILE", help=f"of these images: {LABELS_HELP}")
    setting_arguments(command)
