"""Arguments that several commands take, and how their text is read."""

import argparse
from pathlib import Path

from bitdial.config import check_bit_choices
from bitdial.errors import ConfigError
from bitdial.plan import LayerBits


def file_argument(parser: argparse.ArgumentParser) -> None:
    """The artifact that a command is about."""
    parser.add_argument("file", type=Path, help="an artifact (.safetensors)")


def test_data_argument(parser: argparse.ArgumentParser) -> None:
    """The data that a command tests on."""
    parser.add_argument(
        "--data",
        metavar="DATA",
        help="a recipe's test set, the folder with CIFAR-10, or an .npz with arrays x (float, as in training) "
        "and y (class numbers) (default: the test set of the recipe that made the file)",
    )


def positive(text: str) -> int:
    """A whole number of at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def seed(text: str) -> int:
    """A whole number that every generator takes."""
    value = int(text)
    if not 0 <= value < 1 << 31:
        raise argparse.ArgumentTypeError("must lie between 0 and 2147483647")
    return value


def bit_list(text: str) -> tuple[int, ...]:
    """Widths such as 8,6,4,2."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is not widths with commas between them, such as 8,6,4,2")
    try:
        return check_bit_choices(tuple(map(int, parts)))
    except ConfigError as problem:
        raise argparse.ArgumentTypeError(str(problem)) from problem


def bits_setting(text: str) -> LayerBits | str:
    """A width (4), a pair (4:8), or else the name of a stored plan."""
    parts = text.split(":")
    if len(parts) <= 2 and all(part.isdigit() for part in parts):
        return int(text) if len(parts) == 1 else (int(parts[0]), int(parts[1]))
    return text


def plan_name(text: str) -> str:
    """A name by which --bits finds a plan: none that it would take for a width."""
    if not text.strip() or not isinstance(bits_setting(text), str):
        raise argparse.ArgumentTypeError(f"{text!r} cannot name a plan: --bits would take it for a width, or nothing")
    return text


def shape(text: str) -> tuple[int, ...]:
    """The shape of one input, such as 3x32x32."""
    return tuple(positive(part) for part in text.split("x"))


def layer_list(text: str) -> list[str]:
    """Layer names or patterns, such as layer1.*,layer2.0.conv1."""
    return [part for part in text.split(",") if part]


def pin(text: str) -> tuple[str, LayerBits]:
    """A layer (or pattern) and its bits, such as layer1.0.conv1=8 or layer1.*=4:8."""
    name, sign, bits = text.rpartition("=")
    value = bits_setting(bits)
    if not sign or not name or isinstance(value, str):
        raise argparse.ArgumentTypeError(f"{text!r} is not LAYER=BITS, such as layer1.0.conv1=8")
    return name, value
