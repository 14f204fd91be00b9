"""The command `bitdial train llm`."""

import argparse
import dataclasses
from typing import Any

from bitdial.cli.tables import show_table
from bitdial.recipes.llm import llm
from bitdial.recipes.llm_options import LlmOptions
from bitdial.recipes.run import FinishedRun
from bitdial.train import distributed


def run(options: argparse.Namespace) -> None:
    """Train, and show the perplexities; of a run that is finished, those of its file.

    Of processes that train together, the first one speaks.
    """
    given = {f.name: getattr(options, f.name) for f in dataclasses.fields(LlmOptions) if f.name in options}
    given["text"] = tuple(given["text"])
    try:
        outcome = llm(LlmOptions(**given), tell=print)
    except FinishedRun as found:
        if distributed.is_first():
            _show(found.artifact.metrics)
            print(f"{found.path} is there: this run is finished. To train it again, add --replace")
        return
    if distributed.is_first():
        _show(outcome.metrics)
        print(f"Saved {outcome.artifact} and {outcome.artifact.with_suffix('.json').name}")
        print(f"As a transformers folder: bitdial export {outcome.artifact} --hf OUT --model {options.model}")


def _show(metrics: dict[str, Any]) -> None:
    level, before = metrics["float_perplexity"], metrics["start_perplexity"]
    rows = [["float", _number(level), "", ""]]
    for bits, value in metrics["perplexity"].items():
        ratio = "-" if value is None else f"{value / level:.3f}"
        rows.append([f"{bits} bits", _number(value), ratio, _number(before[bits])])
    show_table("Perplexity at every width", ["setting", "perplexity", "over float", "before training"], rows)
    held = metrics["held_out"]
    print(
        f"On {held['rows']} rows of {held['length']} tokens at the end of {', '.join(held['text'])}; trained on "
        f"{metrics['tokens']:,} tokens in {metrics['seconds']:,.0f} s"
    )


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
