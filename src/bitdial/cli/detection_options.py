"""The options of `bitdial train nuclei-maskrcnn` and of `bitdial eval --detection`. Nothing here imports PyTorch."""

import argparse
from pathlib import Path

from bitdial.cli.arguments import bit_list, positive, seed, weight_scheme
from bitdial.cli.train_options import SCHEMES, STARTS
from bitdial.cli.usage import Parser

DETECTOR = "nuclei-maskrcnn"
METHODS = ("trained", "calibrated")
MADE_UP = "made-up"  # the folder that --dry-run makes in that of --out


def detector_parser(prog: str) -> Parser:
    """The parser of `train nuclei-maskrcnn`. What is not given is not in the namespace: DetectorOptions has it."""
    parser = Parser(
        prog=prog,
        argument_default=argparse.SUPPRESS,
        description="Train a detector on images with instance maps, in float and then at every width; run it again to "
        "resume.",
    )
    parser.set_defaults(recipe=DETECTOR)
    data = parser.add_mutually_exclusive_group(required=True)
    data.add_argument(
        "--data", type=Path, metavar="DIR", help="images, instance maps and labels.json with the splits train and val"
    )
    data.add_argument(
        "--dry-run", action="store_true", help="the whole path on made-up images with tiny_detector, in a minute"
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for the artifact, its numbers and its page")
    parser.add_argument(
        "--model", help="tiny_detector or torchvision:NAME (default: torchvision:maskrcnn_resnet50_fpn)"
    )
    parser.add_argument(
        "--weights",
        type=Path,
        metavar="FILE",
        help="ImageNet weights of the classifier inside, as tools/imagenet_weights.py writes; its norms are frozen",
    )
    parser.add_argument("--name", help="of the artifact, without its ending (default: by the model and the settings)")
    parser.add_argument("--replace", action="store_true", help="train again although the artifact is there")
    parser.add_argument("--results", type=Path, metavar="FILE", help="JSON file to which a row for each width is added")
    parser.add_argument("--seed", type=seed, help="of the start, the order and the cuts of images (default: 0)")
    _stages(parser.add_argument_group("stages"))
    _images(parser.add_argument_group("images"))
    return parser


def _stages(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--method", choices=METHODS, help="how widths are learned after the float stage (default: trained)"
    )
    group.add_argument(
        "--bits", type=bit_list, dest="bit_choices", metavar="8,6,4,2", help="widths, descending (default: 8,6,4,2)"
    )
    group.add_argument(
        "--scheme", type=weight_scheme, help=f"weight scheme: {', '.join(SCHEMES)} (default: double_rounding)"
    )
    group.add_argument("--start", choices=STARTS, help="how scales start (default: mse)")
    group.add_argument("--float-epochs", type=positive, metavar="N", help="of the float stage (default: 24)")
    group.add_argument("--float-lr", type=float, help="its learning rate, with a cosine to 0 (default: 0.0001)")
    group.add_argument("--epochs", type=positive, metavar="N", help="of the joint stage (default: 12)")
    group.add_argument("--lr", type=float, help="its learning rate, with a cosine to 0 (default: 5e-05)")
    group.add_argument("--weight-decay", type=float, help="of weights; scales have none (default: 0.0001)")
    group.add_argument("--clip-norm", type=float, help="largest norm of the weights' gradient (default: 10.0)")
    group.add_argument("--batch", type=positive, metavar="IMAGES", help="of a step (default: 8)")
    group.add_argument(
        "--evaluate-every", type=positive, metavar="EPOCHS", help="how often precision is taken (default: 4)"
    )
    group.add_argument(
        "--checkpoint-every", type=positive, metavar="STEPS", help="besides one after each epoch (default: 50)"
    )


def _images(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--size",
        type=positive,
        metavar="PIXELS",
        help="shorter side that torchvision scales to (default: 640)",
    )
    group.add_argument("--crop", type=positive, metavar="PIXELS", help="largest side to train on (default: 768)")
    group.add_argument("--count", type=positive, metavar="N", help="images of each split, evenly spread (default: all)")
    group.add_argument(
        "--calibration",
        type=positive,
        metavar="N",
        help="images that scales start from, or calibration (default: 64)",
    )
    group.add_argument(
        "--max-detections", type=positive, metavar="N", help="objects of an image that count (default: 400)"
    )
    group.add_argument("--pictures", type=int, metavar="N", help="images on the page (default: 3)")
    group.add_argument("--workers", type=positive, metavar="N", help="threads that read images (default: 4)")


def eval_detection_options(command: argparse.ArgumentParser) -> None:
    """What `eval` takes for detectors."""
    group = command.add_argument_group("a detector, on a folder of images and instance maps")
    group.add_argument(
        "--detection", type=Path, metavar="DIR", help="average precision of boxes and masks on these, with --count"
    )
    group.add_argument("--split", default="val", help="which of the images in labels.json; all: all (default: val)")
    group.add_argument(
        "--max-detections",
        type=positive,
        metavar="N",
        help="that count in an image (default: the file's, or 100)",
    )
