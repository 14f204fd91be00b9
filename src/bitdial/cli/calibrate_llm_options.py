"""The options of `bitdial calibrate-llm`. Nothing here imports PyTorch."""

import argparse
from pathlib import Path

from bitdial.cli.arguments import bit_list, positive, seed, weight_scheme
from bitdial.cli.calibrate_options import EFFORTS
from bitdial.cli.llm_options import ROTATIONS
from bitdial.cli.train_options import SCHEMES


def calibrate_llm_options(command: argparse.ArgumentParser) -> None:
    """What `calibrate-llm` takes."""
    command.add_argument("model", type=Path, metavar="MODEL", help="transformers folder, with tokenizer")
    command.add_argument("--text", type=Path, required=True, metavar="FILE", help="text in UTF-8, plain or .xz")
    command.add_argument(
        "--out", type=Path, required=True, metavar="FILE", help="the artifact (.safetensors); its numbers beside it"
    )
    command.add_argument("--replace", action="store_true", help="although these files are there")
    command.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="where to calibrate (default: cpu)")
    command.add_argument(
        "--effort", choices=EFFORTS, default="quick", help="the more, the longer, the better (default: quick)"
    )
    command.add_argument("--iterations", type=positive, help="in each block (default: 200 of medium, 2000 of full)")
    command.add_argument(
        "--importance",
        nargs="+",
        type=importance,
        default=[],
        metavar="BITS=NUMBER",
        help="what the error at a width counts, such as 2=0.1 (default: 1 each)",
    )
    command.add_argument(
        "--scale-importance",
        nargs="+",
        type=importance,
        default=[],
        metavar="BITS=NUMBER",
        help="the same where scales are chosen, such as 8=0.3 (default: as --importance, the highest 1 at least)",
    )
    command.add_argument(
        "--tolerance", type=float, metavar="ERROR", help="relative error below which a width is good (default: 0.001)"
    )
    command.add_argument("--seed", type=seed, default=0, help="of what is drawn (default: 0)")
    scales = command.add_argument_group("quantisation")
    scales.add_argument(
        "--bits", type=bit_list, default=(8, 4, 3, 2), metavar="8,4,3,2", help="widths, descending (default: 8,4,3,2)"
    )
    scales.add_argument(
        "--scheme",
        type=weight_scheme,
        default="double_rounding",
        help=f"weight scheme: {', '.join(SCHEMES)} (default: double_rounding)",
    )
    scales.add_argument(
        "--group-size", type=int, default=32, metavar="N", help="a weight scale for each N inputs; 0: for each row"
    )
    scales.add_argument(
        "--activations", default="float", metavar="KIND", help="how activations are quantised (default: float)"
    )
    scales.add_argument(
        "--rotate", nargs="?", const=ROTATIONS[0], choices=ROTATIONS, help="rotate first, for quantised activations"
    )
    scales.add_argument(
        "--embedding-bits", type=int, metavar="B", help="of embedding and head at every width (default: not quantised)"
    )
    text = command.add_argument_group("text")
    text.add_argument("--rows", type=positive, default=32, metavar="N", help="to calibrate on (default: 32)")
    text.add_argument("--held-out", type=positive, default=16, metavar="N", help="rows to measure on (default: 16)")
    text.add_argument("--length", type=positive, default=512, metavar="TOKENS", help="of a row (default: 512)")
    text.add_argument("--batch", type=positive, default=4, metavar="ROWS", help="at a time (default: 4)")


def importance(text: str) -> tuple[int, float]:
    """A width and what it counts, such as 2=0.1."""
    bits, sign, number = text.partition("=")
    try:
        value = float(number)
    except ValueError:
        value = -1.0
    if not sign or not bits.isdecimal() or not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not BITS=NUMBER, such as 2=0.1")
    return int(bits), value
