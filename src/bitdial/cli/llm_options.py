"""The options of `bitdial train llm`. Nothing here imports PyTorch."""

import argparse
from pathlib import Path

from bitdial.cli.arguments import bit_list, positive, seed, weight_scheme
from bitdial.cli.train_options import SCHEMES, STARTS, UPDATES
from bitdial.cli.usage import Parser

LLM = "llm"
ROTATIONS = ("online", "merged")  # as in the library; tests/cli/test_parser.py compares


def llm_parser(prog: str) -> Parser:
    """The parser of `train llm`. What is not given is not in the namespace: LlmOptions has the default."""
    parser = Parser(
        prog=prog,
        argument_default=argparse.SUPPRESS,
        description="Train a language model of transformers at every width, taught by itself in float; run it again "
        "to resume.",
    )
    parser.set_defaults(recipe=LLM)
    parser.add_argument("--model", type=Path, required=True, metavar="DIR", help="transformers folder, with tokenizer")
    parser.add_argument(
        "--text", type=Path, required=True, nargs="+", metavar="FILE", help="text in UTF-8, plain or .xz"
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for the artifact, its numbers and checkpoints")
    parser.add_argument("--name", help="of the artifact, without its ending (default: by the model and the settings)")
    parser.add_argument("--replace", action="store_true", help="train again although the artifact is there")
    parser.add_argument("--results", type=Path, metavar="FILE", help="JSON file to which a row for each width is added")
    parser.add_argument("--seed", type=seed, help="of the order of the rows and of generated text (default: 0)")
    _quantisation(parser.add_argument_group("quantisation"))
    _training(parser.add_argument_group("training"))
    _data(parser.add_argument_group("text"))
    return parser


def _quantisation(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--bits", type=bit_list, dest="bit_choices", metavar="8,4,3,2", help="widths, descending (default: 8,4,3,2)"
    )
    group.add_argument(
        "--scheme", type=weight_scheme, help=f"weight scheme: {', '.join(SCHEMES)} (default: double_rounding)"
    )
    group.add_argument(
        "--group-size", type=int, metavar="N", help="a weight scale for each N inputs; 0: for each row (default: 32)"
    )
    group.add_argument("--activations", metavar="KIND", help="how activations are quantised (default: float)")
    group.add_argument("--start", choices=STARTS, help="how scales start (default: balanced)")
    group.add_argument(
        "--rotate",
        nargs="?",
        const=ROTATIONS[0],
        choices=ROTATIONS,
        help="rotate the model first, for quantised activations: 'online' (if nothing is named) behind each norm, "
        "'merged' into the weights, which costs nothing at run time and is less accurate at few bits",
    )
    group.add_argument(
        "--calibrated", type=Path, metavar="FILE", help="an artifact of the same model to start from, with its widths"
    )


def _training(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--steps", type=positive, help="of training, rounded up to whole intervals (default: 1000)")
    group.add_argument("--tokens", type=positive, metavar="N", help="to train on, in place of --steps")
    group.add_argument("--batch", type=positive, metavar="ROWS", help="of a step, over all processes (default: 16)")
    group.add_argument("--length", type=positive, metavar="TOKENS", help="of a row (default: 512)")
    group.add_argument(
        "--accumulate", type=positive, metavar="N", help="parts in which a batch goes through the model (default: 1)"
    )
    group.add_argument(
        "--checkpointing",
        action="store_true",
        help="keep the activations of no block, and compute them again: less memory, a third more time",
    )
    group.add_argument(
        "--record",
        action="store_true",
        help="on a GPU, replay a step as one CUDA graph: faster for small models; a loss that is not finite is noticed "
        "up to 50 steps later",
    )
    group.add_argument("--shard", action="store_true", help="under torchrun, each process holds a part of the model")
    group.add_argument("--lr", type=float, help="learning rate, with a cosine to 0 (default: 2e-05)")
    group.add_argument("--scale-lr", type=float, help="learning rate of the scales (default: that of --lr)")
    group.add_argument("--update", choices=UPDATES, help="after each width, or one for all (default: separate)")
    group.add_argument(
        "--lower-weight",
        type=float,
        metavar="W",
        help="what a width's loss counts beside that of the next higher one (default: 1.5)",
    )
    group.add_argument("--clip-norm", type=float, help="largest norm of the weights' gradient (default: 1.0)")
    group.add_argument(
        "--distill-weight",
        type=float,
        help="share of the float model's word in the loss; the text has the rest (default: 1.0)",
    )
    group.add_argument(
        "--train-embeddings",
        action="store_true",
        help="train the embeddings and the head too, which are then stored in float32 (default: they stay)",
    )
    group.add_argument(
        "--evaluations", type=positive, metavar="N", help="intervals, each with its perplexities (default: 10)"
    )
    group.add_argument(
        "--checkpoint-every", type=positive, metavar="STEPS", help="besides one after each interval (default: none)"
    )


def _data(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--generate",
        type=positive,
        metavar="ROWS",
        help="that the float model writes and that are trained on with the text (default: none)",
    )
    group.add_argument(
        "--held-out",
        type=positive,
        metavar="TOKENS",
        help="at the end of the text that perplexity is taken on, a tenth of it at most (default: 32768)",
    )
