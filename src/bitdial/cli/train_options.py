"""The options of `bitdial train`. Nothing here imports PyTorch."""

import argparse
from pathlib import Path

from bitdial.cli.arguments import bit_list, positive, seed, weight_scheme

# As in the library, which would take a second to import; so are the defaults in the texts. tests/cli/test_parser.py
# compares both.
RECIPES = (
    "digits",
    "cifar10-resnet20",
    "cifar10-mobilenetv2",
    "cifar10-resnet20-mixed",
    "cifar10-mobilenetv2-mixed",
    "imagenet",
)
MODELS = ("resnet18", "resnet50", "mobilenet_v2")
SCHEMES = ("double_rounding", "nested", "centred", "truncate", "adabits", "lsq", "dorefa")
TIE_RULES = ("even", "up")
STARTS = ("mse", "balanced", "3std", "lsq", "max")
SCALE_GRADIENTS = ("exact", "printed")
OPTIMIZERS = ("adam", "adamw", "sgd")
UPDATES = ("separate", "accumulated")
READINGS = ("relative", "literal", "layer", "channel", "off")
SCALE_STATES = ("shared", "per_bits")
DISTILLATIONS = ("none", "progressive", "teacher", "in_place", "cascade")
TEACHERS = ("resnet56",)
SAMPLINGS = ("none", "hasb", "random")
NORM_FORMS = ("full", "statistics", "none")


def train_options(train: argparse.ArgumentParser) -> None:
    """The options of `train`. What is not given is not in the namespace: RecipeOptions has the default."""
    train.argument_default = argparse.SUPPRESS
    train.add_argument(
        "recipe",
        choices=RECIPES,
        metavar="RECIPE",
        help=f"{', '.join(RECIPES)}; or llm or nuclei-maskrcnn, with options of their own: bitdial train llm --help",
    )
    train.add_argument("--out", type=Path, required=True, help="folder for the artifact, and checkpoints until then")
    train.add_argument("--replace", action="store_true", help="train again although the artifact is there")
    train.add_argument("--data", type=Path, help="folder with the data set, for recipes that need one (default: data)")
    train.add_argument(
        "--holdout",
        action="store_true",
        help="evaluate on images held out of the training set, not on the test set: for choices",
    )
    train.add_argument("--results", type=Path, help="JSON file to which a row with the outcome is added")
    train.add_argument(
        "--history",
        type=Path,
        help="JSON file for the course of the run, with each width's accuracy after each epoch on the images that the "
        "outcome is measured on: for figures; choices are never made on it",
    )
    train.add_argument("--seed", type=seed, help="seed of the start and of the data order (default: 0)")
    train.add_argument("--epochs", type=positive, help="epochs of each stage (default: the recipe's)")
    train.add_argument(
        "--float-epochs",
        type=positive,
        help="epochs of the float stage (default: as many as --epochs; for the teacher of a mixed stage, 90)",
    )
    _quantisation_options(train.add_argument_group("quantisation"))
    _joint_options(train.add_argument_group("the joint stage"))
    _folder_options(train.add_argument_group("the recipe imagenet: images in DATA/train/<class> and DATA/val/<class>"))
    _mixed_options(train.add_argument_group("the mixed-precision stage (recipes that end in -mixed)"))


def _quantisation_options(scales: argparse._ArgumentGroup) -> None:
    scales.add_argument("--bits", type=bit_list, dest="bit_choices", metavar="8,6,4,2", help="widths, descending")
    scales.add_argument(
        "--scheme", type=weight_scheme, help=f"weight scheme: {', '.join(SCHEMES)} (default: double_rounding)"
    )
    scales.add_argument("--ties", choices=TIE_RULES, help="tie rule of the second rounding (default: even)")
    scales.add_argument("--per-tensor", action="store_false", dest="per_channel", help="one weight scale per layer")
    scales.add_argument("--start", choices=STARTS, help="how scales start (default: mse)")
    scales.add_argument(
        "--scale-gradient",
        choices=SCALE_GRADIENTS,
        help="gradient of the shared weight scale: exact, or as the paper prints it (default: exact)",
    )


def _joint_options(joint: argparse._ArgumentGroup) -> None:
    joint.add_argument("--lr", type=float, help="learning rate (default: the recipe's)")
    joint.add_argument("--batch", type=positive, help="samples in a step (default: the recipe's)")
    joint.add_argument(
        "--recalibrate",
        type=positive,
        metavar="N",
        help="estimate norm statistics anew at the end, from N training batches at each width and searched plan "
        "(default: they stay)",
    )
    joint.add_argument(
        "--cutout", type=positive, metavar="PIXELS", help="blank a square of this side in each image (default: none)"
    )
    joint.add_argument("--weight-decay", type=float, help="of weights; scales have none (default: 5e-05)")
    joint.add_argument("--optimizer", choices=OPTIMIZERS, help="of weights; scales have Adam (default: adam)")
    joint.add_argument(
        "--update",
        choices=UPDATES,
        help="after each width, or one for all, which needs --alrs off (default: separate)",
    )
    joint.add_argument("--alrs", choices=READINGS, help="learning-rate scaling of the scales (default: relative)")
    joint.add_argument("--freeze-scales", action="store_false", dest="learn_scales", help="keep scales at their start")
    joint.add_argument("--scale-lr", type=float, help="learning rate of the scales before ALRS (default: that of --lr)")
    joint.add_argument(
        "--scale-state", choices=SCALE_STATES, help="the optimizer's state of a shared scale (default: shared)"
    )
    joint.add_argument("--distill", choices=DISTILLATIONS, help="knowledge distillation (default: none)")
    joint.add_argument(
        "--teacher",
        choices=TEACHERS,
        help="with --distill teacher or cascade (default: the float model that the run starts from)",
    )
    joint.add_argument("--teacher-seed", type=seed, help="of a --teacher that several runs share (default: --seed)")
    joint.add_argument("--distill-weight", type=float, help="share of the soft loss (default: 0.7)")
    joint.add_argument("--temperature", type=float, help="of both sides of the soft loss (default: 1.0)")


def _folder_options(folders: argparse._ArgumentGroup) -> None:
    folders.add_argument(
        "--model", choices=MODELS, help="what to train (default: what the file that it starts from is of)"
    )
    folders.add_argument(
        "--weights",
        type=Path,
        metavar="FILE",
        help="float weights to start from, as tools/imagenet_weights.py writes",
    )
    folders.add_argument("--size", type=positive, metavar="PIXELS", help="side of the images (default: 224)")
    folders.add_argument(
        "--workers",
        type=positive,
        metavar="N",
        help="processes that read images for each that trains (default: cores)",
    )


def _mixed_options(mixed: argparse._ArgumentGroup) -> None:
    mixed.add_argument(
        "--start-from",
        type=Path,
        metavar="FILE",
        help="what the recipe without -mixed wrote; for imagenet, a file to train on from",
    )
    mixed.add_argument("--sampling", choices=SAMPLINGS, help="how layers are drawn anew (default: none)")
    mixed.add_argument("--sigma", type=float, help="the share of layers drawn anew at the end (default: 0.5)")
    mixed.add_argument("--sigma-warmup", type=positive, help="epochs without any at first (default: 10)")
    mixed.add_argument(
        "--transitions",
        choices=NORM_FORMS,
        help="what norms have for each pair of widths: all, statistics or nothing (default: full)",
    )
