"""The options of `bitdial search-llm`. Nothing here imports PyTorch."""

import argparse
from pathlib import Path

from bitdial.cli.arguments import file_argument, plan_name, positive, seconds


def search_llm_options(command: argparse.ArgumentParser) -> None:
    """What `search-llm` takes."""
    file_argument(command)
    command.add_argument(
        "--model", type=Path, required=True, metavar="DIR", help="the float model's transformers folder, with tokenizer"
    )
    command.add_argument("--text", type=Path, required=True, metavar="FILE", help="text in UTF-8, plain or .xz")
    command.add_argument(
        "--bytes-of", type=positive, required=True, metavar="B", help="the budget: the bytes of all layers at B bits"
    )
    command.add_argument("--rows", type=positive, default=8, metavar="N", help="of the text's beginning (default: 8)")
    command.add_argument("--length", type=positive, default=512, metavar="TOKENS", help="of a row (default: 512)")
    command.add_argument("--seconds", type=seconds, metavar="S", help="time limit; then the best so far")
    command.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="where to measure (default: cpu)")
    command.add_argument("--name", type=plan_name, help='of the plan (default: such as "3.0 bits")')
    command.add_argument("--store", action="store_true", help="store the plan in the file, by that name")
    command.add_argument("--out", type=Path, help="JSON file for the plan")
