"""The command `bitdial train`."""

import argparse
import dataclasses
from typing import Any

from bitdial.cli import detection, train_llm
from bitdial.cli.detection_options import DETECTOR
from bitdial.cli.llm_options import LLM
from bitdial.cli.tables import percent, show_table, stored_accuracies
from bitdial.recipes import RECIPES, RecipeOptions
from bitdial.recipes.run import FinishedRun, describe_images
from bitdial.train import distributed


def run(options: argparse.Namespace) -> None:
    """Run a recipe and show its accuracies; of a run that is finished, those of its file.

    Of processes that train together, the first one speaks.
    """
    if options.recipe == LLM:
        train_llm.run(options)
        return
    if options.recipe == DETECTOR:
        detection.run_train(options)
        return
    given = {f.name: getattr(options, f.name) for f in dataclasses.fields(RecipeOptions) if f.name in options}
    try:
        outcome = RECIPES[options.recipe](RecipeOptions(**given))
    except FinishedRun as found:
        if not distributed.is_first():
            return
        _show_accuracies(options.recipe, found.artifact.metrics)
        print(f"{found.path} is there: this run is finished. To train it again, add --replace")
        return
    if not distributed.is_first():
        return
    _show_accuracies(options.recipe, outcome.metrics)
    print(f"Saved {outcome.artifact}")


def _show_accuracies(title: str, metrics: dict[str, Any]) -> None:
    """The table of what a run came to, and on which images."""
    top1 = stored_accuracies(metrics)
    rows = [["float", percent(metrics.get("float_top1"))], *([f"{bits} bits", percent(v)] for bits, v in top1.items())]
    show_table(title, ["setting", "accuracy"], rows)
    print(f"Accuracy on {describe_images(metrics.get('images'))}")
