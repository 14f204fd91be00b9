"""Options about images that several commands take. Nothing here imports PyTorch."""

import argparse
from pathlib import Path

from bitdial.cli.arguments import positive

# As in the library; tests/cli/test_parser.py compares.
ORDERS = ("RGB", "BGR")
INTERPOLATIONS = ("bicubic", "bilinear", "lanczos", "nearest")
LABELS_HELP = (
    "classes of the images: a JSON file {file: class} or {split: {file: class}}, a CSV file with lines file,class, or "
    "the word folders (their names in sorted order)"
)


def size_or_none(text: str) -> int | None:
    """A number of pixels; 0 is none."""
    return None if text == "0" else positive(text)


def three_numbers(text: str) -> tuple[float, ...]:
    """Numbers for the channels, such as 123.675,116.28,103.53; a single one is for all."""
    try:
        values = tuple(float(part) for part in text.split(","))
    except ValueError:
        values = ()
    if len(values) not in (1, 3):
        raise argparse.ArgumentTypeError(f"{text!r} is not three numbers with commas, such as 123.675,116.28,103.53")
    return values * 3 if len(values) == 1 else values


def weights_argument(command: argparse._ActionsContainer) -> None:
    """The float weights of a model."""
    command.add_argument("--weights", type=Path, metavar="FILE", help="its float weights, a safetensors file")
    command.add_argument("--classes", type=positive, metavar="N", help="if it has another number than usual")


def setting_arguments(command: argparse.ArgumentParser) -> None:
    """How images become inputs; what is not given is not in the namespace."""
    images = command.add_argument_group(
        "how images become inputs (default: as the file or the weights say, or as usual for ImageNet)"
    )
    none = argparse.SUPPRESS
    images.add_argument(
        "--resize",
        type=size_or_none,
        default=none,
        metavar="PIXELS",
        help="make images smaller whose shorter side is longer; 0: never",
    )
    images.add_argument(
        "--crop", type=positive, default=none, metavar="PIXELS", help="side of the square in the middle"
    )
    images.add_argument("--mean", type=three_numbers, default=none, metavar="R,G,B", help="of pixels from 0 to 255")
    images.add_argument("--std", type=three_numbers, default=none, metavar="R,G,B", help="of pixels from 0 to 255")
    images.add_argument("--order", choices=ORDERS, default=none, help="of the channels")
    images.add_argument("--interpolation", choices=INTERPOLATIONS, default=none, help="of a change of size")


def eval_options(command: argparse.ArgumentParser) -> None:
    """What `eval` takes for folders of images."""
    images = command.add_argument_group("on a folder of images")
    images.add_argument("--images", type=Path, metavar="DIR", help="evaluate on these images")
    images.add_argument("--labels", metavar="FILE", help=f"{LABELS_HELP}; without it, only agreement is measured")
    images.add_argument("--count", type=positive, metavar="N", help="images, evenly spread (default: all)")
    images.add_argument("--batch-size", type=positive, default=32, metavar="N", help="images at a time (default: 32)")
    images.add_argument(
        "--model",
        metavar="MODEL",
        help="the float model to agree with, and of which the file is: bitdial's own by name, torchvision:NAME or "
        "timm:NAME (default: that of the file; without --weights, agreement is with the highest width)",
    )
    weights_argument(images)
    setting_arguments(command)
