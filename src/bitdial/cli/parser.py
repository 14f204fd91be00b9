"""The commands and their options. Nothing here imports PyTorch, so that help comes at once."""

import argparse
from pathlib import Path

from bitdial._version import __version__
from bitdial.cli.arguments import BITS_HELP, bits_setting, file_argument, shape
from bitdial.cli.calibrate_llm_options import calibrate_llm_options
from bitdial.cli.calibrate_options import calibrate_options
from bitdial.cli.detection_options import DETECTOR, detector_parser, eval_detection_options
from bitdial.cli.image_options import eval_options
from bitdial.cli.language_options import eval_llm_options
from bitdial.cli.llm_options import LLM, llm_parser
from bitdial.cli.mixed_options import pareto_options, search_options, sensitivity_options
from bitdial.cli.search_llm_options import search_llm_options
from bitdial.cli.train_options import train_options
from bitdial.cli.usage import Parser

# As in the library, which would take a second to import; tests/cli/test_parser.py compares.
KERNELS = ("float", "integer", "packed")
OPSETS = range(21, 26)
INPUT_TYPES = ("float32", "int64")


def build_parser() -> argparse.ArgumentParser:
    """The whole command line; what it parses has the command's name as `action`."""
    parser = Parser(prog="bitdial", description="Train a network once, ship one integer file, run it at any bit-width.")
    parser.add_argument("-v", "--verbose", action="store_true", help="say more about what happens")
    parser.add_argument("--version", action="version", version=f"bitdial {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", dest="action")
    _demo_options(commands.add_parser("demo", help="the whole path on embedded data, in about a minute"))
    train = commands.add_parser("train", help="run a training recipe; run it again to resume")
    train_options(train)
    train.apart = {
        LLM: llm_parser(f"{train.prog} {LLM}"),
        DETECTOR: detector_parser(f"{train.prog} {DETECTOR}"),
    }
    calibrate_options(
        commands.add_parser("calibrate", help="a pretrained model at every width, from images without labels")
    )
    calibrate_llm_options(
        commands.add_parser("calibrate-llm", help="a language model at every width, from a text, without training")
    )
    _eval_options(
        commands.add_parser(
            "eval", help="accuracy of an artifact at each width, or agreement where there are no labels"
        )
    )
    eval_llm_options(
        commands.add_parser("eval-llm", help="perplexity and zero-shot accuracy of a language model at each width")
    )
    _inspect_options(commands.add_parser("inspect", help="what an artifact holds, checked against its digest"))
    _switch_options(commands.add_parser("switch", help="switch an artifact while it is live; time it, evaluate there"))
    _export_options(
        commands.add_parser("export", help="an ONNX file at one setting, or a folder for transformers or vLLM")
    )
    _repack_options(
        commands.add_parser("repack", help="a progressive file of an artifact: its first part runs at the lowest width")
    )
    sensitivity_options(commands.add_parser("sensitivity", help="Hessian trace of each layer: which ones need bits"))
    search_options(commands.add_parser("search", help="the best plan within budgets, by sensitivities or by measuring"))
    search_llm_options(
        commands.add_parser(
            "search-llm", help="the best plan of a language model in the bytes of a width, by measuring"
        )
    )
    pareto_options(commands.add_parser("pareto", help="measure many plans, store those that no other beats, a page"))
    return parser


def _demo_options(demo: argparse.ArgumentParser) -> None:
    demo.add_argument("--out", type=Path, default=Path("demo-out"), help="folder for the results (default: demo-out)")
    demo.add_argument(
        "--mixed", action="store_true", help="mixed precision: bits by layer, found for budgets, in about a minute"
    )


def _eval_options(evaluate: argparse.ArgumentParser) -> None:
    file_argument(evaluate)
    evaluate.add_argument(
        "--bits",
        type=bits_setting,
        action="append",
        metavar="B",
        help=f"{BITS_HELP}; repeat for several (default: every width; on images also every stored plan)",
    )
    _live_arguments(evaluate)
    eval_options(evaluate)
    eval_detection_options(evaluate)


def _inspect_options(inspect: argparse.ArgumentParser) -> None:
    file_argument(inspect)
    inspect.add_argument("--json", action="store_true", help="print JSON instead of tables")


def _switch_options(switch: argparse.ArgumentParser) -> None:
    file_argument(switch)
    switch.add_argument("--bits", type=bits_setting, required=True, metavar="B", help=BITS_HELP)
    _live_arguments(switch)


def _live_arguments(command: argparse.ArgumentParser) -> None:
    """Where and on what a live model runs, and the data that it is tested on."""
    command.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="where the model runs (default: cpu)")
    command.add_argument(
        "--kernels",
        choices=KERNELS,
        help="what the model runs on: float kernels, integer sums, or packed words (default: float; on a GPU integer, "
        "if all activations are quantised)",
    )
    command.add_argument(
        "--data",
        metavar="DATA",
        help="a recipe's test set, the folder with CIFAR-10, or an .npz with arrays x (float, as in training) "
        "and y (class numbers) (default: the test set of the recipe that made the file)",
    )


def _repack_options(repack: argparse.ArgumentParser) -> None:
    file_argument(repack)
    repack.add_argument("out", type=Path, metavar="OUT", help="the file to write")
    kind = repack.add_mutually_exclusive_group()
    kind.add_argument(
        "--progressive",
        action="store_true",
        help="a part for each width, the lowest first, so that the first bytes of the file are enough (the default)",
    )
    kind.add_argument("--whole", action="store_true", help="the other way: a file that is read as a whole")


def _export_options(export: argparse.ArgumentParser) -> None:
    file_argument(export)
    target = export.add_mutually_exclusive_group(required=True)
    target.add_argument("--onnx", type=Path, metavar="OUT", help="an ONNX file to write, at one setting")
    target.add_argument("--hf", type=Path, metavar="OUT", help="a transformers folder to write, with all widths")
    target.add_argument(
        "--compressed-tensors",
        type=Path,
        metavar="OUT",
        help="a folder in the format of compressed-tensors to write, which vLLM loads: weights only, --bits 8 or 4",
    )
    target.add_argument(
        "--gguf", type=Path, metavar="OUT", help="a GGUF file to write, which llama.cpp runs: weights only, one setting"
    )
    export.add_argument("--model", type=Path, metavar="DIR", help="the float model's folder; for all but --onnx")
    export.add_argument(
        "--exact", action="store_const", const=True, help="of --gguf: refuse to round scales to 16 bits"
    )
    export.add_argument(
        "--no-tokenizer", action="store_const", const=True, help="of --gguf: without one, for token ids only"
    )
    export.add_argument("--bits", type=bits_setting, metavar="B", help=f"{BITS_HELP} (default: the highest width)")
    export.add_argument(
        "--input", type=shape, metavar="3x32x32", help="shape of one input (default: that of the file's recipe)"
    )
    export.add_argument("--dtype", choices=INPUT_TYPES, help="of the inputs (default: float32)")
    export.add_argument(
        "--opset",
        type=int,
        choices=OPSETS,
        help="21 stores 2-bit weights as INT4 (default: 25 where a layer has 2 bits, else 21)",
    )
