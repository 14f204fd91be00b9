"""The command `bitdial calibrate-llm`."""

import argparse
from typing import Any

from bitdial.calibrate import CalibrateConfig
from bitdial.cli.places import writing
from bitdial.cli.tables import show_table
from bitdial.language.likelihoods import check_length
from bitdial.live.load import usable_device
from bitdial.prepare.config import QuantConfig
from bitdial.recipes.calibration import check_out
from bitdial.recipes.language_model import LanguageModel
from bitdial.recipes.llm_calibration import LlmCalibration, calibrate_llm, embedding_rules, read_rows


def run(options: argparse.Namespace) -> None:
    """Calibrate, save, and show the perplexities."""
    check_out(options.out)
    with writing(options, {"--out": options.out, "the numbers": options.out.with_suffix(".json")}):
        result = calibrate_llm(_run_of(options), tell=print)
    level = result["float_perplexity"]
    rows = [["float", f"{level:.2f}", ""]]
    rows += [[f"{bits} bits", f"{value:.2f}", f"{value / level:.3f}"] for bits, value in result["perplexity"].items()]
    show_table(f"{result['model']} at every width", ["setting", "perplexity", "over float"], rows)
    held = result["held_out"]
    print(f"On {held['rows']} rows of {held['length']} tokens at the end of {options.text.name}")
    print(f"Saved {options.out} ({result['bytes']:,} bytes) and {options.out.with_suffix('.json').name}")
    print(f"As a transformers folder: bitdial export {options.out} --hf OUT --model {options.model}")


def _run_of(options: argparse.Namespace) -> LlmCalibration:
    """What is asked for; ConfigError for what cannot be, before any work."""
    chosen: dict[str, Any] = {} if options.tolerance is None else {"tolerance": options.tolerance}
    config = CalibrateConfig(
        effort=options.effort,
        iterations=options.iterations,
        importance=dict(options.importance),
        scale_importance=dict(options.scale_importance),
        seed=options.seed,
        **chosen,
    )
    common: dict[str, Any] = {
        "bit_choices": options.bits,
        "scheme": options.scheme,
        "group_size": options.group_size or None,
        "activations": options.activations,
        "start": "balanced",
    }
    QuantConfig(**common)  # what it refuses is refused before the model is read
    device = usable_device(options.device)
    language = LanguageModel.read(options.model)
    rules = () if options.embedding_bits is None else embedding_rules(language.model, options.embedding_bits)
    rows, held_out = read_rows(
        options.text, language.tokenizer, rows=options.rows, held_out=options.held_out, length=options.length
    )
    check_length(language.model, options.length)
    language.model.to(device)
    found = LlmCalibration(
        language=language,
        rows=rows,
        held_out=held_out,
        quant=QuantConfig(**common, rules=rules),
        config=config,
        out=options.out,
        rotated=options.rotate,
        batch=options.batch,
        replace=options.replace,
    )
    found.check_places()
    return found
