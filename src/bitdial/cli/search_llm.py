"""The command `bitdial search-llm`."""

import argparse

from bitdial.artifact import read_artifact
from bitdial.cli.measured import show_plans
from bitdial.cli.places import ARTIFACT, writing
from bitdial.cli.search_settings import keep_plans, plan_name
from bitdial.language.likelihoods import check_length
from bitdial.live.load import usable_device
from bitdial.recipes.language_model import LanguageModel
from bitdial.recipes.llm_plans import find_llm_plan, first_rows


def run(options: argparse.Namespace) -> None:
    """Find a plan, show it beside the uniform one, keep it."""
    with writing(options, {ARTIFACT: options.file if options.store else None, "--out": options.out}):
        usable_device(options.device)
        artifact = read_artifact(options.file)
        language = LanguageModel.read(options.model)
        check_length(language.model, options.length)
        rows = first_rows(options.text, language.tokenizer, rows=options.rows, length=options.length)
        plan, _ = find_llm_plan(
            artifact, language, rows, bits=options.bytes_of, device=options.device, seconds=options.seconds
        )
        found = {options.name or plan_name({"average_bits": float(options.bytes_of)}): plan}
        show_plans(options, found)
        keep_plans(options, found)
